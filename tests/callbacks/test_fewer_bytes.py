"Callbacks that send less: what they send, what they change, and what all workers have in common afterwards"
import contextlib, sys

import pytest, torch
from accelerate.utils import DDPCommunicationHookType

from learners import *


@pytest.fixture(params=[2, 3])
def world(request, worlds): return worlds(request.param)


@contextlib.contextmanager
def bytes_sent():
    """By the torch.distributed.all_reduce of Python, which hooks and fastdist call, and DDP without a hook does not: `(bytes, dtype)` of each,
    but for the sums of metrics at the end of an epoch; small tensors go by it as where there are many workers"""
    import torch.distributed as dist
    from fastdist.comm import pack
    res, real, few = [], dist.all_reduce, pack._few
    def seen(t, *args, **kwargs):
        if sys._getframe(1).f_code.co_name != '_sum_up': res.append((t.numel()*t.element_size(), t.dtype))
        return real(t, *args, **kwargs)
    dist.all_reduce, pack._few = seen, 0
    try: yield res
    finally: dist.all_reduce, pack._few = real, few


def wide(dtype=torch.float64, seed=3):
    "Smooth: with ReLU, a unit near 0 makes much of a little"
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 67), nn.Tanh(), nn.Linear(67, 31), nn.Tanh(), nn.Linear(31, 3)).to(dtype)


def counted(state, bucket):
    "What DDP does without a hook, in a hook: whose messages can be counted"
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    state.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


def compressed(hook, options=None, n=40, epochs=4, fit='fit', accumulate=None, handler=None, dtype=torch.float64, every_rank=True, strategy=None, **kwargs):
    "Weights, and bytes sent of each dtype, of all but the messages of a step that every fit has"
    from fastdist.callbacks.compression import GradientCompression
    from fastdist.world import get_rank
    import fastdist.all
    from accelerate.utils import DistributedDataParallelKwargs
    own = []
    if hook == 'own': hook = (own, counted)
    if hook == 'differs': hook = ['bf16', 'fp16', 'fp16'][get_rank()]
    cbs = [GradientCompression(hook, **(options or {}))] if hook and (every_rank or get_rank() == 0) else []
    learn = quiet(learner(n=n, bs=6, model=partial(wide, dtype), dtype=dtype, loss=CrossEntropyLossFlat() if dtype == torch.float32 else None,
                          splitter=lambda m: [params(m[:2]), params(m[2:])], **kwargs))
    ctx = dict(strategy=strategy, **(dict(gradient_accumulation_steps=accumulate) if accumulate else {}))
    if handler: ctx['kwargs_handlers'] = [DistributedDataParallelKwargs(**handler)]
    with learn.distrib_ctx(split_batches=True, **ctx):
        if fit == 'frozen':
            learn.freeze()
            learn.fit(1, cbs=cbs)
            learn.unfreeze()
        with bytes_sent() as sent: learn.fit(epochs, cbs=cbs)
        plain = None
        if fit == 'then plain':
            with bytes_sent() as plain: learn.fit(1)
    nbytes = {}
    for b, dt in sent:
        if b > 100: nbytes[dt] = nbytes.get(dt, 0)+b
    return SimpleNamespace(weights=weights(learn), nbytes=nbytes, calls=len(own), left=plain and max(b for b, _ in plain), n=sum(p.numel() for p in learn.model.parameters()))


FIGURES = dict(bf16=(1e-3, 1e-7), fp16=(1e-4, 1e-9), powersgd=(5e-2, 1e-5))  # the largest change of a weight in 18 steps is below the first (the docs say how large), and above the second: it is compressed


@pytest.mark.parametrize('fit', ['fit', 'frozen'])
def test_effect_on_weights(world, fit):
    kw = dict(epochs=3, drop_last=True, fit=fit)
    want = world(compressed, None, **kw)[0]
    for hook, (most, least) in FIGURES.items():
        got = world(compressed, hook, dict(start_powerSGD_iter=2) if hook == 'powersgd' else {}, **kw)
        change = diff(want.weights, got[0].weights)
        print(hook, fit, world.n, change, diff(wide().state_dict(), want.weights))
        assert least < change < most
        for o in got[1:]: assert diff(got[0].weights, o.weights) == 0


