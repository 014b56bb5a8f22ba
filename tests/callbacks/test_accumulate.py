"Gradient accumulation: the gradient of one large batch, and one message for it"
import contextlib

import pytest, torch

from fastai.callback.training import GradientClip
from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


def ctx_of(learn, distrib, **ctx):
    import fastdist.all
    return learn.distrib_ctx(split_batches=True, **ctx) if distrib is not None else contextlib.nullcontext()


class SummedSquares(nn.MSELoss):
    "Computes in float64; only its result is a float32, as fastai's recorder needs"
    def __init__(self): super().__init__(reduction='sum')
    def forward(self, inp, targ): return super().forward(inp, targ).float()


def losses(kind):
    return dict(plain=Double, weighted=lambda: Double(weight=torch.tensor([1., 2., 5.], dtype=torch.float64)), ignored=lambda: Double(ignore_index=1),
                summed=SummedSquares)[kind]()


def fitted(distrib, bs, n=23, loss='plain', fit='fit', steps=None, cbs=None, opt=SGD, **ctx):
    "Weights after fits; `distrib` is None for plain fastai, False for a context in one process"
    if steps: ctx['gradient_accumulation_steps'] = steps
    learn = quiet(learner(n=n, bs=bs, loss=losses(loss), shuffle=False, opt=opt, cbs=cbs and cbs(), lr=0.05 if loss != 'summed' else 1e-3,
                          model=mlp_one if loss == 'summed' else None,
                          splitter=lambda m: [params(m[:1]), params(m[1:])] if loss != 'summed' else trainable_params(m)))
    if loss == 'summed': learn.dls = DataLoaders(*[TfmdDL(Items(n, False), bs=bs, num_workers=0) for _ in range(2)])
    with ctx_of(learn, distrib, **ctx):
        if fit == 'frozen':
            learn.freeze()
            learn.fit(1)
            learn.unfreeze()
        learn.fit(2)
        if fit == 'twice': learn.fit(1)
    return weights(learn)


def mlp_one():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1, dtype=torch.float64))


@pytest.mark.parametrize('n,bs,k,loss', [(16, 4, 4, 'weighted'), (7, 2, 3, 'ignored'), (5, 1, 2, 'summed'), (13, 6, 5, 'plain')])
def test_steps_are_a_large_batch(world, n, bs, k, loss):
    want = fitted(None, bs*k, n=n, loss=loss)
    assert diff(want, fitted(False, bs, n=n, loss=loss, steps=k)) < 2e-7
    for w in world(fitted, True, bs, n=n, loss=loss, steps=k): assert diff(want, w) < 2e-7


CASES = dict(frozen=dict(fit='frozen', opt=Adam), clip=dict(cbs=lambda: GradientClip(0.1)))


class EndsEarly(Callback):
    "In the middle of a step"
    def after_batch(self):
        if self.training and self.iter == 3: raise CancelTrainException


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
def test_what_is_dropped_is_in_no_later_step(world2, strategy):
    kw = dict(bs=5, steps=3, cbs=EndsEarly, opt=Adam)
    want = fitted(False, **kw)
    for w in world2(fitted, True, strategy=strategy, **kw): assert diff(want, w) < 2e-7


@pytest.mark.parametrize('case', list(CASES))
def test_steps_with_all_else(world, case):
    want = fitted(None, 15, **CASES[case])
    for w in world(fitted, True, 5, steps=3, **CASES[case]): assert diff(want, w) < 2e-7


@pytest.mark.parametrize('n,bs,n_acc,fit', [(22, 4, 9, 'twice'), (11, 1, 3, 'frozen')])
def test_fastais_callback(world, n, bs, n_acc, fit):
    "As in one process: what is left at the end of a fit goes into the next one"
    kw = dict(n=n, fit=fit, cbs=partial(GradientAccumulation, n_acc))
    want = fitted(None, bs, **kw)
    for w in world(fitted, True, bs, **kw): assert diff(want, w) < 2e-7


def synced(how):
    "For each batch: were gradients averaged in it?"
    import fastdist.all
    from accelerate.utils import DistributedDataParallelKwargs
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    n, res = [0], []
    class Counted(DistributedDataParallelKwargs):
        def register_comm_hook(self, model):
            def hook(state, bucket):
                n[0] += 1
                return allreduce_hook(None, bucket)
            model.register_comm_hook(None, hook)
    class Looks(Callback):
        run_valid, order = False, -500
        def before_batch(self): n[0] = 0
        def after_batch(self): res.append(n[0])
    cbs, ctx = ([GradientAccumulation(10)], {}) if how == 'callback' else ([], dict(gradient_accumulation_steps=2))
    learn = quiet(learner(n=23, bs=5, cbs=[Looks(), *cbs]))
    with learn.distrib_ctx(split_batches=True, kwargs_handlers=[Counted()], **ctx): learn.fit(1)
    return res


def test_messages(world2):
    "One for each step, not for each batch: the fifth is a step's last only where the epoch's end is"
    assert world2(synced, 'callback') == [[0, 1, 0, 1, 0]]*2
    assert world2(synced, 'steps') == [[0, 1, 0, 1, 1]]*2


def both():
    import fastdist.all
    learn = quiet(learner(n=23, bs=5, cbs=GradientAccumulation(10)))
    try:
        with learn.distrib_ctx(gradient_accumulation_steps=2): learn.fit(1)
    except ValueError as e: return str(e)


def test_not_both(world2): assert all('use one of them' in o for o in world2(both)) and 'use one of them' in both()
