"Whatever is killed, and when: the same command again ends with the weights, the recorder and the order of samples of the run that was never killed"
import itertools
from kills import WHEN, WHO, killed
from test_resume import *


class StepsOnDisk(Callback):
    "A byte for each step of rank 0"
    order = 1
    def __init__(self, file): self.file = file
    def after_step(self):
        from fastdist.world import get_rank
        if get_rank() == 0:
            with open(self.file, 'ab') as f: f.write(b'.')


def fit(folder, strategy, epochs, exact=True):
    "What the fit has left in this worker: all of it where it is to be the same bit for bit, and what does not depend on the number of workers otherwise"
    import fastdist.all
    from fastdist.checkpoint.resume import Resume
    learn = made(folder) if exact else made(folder, n=26, dropout=0., more=False, Data=Items, bs=6)
    learn.add_cb(StepsOnDisk(folder/'steps'))
    with learn.distrib_ctx(**ctx_of(strategy)): learn.fit_one_cycle(epochs, 1e-2, cbs=Resume(folder/'ckpt', every=2))
    if exact: return found(learn)
    rec = learn.recorder
    return dict(weights=weights(learn), opt=state_of(learn.opt), losses=[float(o) for o in rec.losses], values=[list(o) for o in rec.values])


def mixed(kills, seed):
    "Each way of killing, as often as any other, in random order"
    every = list(itertools.islice(itertools.cycle(itertools.product(WHO, WHEN)), kills))
    random.Random(seed).shuffle(every)
    return every


def compared(tmp_path, hits, seed, how=((2, 'ddp'),)):
    "The differences to a run that was not killed, by rank, and the kills; with starts that differ, the largest difference of each"
    epochs, exact = max(8, 2*len(hits)+4), len(set(how)) == 1  # so many that the fit does not end before
    want, none = killed('fit', tmp_path/'whole', [], seed, epochs, exact, how=how[:1])
    res, told = killed('fit', tmp_path/'killed', hits, seed, epochs, exact, how=how)
    assert not none and len(want[0]['losses']) == (6 if exact else 5)*epochs
    if exact: return {r: d for r, (a, b) in enumerate(zip(want, res, strict=True)) if (d := differ(a, b))}, told
    return {k: max(diff(want[0][k], o[k]) for o in res) for k in want[0]}, told


def test_killed_at_random_moments(tmp_path):
    bad, told = compared(tmp_path, [('worker', 'any'), ('launcher', 'save'), ('all', 'save'), ('workers', 'any'), ('launcher', 'any')], 11)
    assert not bad and len(told) == 5, (bad.keys(), told)
    assert any(o.saved for o in told), told  # it has gone on from some checkpoint
    assert any(o.draft for o in told), told  # and passed over what was not whole