@pytest.mark.parametrize('strategy', ['ddp', 'zero1'])
@pytest.mark.parametrize('hook,dtype,part', [('bf16', torch.bfloat16, 1/2), ('fp16', torch.float16, 1/2), ('own', torch.float32, 1), ('powersgd', torch.float32, .45)])
def test_bytes(world, hook, dtype, part, strategy):
    "6 batches an epoch: 12 steps; PowerSGD sends 2 steps whole, and of the others less"
    options = dict(start_powerSGD_iter=2, matrix_approximation_rank=2) if hook == 'powersgd' else None
    for o in world(compressed, hook, options, epochs=2, drop_last=True, dtype=torch.float32, strategy=strategy):
        assert set(o.nbytes) == {dtype}
        whole = 12*4*o.n
        if hook == 'powersgd': assert whole*2/12 < o.nbytes[dtype] < whole*part
        else: assert o.nbytes[dtype] == whole*part


def test_only_in_its_fit_and_for_steps(world2):
    for o in world2(compressed, 'bf16', fit='then plain'): assert 0 < o.left < 100
    for o in world2(compressed, 'own', accumulate=3, drop_last=True, epochs=2): assert o.calls == 2*2  # of 6 batches, of one bucket


def test_refused(world2):
    def error(*args, **kwargs):
        def f():
            with pytest.raises((ValueError, RuntimeError)) as e: compressed(*args, **kwargs)
            return type(e.value).__name__, str(e.value)
        return world2(f)
    for r, (cls, text) in enumerate(error('bf16', handler=dict(comm_hook=DDPCommunicationHookType.FP16))):
        assert cls == 'ValueError' and f"rank {r}: GradientCompression(hook='bf16') and DistributedDataParallelKwargs(comm_hook='fp16') both say" in text, text
    for r, (cls, text) in enumerate(error('differs')):
        assert f"rank {r}: GradientCompression has other arguments in rank 1, {{'hook': 'fp16'}}, than in rank 0, {{'hook': 'bf16'}}" in text, text
    assert all('not all workers have the callback GradientCompression' in text for _, text in error('bf16', every_rank=False))


def powerless():
    import warnings
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        compressed('powersgd', epochs=1)
    return [str(w.message) for w in ws if 'GradientCompression' in str(w.message)]


def test_powersgd_that_never_began(world2):
    for ws in world2(powerless): assert len(ws) == 1 and 'start_powerSGD_iter=1000' in ws[0]


def local(every=None, warmup=0, n=23, epochs=2, fit='fit', opt=SGD, accumulate=None, n_acc=None, cb=None, ddp=None, momentum=False, **kwargs):
    "Weights after fits with LocalSGD, of plain fastai where `every` is 0, and what else a test looks at"
    import fastdist.all
    from fastdist.callbacks.compression import LocalSGD
    cbs, seen, steps = [LocalSGD(every, warmup)] if every else [], [], []
    if n_acc: cbs.append(GradientAccumulation(n_acc))
    class Looks(Callback):
        order = 50
        def after_step(self): steps.append(weights(self.learn))
        def before_validate(self): seen.append(weights(self.learn))
    learn = quiet(learner(n=n, bs=6, opt=partial(opt, mom=0.9) if momentum else opt, wd=0.05, splitter=lambda m: [params(m[:1]), params(m[1:])], **kwargs))
    learn.add_cb(Looks())
    if cb: learn.add_cb(cb)
    ctx = dict(gradient_accumulation_steps=accumulate) if accumulate else {}
    if ddp:
        from accelerate.utils import DistributedDataParallelKwargs
        ctx['kwargs_handlers'] = [DistributedDataParallelKwargs(**ddp)]
    with contextlib.nullcontext() if every == 0 else learn.distrib_ctx(split_batches=True, **ctx), bytes_sent() as sent:
        if fit == 'frozen':
            learn.freeze()
            learn.fit(1, cbs=cbs)
            learn.unfreeze()
        learn.fit(epochs, cbs=cbs)
        if fit == 'twice': learn.fit(1, cbs=cbs)
    inner = learn.opt
    while hasattr(inner, 'opt'): inner = inner.opt
    state = {f'{n} {k}': v.clone() for n, p in learn.model.named_parameters() for k, v in inner.state[p].items() if isinstance(v, torch.Tensor)}
    slow = getattr(learn.opt, 'slow_weights', None)
    if slow: state |= {f'slow {i} {j}': t for i, l in enumerate(slow) for j, t in enumerate(l)}
    return SimpleNamespace(weights=weights(learn), seen=seen, steps=steps, sent=[b for b, _ in sent], state=state, n=sum(p.numel() for p in learn.model.parameters()),
                           losses=[float(o) for o in learn.recorder.losses], values=[list(v) for v in learn.recorder.values])


