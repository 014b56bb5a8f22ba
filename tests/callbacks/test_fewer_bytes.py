"Gradients that DDP sends by torch's hooks, as Accelerate's argument says: what is sent, and what it changes"
import contextlib, sys

import pytest, torch
from accelerate.utils import DDPCommunicationHookType as Hook

from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


@contextlib.contextmanager
def bytes_sent():
    """By the torch.distributed.all_reduce of Python, which hooks and fastdist call, and DDP without a hook does not: `(bytes, dtype)` of each,
    but for the sums of metrics at the end of an epoch, and stepped parameters; small tensors go by it as where there are many workers"""
    import torch.distributed as dist
    from fastdist.comm import collectives as pack
    res, real, few = [], dist.all_reduce, pack._few
    def seen(t, *args, **kwargs):
        if sys._getframe(1).f_code.co_name not in ('_sum_up', 'send_owned'): res.append((t.numel()*t.element_size(), t.dtype))
        return real(t, *args, **kwargs)
    dist.all_reduce, pack._few = seen, 0
    try: yield res
    finally: dist.all_reduce, pack._few = real, few


def wide(dtype=torch.float64, seed=3):
    "Smooth: with ReLU, a unit near 0 makes much of a little"
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 67), nn.Tanh(), nn.Linear(67, 31), nn.Tanh(), nn.Linear(31, 3)).to(dtype)


def compressed(hook, options=None, n=40, epochs=4, freeze=False, accumulate=None, dtype=torch.float64, strategy=None, **kwargs):
    "Weights, and bytes sent of each dtype, of all but the messages of a step that every fit has"
    import fastdist.all
    from accelerate.utils import DistributedDataParallelKwargs
    learn = quiet(learner(n=n, bs=6, model=partial(wide, dtype), dtype=dtype, loss=CrossEntropyLossFlat() if dtype == torch.float32 else None,
                          splitter=lambda m: [params(m[:2]), params(m[2:])], **kwargs))
    ctx = dict(strategy=strategy, **(dict(gradient_accumulation_steps=accumulate) if accumulate else {}))
    if hook: ctx['kwargs_handlers'] = [DistributedDataParallelKwargs(comm_hook=hook, comm_state_option=options or {})]
    with learn.distrib_ctx(split_batches=True, **ctx):
        if freeze:
            learn.freeze()
            learn.fit(1)
            learn.unfreeze()
        with bytes_sent() as sent: learn.fit(epochs)
    nbytes = {}
    for b, dt in sent:
        if b > 104: nbytes[dt] = nbytes.get(dt, 0)+b
    return SimpleNamespace(weights=weights(learn), nbytes=nbytes, n=sum(p.numel() for p in learn.model.parameters()))


# The largest change of a weight in 18 steps is below the first (the docs say how large), and above the second: it is compressed
FIGURES = {Hook.BF16: (1e-3, 1e-7), Hook.FP16: (1e-4, 1e-9), Hook.POWER_SGD: (5e-2, 1e-5)}


@pytest.mark.parametrize('freeze', [False, True])
def test_effect_on_weights(world, freeze):
    kw = dict(epochs=3, drop_last=True, freeze=freeze)
    want = world(compressed, None, **kw)[0]
    for hook, (most, least) in FIGURES.items():
        got = world(compressed, hook, dict(start_powerSGD_iter=2) if hook == Hook.POWER_SGD else None, **kw)
        change = diff(want.weights, got[0].weights)
        print(hook, freeze, world.n, change, diff(wide().state_dict(), want.weights))
        assert least < change < most
        for o in got[1:]: assert diff(got[0].weights, o.weights) == 0


@pytest.mark.parametrize('strategy', ['ddp', 'zero1'])
@pytest.mark.parametrize('hook,dtype,part', [(Hook.BF16, torch.bfloat16, 1/2), (Hook.FP16, torch.float16, 1/2), (Hook.POWER_SGD, torch.float32, .45)])
def test_bytes(world, hook, dtype, part, strategy):
    "6 batches an epoch: 12 steps; PowerSGD sends 2 steps whole, and of the others less"
    options = dict(start_powerSGD_iter=2, matrix_approximation_rank=2) if hook == Hook.POWER_SGD else None
    for o in world(compressed, hook, options, epochs=2, drop_last=True, dtype=torch.float32, strategy=strategy):
        assert set(o.nbytes) == {dtype}
        whole = 12*4*o.n
        if hook == Hook.POWER_SGD: assert whole*2/12 < o.nbytes[dtype] < whole*part
        else: assert o.nbytes[dtype] == whole*part


def test_for_steps_only(world2):
    "Of 6 batches in steps of 3"
    for o in world2(compressed, Hook.FP16, accumulate=3, drop_last=True, epochs=2, dtype=torch.float32): assert o.nbytes == {torch.float16: 2*2*2*o.n}
