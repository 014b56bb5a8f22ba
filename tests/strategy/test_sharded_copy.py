"What zero2 and fsdp do with a learner whose model is a sharded copy meanwhile: what is kept, noted or chosen in the learner's own"
import pytest
from fastai.callback.hook import ActivationStats
from strategies import *


def net(): return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 3)).double()


def made(**kwargs):
    import fastdist.all
    torch.manual_seed(3)
    return quiet(learner(n=20, bs=5, n_val=5, model=net, opt=Adam, **kwargs))


def uses_kept(ctx, how):
    "By the model that a script has kept: in the loss, in a forward, in a file"
    learn = made()
    kept, error = learn.model, None
    if how == 'loss': learn.loss_func = lambda p, y: F.cross_entropy(p, y) + .01*sum(p.pow(2).sum() for p in kept.parameters())
    try:
        with learn.distrib_ctx(**ctx):
            if how == 'forward': kept(torch.ones(2, 4).double())
            elif how == 'file': kept.state_dict()
            else: learn.fit(1)
    except RuntimeError as e: error = str(e)
    return error, learn.model is kept, sum(p.numel() for p in kept.parameters())


@pytest.mark.parametrize('how', ['loss', 'forward', 'file'])
def test_the_kept_model_is_not_in_use(world2, how):
    "It has no values meanwhile, and has them again afterwards"
    for strategy in 'zero2', 'fsdp':
        for error, same, n in world2(uses_kept, ctx_of(strategy), how):
            assert error and 'take learn.model' in error, error
            assert same and n == sum(p.numel() for p in net().parameters())


def recomputed(ctx=None):
    learn = made()
    kw = {} if ctx is None else dict(activation_checkpointing=[learn.model[2]])
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx, **kw): learn.fit(1)
    return weights(learn)


def after_a_failed_forward(ctx=None):
    "An input of another shape, which a script catches in all workers"
    learn = made()
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        with pytest.raises(RuntimeError): learn.model(torch.ones(2, 5).double())
        learn.fit(1)
    return weights(learn)


@pytest.mark.parametrize('case', [recomputed, after_a_failed_forward])
def test_as_one_process(world2, case):
    one = case()
    for strategy in 'zero2', 'fsdp':
        for m in world2(case, ctx_of(strategy)): assert diff(one, m) < 1e-7


def noted(ctx, before):
    "fastai's `ActivationStats`, of a fit before the context, in it, and after it"
    stats = ActivationStats()
    learn = made(cbs=stats)
    if before: learn.fit(1)
    with learn.distrib_ctx(**ctx): learn.fit(1)
    n, inside = len(stats.stats), all(o is not None for o in stats.stats[-1])
    learn.fit(1)
    own = {*learn.model.modules()}
    return n, len(stats.stats), all(m in own for m in stats.modules), inside and all(o is not None for o in stats.stats[-1])


@pytest.mark.parametrize('before', [True, False])
def test_modules_that_a_callback_has_noted(world2, before):
    for n, after, own, seen in world2(noted, ctx_of('fsdp'), before): assert n and after and own and seen