CASES = dict(plain={}, momentum=dict(momentum=True), twice=dict(fit='twice', momentum=True), frozen=dict(fit='frozen'), acc=dict(n_acc=13), steps=dict(accumulate=2),
             bn=dict(bn=True), unused=dict(ddp=dict(find_unused_parameters=True)), small=dict(n=7), weighted=dict(loss=partial(Double, weight=torch.tensor([1., 2., 5.], dtype=torch.float64))))


def with_loss(*args, loss=None, **kwargs): return local(*args, loss=loss and loss(), **kwargs)


@pytest.mark.parametrize('case', list(CASES))
def test_every_step_is_synchronous(world, case):
    "An average after each step is, for plain SGD, the step of the average gradient: that of the whole batch in one process"
    kw = CASES[case]
    want = with_loss(None, **kw) if 'accumulate' in kw else with_loss(0, **kw)
    for o in world(with_loss, 1, **kw):
        assert diff(want.weights, o.weights) < 2e-7 and diff(want.losses, o.losses) < 2e-6 and (not want.state or diff(want.state, o.state) < 2e-7)


def by_hand(every, batches, warmup=0, lr=0.1):
    "Local SGD written down: weights after each step, by worker"
    size = len(batches)
    ms, res = [mlp() for _ in range(size)], []
    for k in range(len(batches[0])):
        for m, bs in zip(ms, batches):
            m.zero_grad()
            nn.functional.cross_entropy(m(bs[k][0]), bs[k][1]).backward()
        with torch.no_grad():
            if k < warmup:
                for ps in zip(*[m.parameters() for m in ms]):
                    g = sum(p.grad for p in ps)/size
                    for p in ps: p.grad = g
            for m in ms:
                for p in m.parameters(): p -= lr*p.grad
            if k+1 > warmup and (k+1-warmup) % every == 0 or k % 4 == 3:
                for ps in zip(*[m.parameters() for m in ms]):
                    mean = sum(p.detach() for p in ps)/size
                    for p in ps: p.copy_(mean)
        res.append([{k: v.clone() for k, v in m.state_dict().items()} for m in ms])
    return res


@pytest.mark.parametrize('every,warmup', [(2, 0), (3, 0), (3, 2), (100, 0), (2, 100)])
def test_is_local_sgd(world, every, warmup):
    "Each worker's weights after each step, averages at the end of an epoch among them, and the evaluated model"
    res = world(plain_local, every, warmup)
    want = by_hand(every, [o.batches for o in res], warmup)
    for r, o in enumerate(res):
        assert len(o.steps) == 8
        for k, w in enumerate(o.steps):
            if k % 4 != 3: assert diff(want[k][r], w) < 1e-6, (r, k)  # the last of an epoch is averaged after the step
        assert diff(want[-1][r], o.weights) < 1e-6
        assert diff(want[3][r], o.seen[0]) < 1e-6
    if warmup == 0: assert diff(res[0].steps[0], res[1].steps[0]) > 1e-4


def refused_local():
    texts = []
    for kw in (dict(ddp=dict(static_graph=True)), dict(cb='another')):
        if kw.get('cb'):
            from fastdist.callbacks.compression import LocalSGD
            kw = dict(cb=LocalSGD(3))
        with pytest.raises(ValueError) as e: local(2, **kw)
        texts.append(str(e.value))
    return texts


def strategy_error(strategy, cb):
    import fastdist.all
    from fastdist.callbacks.compression import GradientCompression, LocalSGD
    learn = quiet(learner(cbs=LocalSGD() if cb == 'LocalSGD' else GradientCompression()))
    with learn.distrib_ctx(strategy=strategy):
        with pytest.raises(ValueError) as e: learn.fit(1)
    return str(e.value)


@pytest.mark.parametrize('strategy,cb', [(s, c) for s in ('zero1', 'zero2', 'fsdp') for c in ('LocalSGD', 'GradientCompression') if (s, c) != ('zero1', 'GradientCompression')])
def test_strategy_refused(world2, strategy, cb):
    uses = "use strategy='ddp', or" if cb == 'LocalSGD' else "use strategy='ddp' or 'zero1', or"
    for r, text in enumerate(world2(strategy_error, strategy, cb)):
        assert f"rank {r}: {cb} does not work with strategy='{strategy}'" in text and uses in text, text


