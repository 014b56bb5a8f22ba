"P3: a run that ends at any batch goes on by `resume=`, on another number of workers and with another strategy, and ends as the run that was never ended"
from table import *


class Stops(Callback):
    "Ends the fit before a batch, in all workers or in one; counts the steps. By the class: what a callback itself has is in a checkpoint"
    order, at, exc, rank, steps, run_valid, sync_cancel = 5, None, KeyError, None, 0, False, True
    def before_batch(self):
        from fastdist.all import get_rank
        if self.learn.train_iter == Stops.at and Stops.rank in (None, get_rank()): raise Stops.exc('stopped')
    def after_step(self): Stops.steps += 1


def run(folder, strategy, at=None, exc=KeyError, rank=None, dropout=0., resume=True, train_metrics=False):
    "10 steps, or what is left of them; `None` where they are stopped, and how many were made"
    import fastdist.all
    from_the_start()
    Stops.at, Stops.exc, Stops.rank, Stops.steps = at, exc, rank, 0
    folder.mkdir(exist_ok=True, parents=True)
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)).double()
    learn, res = quiet(learner(n=22, opt=Adam, lr=.02, wd=.1, model=model, metrics=accuracy, cbs=Stops(), path=folder)), None
    learn.recorder.train_metrics = train_metrics
    ctx = {} if strategy is None else ctx_of(strategy)
    if resume: ctx['resume'] = resume if resume is not True else fastdist.all.Resume(folder/'ckpt', every=1)
    try:
        with learn.distrib_ctx(**ctx): learn.fit_one_cycle(2, .02)
        res = result(learn, rates=learn.recorder.lrs, drawn=(random.random(), float(np.random.rand()), torch.rand(1).item()))
    except (KeyError, KeyboardInterrupt): pass
    except fastdist.all.RemoteError: assert rank is not None
    return res, Stops.steps


EVERY = range(10)
def strategy_at(i, part): return STRATEGIES[(i+part*(1+i//4)) % 4]


def parts(folder, part, stop):
    "Of each run, the part of this world: those of odd numbers have two, the others three"
    return {i: run(folder/f'{i}', strategy_at(i, part), stop(i), (KeyError, KeyboardInterrupt)[i//2 % 2]) for i in EVERY if part != 1 or i % 2 == 0}


def test_at_every_batch(worlds, tmp_path):
    "3 workers, then 2, then 1, or 3 and 1, by an exception or Ctrl-C; the strategy is another each time, and no step is made twice"
    want, _ = run(tmp_path/'one', None, resume=False)
    for got in worlds(3)(parts, tmp_path, 0, lambda i: i): assert {i: steps for i, (res, steps) in got.items()} == {i: i for i in EVERY} and not any(o[0] for o in got.values()), got
    later = lambda i: min(i+2, 9)
    for got in worlds(2)(parts, tmp_path, 1, later): assert {i: steps for i, (_, steps) in got.items()} == {i: later(i)-i for i in EVERY if i % 2 == 0}, got
    faults = []
    for i in EVERY:
        res, steps = run(tmp_path/f'{i}', STRATEGIES[i % 4])
        if steps != 10-(later(i) if i % 2 == 0 else i): faults.append((i, steps))
        faults += [(i, o) for o in differences(want, res, 2e-7)]
    assert not faults, faults


def interrupted(folder):
    "Runs of two workers with dropout: whole, ended by one worker alone, and gone on with"
    from fastdist.all import Resume
    def resume(name): return Resume(folder/name, every=2)
    more = dict(dropout=.3, train_metrics=True)
    whole = run(folder/'w', 'ddp', resume=resume('whole'), **more)[0]
    first = run(folder/'w', 'ddp', resume=resume('part'), at=5, rank=1, **more)
    last = run(folder/'w', 'ddp', resume=resume('part'), **more)
    return whole, first, last


def test_one_worker_fails(world2, tmp_path):
    "It goes on from the last checkpoint of its own time, draws the same random numbers, and ends the same to the last bit"
    for whole, first, last in world2(interrupted, tmp_path):
        assert first == (None, 5) and last[1] == 6, (first, last[1])
        assert not (faults := differences(whole, last[0], 0)) and all(whole[k] == last[0][k] for k in ('drawn', 'losses', 'values')), faults
