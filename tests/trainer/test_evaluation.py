"An evaluation without a trainer: each worker has a part of the batches, and the metrics and predictions of all"
import contextlib
import pytest
from fastai.callback.core import GatherPredsCallback
from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def by_hand(n, rows, dst, stop=None):
    "Metrics, predictions and numbers of the batches, of an evaluation that a few lines share"
    from fastai.callback.core import CancelValidException
    from fastdist.data.dl import DistributedDL
    from fastdist.fault.cancel import Decisions
    from fastdist.trainer.evaluation import Evaluation
    from fastdist.world import get_rank, setup_distrib
    setup_distrib()
    idle = SimpleNamespace(active=False)
    class Decided(Learner):
        "A learner whose callbacks decide together"
        decisions = idle
        def _call_one(self, event_name):
            d = self.decisions
            return d.call(event_name) if d.active else super()._call_one(event_name)
    class Shares(Callback):
        order = -20
        def before_validate(self): self.numbers = []
        def before_batch(self): self.e.number_batch(); self.numbers.append(self.learn.iter)
        def after_pred(self): self.e.forwards += 1
        def after_batch(self): self.e.add_batch()
        def after_validate(self): self.e.finish()
    class Stops(Callback):
        def after_batch(self):
            if self.learn.iter == stop: raise CancelValidException
    dls = dls_of(4, n, bs=4)
    learn = Decided(dls, mlp(), loss_func=Double(), metrics=[accuracy, F1Score(average='macro')], cbs=[Shares(), Stops()])
    quiet(learn)
    learn.decisions = Decisions(learn)
    learn.dl = DistributedDL(learn.dls.valid, split_batches=rows, evaluate=not rows)
    with learn.validation_context(cbs=[preds := GatherPredsCallback()], inner=False):
        e = learn.shares.e = Evaluation(learn, learn.decisions, dst=dst)
        with e.together():
            assert e.shared and e.by_rows == rows and learn.decisions.active
            learn._with_events(learn.all_batches, 'validate', CancelValidException)
    return [m.value for m in learn.metrics], preds.all_tensors(), learn.shares.numbers, float(learn.loss), get_rank()


def one(n, batches=None):
    dls = dls_of(4, n, bs=4)
    learn = quiet(Learner(dls, mlp(), loss_func=Double(), metrics=[accuracy, F1Score(average='macro')]))
    dl = list(learn.dls.valid)[:batches]
    return list(learn.validate(dl=dl))[1:], learn.get_preds(dl=dl, act=noop), float(learn.loss)


@pytest.mark.parametrize('dst', [None, 0])
@pytest.mark.parametrize('n,rows', [(13, False), (30, False), (24, True)])
def test_as_in_one_process(world, n, rows, dst):
    values, preds, loss = one(n)
    res = world(by_hand, n, rows, dst)
    for v, p, _, last, rank in res:
        assert diff([float(o) for o in v], values) < 1e-6 and abs(last-loss) < 1e-6
        if dst in (None, rank): assert diff(p[0], preds[0]) < 1e-7 and (p[1] == preds[1]).all()
    batches = math.ceil(n/4)
    numbers = [o[2] for o in res]
    assert numbers == [list(range(batches))]*world.n if rows else sorted(sum(numbers, [])) == list(range(batches))


def test_ended_by_one(world):
    "A callback of one worker ends it in the fourth batch, before its predictions are collected"
    _, preds, _ = one(30, 3)
    for _, p, _, last, _ in world(by_hand, 30, False, None, stop=3):
        assert diff(p[0], preds[0]) < 1e-7 and (p[1] == preds[1]).all() and abs(last-one(30, 4)[2]) < 1e-6


def apart():
    "What each rank raises where one is in another call than the others"
    from fastdist.world import get_rank
    learn = quiet(Learner(dls_of(13, 13, bs=4), mlp(), loss_func=Double()))
    calls = [lambda: learn.get_preds(), lambda: learn.validate(), lambda: learn.get_preds(ds_idx=0), lambda: learn.fit(1), lambda: learn.validate()]
    def error(f):
        try: return f()
        except Exception as e: return f'{type(e).__name__}: {e}'
    with learn.distrib_ctx(watchdog=30): return [error(a if get_rank() == 1 else b) for a, b in zip(calls, calls[1:])]


def test_ranks_in_different_evaluations(world):
    "All of them learn which rank is in which call, before any data is sent; and can go on"
    names = ['learn.get_preds of ds_idx=1', 'learn.validate of ds_idx=1', 'learn.get_preds of ds_idx=0', 'a fit', 'learn.validate of ds_idx=1']
    for found in world(apart):
        for text, one, others in zip(found, names, names[1:]):
            assert text.startswith('OutOfStep: ') and f'rank 1 at {one}' in text and f'at {others}' in text and text.count('test_evaluation.py:') == 2, text


def sharded_first():
    "Validation where this process has seen no batch yet, there are fewer than workers, and parameters are sharded; in one process, and in all"
    import fastdist.all
    from strategies import ctx_of
    class NothingSeen(Callback):
        def before_validate(self): vars(self.learn).pop('xb')
    res = []
    for ctx in (lambda l: contextlib.nullcontext(), lambda l: l.distrib_ctx(**ctx_of('fsdp'))):
        learn = quiet(Learner(dls_of(8, 7, bs=4), mlp(), loss_func=Double(), metrics=accuracy))
        with ctx(learn): learn.fit(1, cbs=NothingSeen())
        res.append(list(learn.recorder.values[0][-2:]))
    return res


def test_no_batch_seen_with_shards(world3):
    "A run that goes on at the end of an epoch's training begins so"
    for one, every in world3(sharded_first): assert every == pytest.approx(one, abs=1e-6)


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


class Within(Callback):
    "Evaluates in the middle of a batch, or right after one, and puts back what the batch needs, as in one process"
    def __init__(self, at): setattr(self, at, self.evaluate)
    def evaluate(self):
        if not self.training or self.iter != 1: return
        learn, rec = self.learn, self.learn.recorder
        kept = [(o, {k: vars(o)[k] for k in ks if k in vars(o)}) for o, ks in ((learn, ('xb', 'yb', 'pred', 'loss', 'loss_grad', 'iter', 'n_iter')), (rec, list(vars(rec))))]
        learn.validate()
        learn.training = True
        learn.model.train()
        for o, was in kept: vars(o).update(was)


def evaluated_within(at, distrib, gathers):
    import fastdist.all
    from fastdist.all import GlobalBatchLoss
    learn = quiet(learner(n=23, n_val=17, metrics=accuracy, loss=GlobalBatchLoss(Double()) if gathers else None, cbs=Within(at)))
    with learn.distrib_ctx(split_batches=True) if distrib else contextlib.nullcontext(): learn.fit(2)
    return weights(learn), [float(o) for o in learn.recorder.losses], list(learn.recorder.values[-1])


@pytest.mark.parametrize('gathers', [False, True])
@pytest.mark.parametrize('at', ['before_batch', 'after_pred', 'after_step', 'after_batch'])
def test_an_evaluation_in_a_batch(worlds, at, gathers):
    "The batch that it is in, and those after it, are trained as before: replicas became different models"
    want = evaluated_within(at, False, gathers)
    for got in worlds(2)(evaluated_within, at, True, gathers): assert all(diff(a, b) < 2e-6 for a, b in zip(want, got))