def test_local_refused(world2):
    for r, (static, two) in enumerate(world2(refused_local)):
        assert f'rank {r}: LocalSGD and DistributedDataParallelKwargs(static_graph=True) do not go together' in static
        assert f'rank {r}: this learner has two LocalSGD' in two


def plain_local(every, warmup):
    import fastdist.all
    from fastdist.callbacks.compression import LocalSGD
    steps, seen, batches = [], [], []
    class Looks(Callback):
        order = 50
        def before_batch(self):
            if self.training: batches.append((self.x.clone(), self.y.clone()))
        def after_step(self): steps.append(weights(self.learn))
        def before_validate(self): seen.append(weights(self.learn))
    learn = quiet(learner(n=24, bs=6, wd=0., cbs=[Looks(), LocalSGD(every, warmup)]))
    with learn.distrib_ctx(split_batches=True): learn.fit(2)
    return SimpleNamespace(weights=weights(learn), steps=steps, seen=seen, batches=batches)


# What an optimizer keeps is one thing, how a fit ends another: each of both is met, and each optimizer twice
@pytest.mark.parametrize('opt,how', [('adam', 'fit'), ('ranger', 'fit'), ('wrapped', 'cancelled'), ('ranger', 'epoch'), ('adam', 'frozen'), ('wrapped', 'frozen')])
def test_all_leave_with_the_same(world, opt, how):
    opt = dict(adam=Adam, ranger=ranger, wrapped=partial(OptimWrapper, opt=torch.optim.AdamW))[opt]
    def f():
        from fastai.basics import CancelEpochException, CancelFitException
        at = {}
        class Ends(Callback):
            run_valid, order = False, 100
            def after_step(self):
                at['apart'] = weights(self.learn)
                if self.train_iter == 2 and how == 'cancelled': raise CancelFitException
                if self.train_iter == 2 and how == 'epoch': raise CancelEpochException
        o = local(5, opt=opt, cb=Ends(), n=40, epochs=2, fit='frozen' if how == 'frozen' else 'fit')
        return o, at['apart']
    res = world(f)
    assert max(diff(res[0][1], a) for _, a in res[1:]) > 1e-6  # they did differ
    for o, _ in res[1:]:
        assert diff(res[0][0].weights, o.weights) == 0 and diff(res[0][0].state, o.state) == 0
        assert o.state and all(diff(a, b) == 0 for a, b in zip(res[0][0].seen, o.seen))


def test_no_gradients_are_sent(world):
    "Between averages only what each step has: the sums of loss and samples; with warmup and without"
    def f(every, warmup, **kw):
        from fastdist.callbacks.compression import GradientCompression
        calls = []
        o = local(every, warmup, n=60, epochs=1, cb=GradientCompression((calls, counted)), **kw)
        return len(calls), [b for b in o.sent if b > 100], o.n*8
    for calls, big, whole in world(f, 4, 0): assert calls == 0 and big == [whole]*3  # 10 steps: after 4, 8, and at the end
    for calls, big, whole in world(f, 4, 3): assert calls == 3 and big == [whole]*5
    for calls, big, whole in world(f, 4, 0, accumulate=3): assert calls == 0 and big == [whole]*1  # 4 steps


def interrupted(every, how):
    import warnings
    import fastdist.all, os, signal
    from fastdist.callbacks.compression import LocalSGD
    from fastdist.world import get_rank
    class Stops(Callback):
        run_valid, order = False, 100
        def after_step(self):
            if self.train_iter != 3: return
            if how == 'ctrl-c' and get_rank() == 0: os.kill(os.getpid(), signal.SIGINT)
            if how == 'error': raise ValueError('in all of them')
    learn = quiet(learner(n=60, bs=6, cbs=[LocalSGD(every), Stops()]))
    res = []
    with warnings.catch_warnings(record=True) as ws, learn.distrib_ctx(split_batches=True):
        warnings.simplefilter('always')
        try: learn.fit(1)
        except (KeyboardInterrupt, ValueError) as e: res.append(type(e).__name__)
        res.append(weights(learn))
        if how == 'error':
            learn.remove_cbs([Stops])
            learn.fit(1)
            res.append(weights(learn))
    return res, [str(w.message) for w in ws if 'LocalSGD' in str(w.message)]


