"P2: a script catches what ends a fit, and goes on in the same context: right where all workers have it, and told to all within seconds where one alone has it"
import pytest
from learners import *


class Fails(Callback):
    def __init__(self, ranks): self.ranks = ranks
    def before_batch(self):
        from fastdist.world import get_rank
        if self.training and self.learn.train_iter == 2 and get_rank() in self.ranks: raise ValueError('no such image')


def caught(ranks, then=None, distrib=True):
    "Two fits, of which the first fails in `ranks`, or what is called `then`: what has come of it"
    import fastdist.all
    from fastdist.fault.monitor import Monitor
    patience, Monitor.patience = Monitor.patience, 1  # seconds
    learn, res = quiet(learner(n=23, bs=5, bn=True)), []
    try:
        with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
            for f in (partial(learn.fit, 2, cbs=Fails(ranks)), partial(getattr(learn, then or 'fit'), *[1][:then is None])):
                try: res.append(f())
                except Exception as e: res.append((type(e).__name__, getattr(e, 'rank', None), str(e)))
    finally: Monitor.patience = patience
    return res, weights(learn)


def test_by_all(worlds):
    "As in one process: the weights go on from where the first fit has left them"
    want, w = caught([0], distrib=False)
    assert want[0][0] == 'ValueError' and want[1] is None
    for n in (2, 3):
        for res, o in worlds(n)(caught, range(n)): assert res == want and diff(w, o) < 2e-7


@pytest.mark.parametrize('then', [None, 'validate', 'get_preds'])
def test_by_one(world3, then):
    "The others are stopped, and what this one calls next does not meet what they wait in, which ended the process"
    for rank, (res, _) in enumerate(world3(caught, [1], then)):
        (first, who, _), (again, _, says) = res
        assert (first, who) == (('ValueError', None) if rank == 1 else ('RemoteError', 1)), res
        assert again == ('RuntimeError' if rank == 1 else 'RemoteError') and 'no such image' in says, res
