"The settings of autocast and of the gradient scaler reach fastai's callback, which stays their only owner; random states that workers share"
import re

import pytest, torch
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from fastai.basics import Callback
from fastai.callback.fp16 import MixedPrecision
from learners import learner, quiet, weights, diff


class OnCPU(MixedPrecision):
    "fastai's, on the device that is there: torch scales and casts on the CPU as well"
    def before_fit(self):
        super().before_fit()
        self.autocast, self.learn.scaler = torch.amp.autocast('cpu', dtype=torch.bfloat16), torch.amp.GradScaler('cpu', **self.kwargs)


class Overflow(Callback):
    "An inf in the gradients of some batches"
    order = 9
    def __init__(self, batches): self.batches = batches
    def before_step(self):
        if self.iter in self.batches: next(self.model.parameters()).grad.fill_(float('inf'))


class Seen(Callback):
    order = 60
    def before_fit(self): self.scales, self.dtypes = [], []
    def before_batch(self): self.hook = self.model[0].register_forward_hook(lambda m, i, o: self.dtypes.append(o.dtype))
    def after_pred(self): self.hook.remove()
    def after_batch(self):
        if self.training: self.scales.append(self.learn.scaler.get_scale())


def seen(*args, **kwargs):
    from fastdist.callbacks.precision import PrecisionSettings
    look = Seen()
    learn = quiet(learner(n=15, bs=5, dtype=torch.float32, cbs=kwargs.pop('owner', OnCPU)(**kwargs.pop('to_fp16', {}))))
    learn.dls.to(kwargs.pop('device', 'cpu'))
    before = weights(learn)
    learn.fit(1, cbs=[PrecisionSettings(*args), look, Overflow(kwargs.pop('overflow', ()))])
    return look, learn, diff(before, weights(learn))


@pytest.mark.parametrize('scaler,overflow,scales', [
    (GradScalerKwargs(init_scale=2., growth_factor=4., growth_interval=1), (), [8., 32., 128.]), (GradScalerKwargs(init_scale=2., growth_factor=4., growth_interval=2), (), [2., 8., 8.]),
    (GradScalerKwargs(init_scale=64., backoff_factor=0.25), (1,), [64., 16., 16.]), (GradScalerKwargs(enabled=False), (), [1., 1., 1.]), (None, (), [65536.]*3), (GradScalerKwargs(), (), [65536.]*3)])
def test_scaler(scaler, overflow, scales):
    look, learn, moved = seen(None, scaler, overflow=overflow)
    assert look.scales == scales and moved > 0 and learn.scaler is None
    assert learn.on_cpu.kwargs == dict(enabled=True)


def test_scaler_that_is_off_trains_as_without():
    a, b = seen(AutocastKwargs(enabled=False), GradScalerKwargs(enabled=False))[1], quiet(learner(n=15, bs=5, dtype=torch.float32))
    b.fit(1)
    assert diff(weights(a), weights(b)) == 0 < diff(weights(seen()[1]), weights(b))


def test_autocast():
    for asked, dtype in ((None, torch.bfloat16), (AutocastKwargs(), torch.bfloat16), (AutocastKwargs(enabled=False), torch.float32)):
        assert {*seen(asked)[0].dtypes} == {dtype}
    for cache in True, False:
        class Cache(Callback):
            def after_pred(self): assert torch.is_autocast_cache_enabled() == cache
        from fastdist.callbacks.precision import PrecisionSettings
        learn = quiet(learner(n=15, bs=5, dtype=torch.float32, cbs=[OnCPU(), Cache()]))
        learn.fit(1, cbs=PrecisionSettings(AutocastKwargs(cache_enabled=cache)))
        assert torch.is_autocast_cache_enabled()


def test_beside_what_to_fp16_says():
    look, learn, _ = seen(None, GradScalerKwargs(init_scale=2.), to_fp16=dict(growth_interval=1))
    assert look.scales == [4., 8., 16.] and learn.on_cpu.kwargs == dict(growth_interval=1, enabled=True)
    with pytest.raises(ValueError, match=r'rank 0: GradScalerKwargs.init_scale=2.0 is not accepted: learn.to_fp16\(init_scale=4.0\) says something else'):
        seen(None, GradScalerKwargs(init_scale=2.), to_fp16=dict(init_scale=4.))
    assert seen(None, GradScalerKwargs(init_scale=2.), to_fp16=dict(init_scale=2.))[0].scales == [2.]*3


@pytest.mark.parametrize('cb,handlers,msg', [
    (None, (AutocastKwargs(), None), r'kwargs_handlers=AutocastKwargs\(.*call learn.to_fp16\(\) or learn.to_bf16\(\)'), (None, (None, GradScalerKwargs()), r'kwargs_handlers=GradScalerKwargs\(.*call learn.to_fp16'),
    ('bf16', (None, GradScalerKwargs()), 'bf16 has the range of float32 and uses no gradient scaler')])