def test_ctrl_c_leaves_one_model(world2):
    (a, _), (b, _) = res = world2(interrupted, 100, 'ctrl-c')
    assert a[0] == b[0] == 'KeyboardInterrupt' and diff(a[1], b[1]) == 0 and not any(ws for _, ws in res)


def test_an_error_says_that_models_differ(world2):
    (a, ws), (b, vs) = world2(interrupted, 100, 'error')
    assert diff(a[1], b[1]) > 1e-6 and diff(a[2], b[2]) == 0
    for r, o in enumerate((ws, vs)): assert len(o) == 1 and o[0].startswith(f'rank {r}: a ValueError has ended this fit 4 steps after LocalSGD averaged last'), o


def frozen_midway():
    import fastdist.all
    from fastdist.callbacks.compression import LocalSGD
    class Unfreezes(Callback):
        run_valid, order, seen = False, 0, None
        def before_batch(self):
            if self.train_iter == 3:
                self.seen = weights(self.learn)
                self.learn.unfreeze()
    class After(Callback):
        run_valid, order, seen = False, 900, None
        def before_batch(self):
            if self.train_iter == 3: self.seen = weights(self.learn)
    u, a = Unfreezes(), After()
    learn = quiet(learner(n=60, bs=6, cbs=[LocalSGD(100), u, a], splitter=lambda m: [params(m[:1]), params(m[1:])]))
    learn.freeze()
    with learn.distrib_ctx(split_batches=True): learn.fit(1)
    return u.seen, a.seen, weights(learn)


def test_unfrozen_in_a_fit(world):
    "A new DistributedDataParallel begins with rank 0's weights: what the others have learned is averaged in before"
    res = world(frozen_midway)
    mean = {k: sum(o[0][k] for o in res)/len(res) for k in res[0][0]}
    assert diff(res[0][0], mean) > 1e-6
    for o in res: assert diff(o[1], mean) < 1e-12 and diff(o[2], res[0][2]) == 0


class Tempered(nn.Module):
    "A loss with a temperature to learn"
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5).double())
    def forward(self, o, y): return F.cross_entropy(o/self.temperature, y).float()


def tempered(ctx=None, every=1):
    import fastdist.all
    from fastdist.callbacks.compression import LocalSGD
    loss = Tempered()
    learn = quiet(learner(n=48, bs=12, loss=loss, opt=partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9)), splitter=lambda m: [params(m), params(loss)]))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(1, cbs=LocalSGD(every))
    return {**weights(learn), 'temperature': loss.temperature.detach().clone(), 'momentum': learn.opt.opt.state[loss.temperature]['momentum_buffer']}


def test_local_sgd_beside_the_model(world):
    "Parameters that the optimizer has beside the model's are averaged as these are"
    one = tempered()
    for o in world(tempered, dict(split_batches=True)): assert diff(one, o) < 1e-7 # fastai keeps losses in float32
    res = world(tempered, dict(split_batches=True), 3)
    for o in res: assert diff(res[0], o) == 0


def evaluated(kind, some):
    "Weights of a fit with a callback, in all workers or in rank 0, that evaluates after the first epoch"
    import fastdist.all
    from fastdist.callbacks.compression import GradientCompression, LocalSGD
    from fastdist.world import get_rank
    class Evaluates(Callback):
        order, done = 70, False
        def after_epoch(self):
            if not self.done and some != 'none':
                self.done = True
                self.learn.get_preds()
    learn = quiet(learner(n=48, bs=12, opt=partial(SGD, mom=0.9), cbs=[LocalSGD(3) if kind == 'local' else GradientCompression('fp16')]))
    if some != 'rank 0' or get_rank() == 0: learn.add_cb(Evaluates())
    with learn.distrib_ctx(split_batches=True, watchdog=20): learn.fit(2)
    return weights(learn)


@pytest.mark.parametrize('kind', ['local', 'fp16'])
def test_an_evaluation_in_the_fit(world, kind):
    "It ends nothing: the callbacks go on as without it, also where one worker alone makes it"
    for some in ('all', 'rank 0'):
        want, *_ = world(evaluated, kind, 'none')
        for o in world(evaluated, kind, some): assert diff(want, o) < 1e-12
