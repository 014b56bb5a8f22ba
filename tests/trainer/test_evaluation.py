"Evaluations in a context: where workers are in different ones, where some have no batch, and in the middle of a fit"
import contextlib
import pytest
from learners import *


def apart():
    "What each rank raises where one is in another call than the others"
    from fastdist.world import get_rank
    learn = quiet(Learner(dls_of(13, 13, bs=4), mlp(), loss_func=Double(), metrics=accuracy))
    calls = [lambda: learn.get_preds(), lambda: learn.validate(), lambda: learn.get_preds(ds_idx=0), lambda: learn.fit(1), lambda: learn.validate()]
    def error(f):
        try: return f()
        except Exception as e: return f'{type(e).__name__}: {e}'
    with learn.distrib_ctx(watchdog=30):
        res = [error(a if get_rank() == 1 else b) for a, b in zip(calls, calls[1:])]
        if get_rank() == 1: learn.metrics = L(AvgMetric(accuracy), AvgMetric(error_rate))
        return res, error(learn.validate)


def test_ranks_in_different_evaluations(world3):
    "All of them learn which rank is in which call, or has other metrics, before any data is sent; and can go on"
    names = ['learn.get_preds of ds_idx=1', 'learn.validate of ds_idx=1', 'learn.get_preds of ds_idx=0', 'a fit', 'learn.validate of ds_idx=1']
    for found, of_metrics in world3(apart):
        for o in 'OutOfStep: ', 'rank 1 at the metrics (', 'AvgLoss AvgMetric AvgMetric': assert o in of_metrics, of_metrics
        for text, one, others in zip(found, names, names[1:]):
            assert text.startswith('OutOfStep: ') and f'rank 1 at {one}' in text and f'at {others}' in text and 'test_evaluation.py:' in text, text


def changed_inputs():
    "Evaluations of two batches, whose inputs a callback changes: those of training are other ones, and those of the data set fail; in one process, and in all, with shards"
    import fastdist.all
    from strategies import ctx_of
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.four,self.two = nn.Linear(4, 3).double(),nn.Linear(2, 3).double()
        def forward(self, x): return self.four(x)+self.two(x[:,:2]) if self.training else self.two(x)
    class Halves(Callback):
        seen = 0
        def before_batch(self):
            if not self.training: self.learn.xb = (self.xb[0][:,2:],)
        def after_batch(self): self.seen += not self.training
    res = []
    for ctx in (lambda l: contextlib.nullcontext(), lambda l: l.distrib_ctx(**ctx_of('fsdp'))):
        learn = quiet(learner(n=8, n_val=7, bs=4, model=TwoInputs, metrics=accuracy, cbs=Halves()))
        with ctx(learn):
            values = [list(learn.validate())]
            learn.fit(1)
            values.append(list(learn.recorder.values[0][-2:]))
            preds = learn.get_preds()[0]
        res.append((values, preds, learn.halves.seen))
    return res


def test_changed_inputs_with_shards(world3):
    "Workers for which there is no batch make the forward of one as callbacks leave it; those see none in `after_batch`"
    seen = []
    for (one, preds, n), (every, all_preds, mine) in world3(changed_inputs):
        for a,b in zip(one, every, strict=True): assert b == pytest.approx(a, abs=1e-6)
        assert diff(preds, all_preds) < 1e-12 and n == 6
        seen.append(mine)
    assert seen == [3,3,0]


class Counts(Callback):
    "Accuracy of a validation, by hand"
    def __init__(self, together): self.together = together
    def before_validate(self): self.right = self.n = 0
    def after_batch(self):
        if not self.training: self.right, self.n = self.right+(self.pred.argmax(1) == self.y).sum().item(), self.n+len(self.y)
    def after_validate(self):
        if self.together:
            from fastdist.world import all_reduce_dict
            vars(self).update(all_reduce_dict(dict(right=self.right, n=self.n)))
        self.learn.right = self.right/self.n


class Remembers:
    "A loss that weighs by how often it has seen a class"
    loss_divisor = None
    def __init__(self): self.seen = torch.ones(3, dtype=torch.float64)
    def __call__(self, p, y):
        self.seen = self.seen+torch.bincount(y, minlength=3)
        return F.cross_entropy(p, y, 1/self.seen).float()


def kept_numbers(distrib, cb=None, loss=None):
    "What a callback has counted, and what is said of it"
    from fastdist.world import current_world
    learn = quiet(learner(n=24, n_val=20, bs=6, cbs=cb and Counts(cb == 'together'), loss=loss and Remembers()))
    with warnings.catch_warnings(record=True) as seen, learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext():
        warnings.simplefilter('always')
        learn.fit(2)
    return getattr(learn, 'right', None), [str(o.message) for o in seen if 'other numbers in each worker' in str(o.message)]


@pytest.mark.parametrize('kind', ['alone', 'together', 'loss'])
def test_numbers_that_each_worker_has_of_its_own_batches(kind, worlds):
    "One warning, by rank 0, that names them, and says how they are put together: then they are those of one process"
    kwargs = dict(loss=True) if kind == 'loss' else dict(cb=kind)
    for n in 2, 3:
        right, texts = zip(*worlds(n)(kept_numbers, True, **kwargs))
        said = dict(alone='the callback Counts (right, n)', loss='the loss function (seen)').get(kind)
        assert [len(o) for o in texts] == [int(said is not None)]+[0]*(n-1) and all(said in o for o in texts[0]), texts
        if kind == 'together': assert right == (kept_numbers(False, **kwargs)[0],)*n