def test_refused_and_no_trace(cb, handlers, msg):
    from fastdist.callbacks.precision import PrecisionSettings
    learn = quiet(learner(n=5, dtype=torch.float32, cbs=OnCPU(cb) if cb else None))
    before, cbs = weights(learn), list(learn.cbs)
    with pytest.raises(ValueError, match=msg): learn.fit(1, cbs=PrecisionSettings(*handlers))
    assert diff(before, weights(learn)) == 0 and getattr(learn, 'scaler', None) is None
    if cb: assert learn.on_cpu.autocast is None


def on_a_gpu():
    "Scales and types of a fit with settings, and types of one without"
    look, _, moved = seen(AutocastKwargs(enabled=False), GradScalerKwargs(init_scale=2., growth_factor=4., growth_interval=1), owner=MixedPrecision, device='cuda')
    return look.scales, {str(o) for o in look.dtypes}, moved, {str(o) for o in seen(owner=MixedPrecision, device='cuda')[0].dtypes}


def test_on_a_gpu(real_gpu_worlds):
    (scales, types, moved, plain), = real_gpu_worlds(1)(on_a_gpu)
    assert scales == [8., 32., 128.] and types == {'torch.float32'} and moved > 0 and plain == {'torch.float16'}


def launched(word, strategy=None, **ctx):
    "By case: the weights after fits in a context that the launcher was told `word` for, or the error, and what is left of it"
    import os
    import fastdist.all
    from strategies import Bf16OnCpu, Scaled, SGD, accuracy, ctx_of, partial, splitter
    kwargs = dict(split_batches=True) if strategy is None else ctx_of(strategy, **ctx)
    def model():
        torch.manual_seed(3)
        return Scaled(False)
    def trained(own=(), given=(), kw={}, told=word):
        learn, seen = quiet(learner(n=20, bs=5, n_val=17, opt=partial(SGD, mom=0.9), lr=0.05, model=model, splitter=splitter, dtype=torch.float32, cbs=[o() for o in own], metrics=accuracy)), set()
        class Look(Callback):
            def after_pred(self): seen.add((self.training, str(torch.get_autocast_dtype('cpu')) if torch.is_autocast_enabled('cpu') else 'none'))
        cbs, attrs = list(learn.cbs), {*vars(learn)}
        if told: os.environ['ACCELERATE_MIXED_PRECISION'] = told
        try:
            with learn.distrib_ctx(**kwargs, **kw):
                learn.fit(1, cbs=[Look(), *(o() for o in given)])
                learn.validate()
        except ValueError as e: return str(e)
        finally:
            os.environ.pop('ACCELERATE_MIXED_PRECISION', None)
            assert list(learn.cbs) == cbs and not {o for o in {*vars(learn)}-attrs if 'precision' in o} and not torch.is_autocast_enabled('cpu') and getattr(learn, 'scaler', None) is None
        return weights(learn), seen
    own = lambda: Bf16OnCpu('bf16')
    return dict(told=trained(), want=trained([own], told=None), both=trained([own]), in_fit=trained(given=[own]), plain=trained(told=None),
                off=trained(kw=dict(kwargs_handlers=[AutocastKwargs(enabled=False)])))


@pytest.mark.parametrize('n,strategy', [(1, None), (2, 'ddp'), (3, 'fsdp')])
def test_launched_with_bf16(worlds, n, strategy):
    "accelerate launch --mixed_precision bf16 trains as a learner with fastai's MixedPrecision, in training and in validation, unless there is one"
    for found in [launched('bf16')] if n == 1 else worlds(n)(launched, 'bf16', strategy):
        want, cast = found['want']
        assert cast == {(True, 'torch.bfloat16'), (False, 'torch.bfloat16')}
        for nm in ('told', 'both', 'in_fit'): assert diff(want, found[nm][0]) == 0 and found[nm][1] == cast, nm
        assert found['off'][1] == {(True, 'none'), (False, 'none')} and diff(found['off'][0], found['plain'][0]) == 0 < diff(want, found['plain'][0])


def test_launched_with_what_cannot_be(world2):
    for word, text in (('fp16', r"rank \d: mixed_precision='fp16' is not accepted: \(of the launcher\) a CPU trains in bf16 .*--mixed_precision bf16"),
                       ('fp8', r"rank \d: mixed_precision='fp8' is not accepted: \(of the launcher\) fastai trains in fp16 or bf16")):
        for found in [launched(word), *world2(launched, word, 'ddp')]: assert isinstance(found['told'], str) and re.search(text, found['told'])
