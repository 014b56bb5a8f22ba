"Around the step, under every strategy: a gradient scaler with an infinity in one worker, unused parameters, accumulation, errors, and what is sent"
import pytest
from strategies import *

SHARDED = STRATEGIES[1:]


class Fp16OnCpu(MixedPrecision):
    "fastai's `to_fp16`, with a scaler that works on the CPU; without autocast, so that numbers can be compared"
    order = MixedPrecision.order
    def before_fit(self):
        super().before_fit()
        self.autocast, self.learn.scaler = torch.autocast('cpu', enabled=False), torch.amp.GradScaler('cpu', init_scale=2.**10, growth_interval=3)
        self.seen = []
    def after_batch(self):
        if self.training: self.seen.append(self.learn.scaler.get_scale())
    def after_fit(self): pass


def scaled(ctx, inf, clip):
    import fastdist.all
    learn = quiet(learner(n=40, bs=5, opt=partial(SGD, mom=0.9), model=lambda: Scaled(False).to(torch.float64), splitter=splitter, lr=0.05))
    cb = Fp16OnCpu()
    cbs = [cb, *([GradientClip(0.05)] if clip else [])]
    class Spoil(Callback):
        "The first sample of the third batch, which rank 0 has, is infinite"
        order = -30
        def before_batch(self):
            if not inf or not self.training or self.train_iter!=2: return
            if ctx is None or rank()==0: self.learn.xb = (self.xb[0].clone().index_fill_(0, torch.tensor([0]), float('inf')),)
    if ctx is None: learn.fit(1, cbs=[*cbs, Spoil()])
    else:
        from fastdist.world import get_rank as rank
        with learn.distrib_ctx(**ctx): learn.fit(1, cbs=[*cbs, Spoil()])
    return SimpleNamespace(weights=weights(learn), scales=cb.seen, opt=state_of(learn.opt))


@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('inf', [False, True])
def test_gradient_scaler(worlds, inf, clip):
    "The scale halves and the step is skipped in all workers, also in those that have none of the infinity in their rows"
    one = scaled(None, inf, clip)
    assert one.scales[2]==2**(9 if inf else 11) and len(one.scales)==8 and one.weights['scale'].isfinite()
    for strategy in STRATEGIES[inf^clip::2]:  # each of them with and without either, and so by 2 and by 3 workers
        for m in worlds(size_of((strategy, STRATEGIES), (inf, [False, True])))(scaled, ctx_of(strategy), inf, clip):
            assert m.scales==one.scales and diff(one.weights, m.weights) < 1e-7 and diff(one.opt, m.opt) < 1e-6


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.spare, self.b = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
    def forward(self, x): return self.b(self.a(x).relu())


def unused(ctx):
    import fastdist.all
    def model():
        torch.manual_seed(3)
        return Unused().double()
    learn = quiet(learner(n=20, bs=5, opt=Adam, model=model, wd=0.1))
    try:
        if ctx is None: learn.fit(1)
        else:
            with learn.distrib_ctx(**ctx): learn.fit(1)
    except RuntimeError as e: return str(e)
    return weights(learn)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_unused_parameters(worlds, strategy):
    from accelerate.utils import DistributedDataParallelKwargs
    world = worlds(size_of((strategy, STRATEGIES)))
    for m in world(unused, ctx_of(strategy)): assert 'does not depend on spare.weight, spare.bias' in m
    if strategy in ('ddp', 'zero1'):
        for m in world(unused, ctx_of(strategy, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])): assert diff(unused(None), m) < 1e-7


class Sometimes(Unused):
    "Uses `spare` for some samples only: in some batches one worker does and another does not"
    def forward(self, x):
        h, which = self.a(x).relu(), x[:, 0] > 0.8
        return self.b(h+torch.zeros_like(h).masked_scatter(which[:, None], self.spare(h[which])) if which.any() else h)


def sometimes(ctx, decays=False):
    import fastdist.all
    from torch.distributed.tensor import DTensor
    def model():
        torch.manual_seed(3)
        return Sometimes().double()
    learn, grads = quiet(learner(n=20, bs=4, model=model, opt=partial(SGD, mom=0.9))), []
    class Look(Callback):
        order = 2000
        def before_step(self): grads.append(self.model.spare.weight.grad is None)
    class Decay(Callback):
        "Leaves out what no batch has used yet"
        def after_backward(self):
            with torch.no_grad():
                for p in self.model.parameters():
                    if p.grad is not None: p.grad += p*.01
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.fit(2, cbs=Look())
        if decays: learn.fit(1, cbs=[Look(), Decay()])
    return weights(learn), grads


@pytest.mark.parametrize('strategy', ['ddp', 'zero1'])
def test_parameters_that_some_workers_use(worlds, strategy):
    from accelerate.utils import DistributedDataParallelKwargs
    decays = strategy != 'zero2'  # to add to gradients in shards, a callback has to have shards
    one, grads = sometimes(None, decays)
    for m, g in worlds(size_of((strategy, STRATEGIES)))(sometimes, ctx_of(strategy, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), decays):
        assert diff(one, m) < 1e-7 and g==grads


class Short(TfmdDL):
    "Ends sooner than its length says"
    def __len__(self): return super().__len__()+1


def accumulated(ctx, short=False, n=28, **kwargs):
    import fastdist.all
    learn = quiet(learner(n=n, bs=4, opt=Adam, model=lambda: Scaled(False).double(), splitter=splitter, lr=0.05, **kwargs))
    if short: learn.dls.loaders[0].__class__ = Short
    with learn.distrib_ctx(**ctx): learn.fit(2)
    return SimpleNamespace(weights=weights(learn), opt=state_of(learn.opt), losses=[float(o) for o in learn.recorder.losses])


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_accumulation(worlds, strategy):
    "7 batches in steps of 3; the last step has one batch. Also where nobody knows which is the last"
    for short in (False, True):
        one = accumulated(dict(gradient_accumulation_steps=3), short)
        size = size_of((strategy, STRATEGIES), (short, [False, True]))
        for m in worlds(size)(accumulated, ctx_of(strategy, gradient_accumulation_steps=3), short):
            for k in TOL: assert diff(getattr(one, k), getattr(m, k)) < TOL[k], (short, size, k)


TOL = dict(weights=1e-7, opt=1e-6, losses=1e-6)


def left_over(ctx):
    "fastai's `GradientAccumulation` may end a fit in the middle of a step: the next fit goes on from there"
    import fastdist.all
    from contextlib import nullcontext
    learn = quiet(learner(n=22, bs=5, opt=Adam, model=lambda: Scaled(False).double(), splitter=splitter, lr=0.05))
    cb = GradientAccumulation(12)
    with nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.fit(1, cbs=cb)
        learn.fit(1)
    learn.fit(1, cbs=GradientAccumulation(12))
    return SimpleNamespace(weights=weights(learn), opt=state_of(learn.opt), losses=[])


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_gradients_left_over(worlds, strategy):
    one = left_over(None)
    size = size_of((strategy, STRATEGIES))
    for m in worlds(size)(left_over, ctx_of(strategy)):
        for k in TOL: assert diff(getattr(one, k), getattr(m, k)) < TOL[k], (size, k)


def after_an_error(ctx, where, everywhere):
    "The learner after an error in one worker, or in all: whole, plain, and ready to train in one process"
    import fastdist.all
    from fastdist.world import get_rank
    learn = quiet(learner(n=20, bs=5, opt=Adam, model=lambda: Scaled(True).double(), splitter=splitter, lr=0.05))
    learn.fit(1)
    ps, classes, opt, steps, text = list(learn.model.parameters()), [type(m) for m in learn.model.modules()], learn.opt, [], None
    class Fault(Callback):
        def fail(self, at):
            if at==where and self.epoch==1 and (everywhere or get_rank()==1): raise ValueError('the first to fail')
        def before_batch(self): self.fail('before_batch')
        def after_pred(self): self.fail('after_pred')
        def before_step(self): self.fail('before_step')
        def after_step(self): steps.append(1)
        def after_validate(self): self.fail('after_validate')
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        try:
            with learn.distrib_ctx(**ctx): learn.fit(2, cbs=Fault())
        except Exception as e: text = f'{type(e).__name__}: {e}'
    # all are alive, so none has lost anything
    assert 'the first to fail' in text and not any('load a checkpoint' in str(o.message) for o in shown), (text, [str(o.message) for o in shown])
    assert learn.opt is opt and classes==[type(m) for m in learn.model.modules()]
    assert all(a is b for a, b in zip(ps, learn.model.parameters())) and not {'step', 'state_dict'} & set(vars(opt))
    w = weights(learn)
    assert all(o.isfinite().all() for o in w.values() if o.is_floating_point())
    for p in learn.model.parameters(): p.grad = None
    learn.fit(1) # each worker by itself
    assert all(o.isfinite().all() for o in weights(learn).values() if o.is_floating_point())
    return w, len(steps)


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('everywhere', [False, True], ids=['one', 'all'])
def test_after_an_error(worlds, strategy, everywhere):
    # in each place one fails, or all do: two of the three are enough where it is all, who need not hear of each other
    places = ('before_step', 'after_validate' if STRATEGIES.index(strategy) % 2 else 'before_batch') if everywhere else ('before_batch', 'after_validate')
    for where in places:
        size = size_of((strategy, STRATEGIES), (where, places), (everywhere, [False, True]))
        # a step that one worker makes and another does not is the last thing that happens: weights differ then
        check_after(worlds(size)(after_an_error, ctx_of(strategy), where, everywhere), where)


def check_after(every, where):
    w, n = every[0]
    assert n==(4 if where!='after_validate' else 8)
    def learned(o): return {k: v for k, v in o.items() if not k.endswith('num_batches_tracked')} # others were in a forward that the one that failed was not
    for m, k in every: assert k==n and diff(learned(w), learned(m)) < 1e-12 # all have the same weights, those of the steps that were made


def sent(ctx, depth):
    "Collectives of each training step, by name, where they leave Python (those of `DistributedDataParallel` leave from C++)"
    import collections
    import torch.distributed as dist
    import fastdist.all
    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 7), *[nn.Linear(7, 7) for _ in range(depth)], nn.Linear(7, 3)).double()
    learn, counts, res = quiet(learner(n=20, bs=5, opt=Adam, model=model)), collections.Counter(), []
    class Step(Callback):
        order = -1000
        def before_batch(self): counts.clear()
    class StepEnd(Callback):
        order = 2000
        def after_batch(self):
            if self.training: res.append(dict(counts))
    PG, was = dist.ProcessGroup, {}
    for nm in ('allreduce', 'broadcast', 'allgather', 'all_gather_single', '_allgather_base', 'reduce', 'reduce_scatter', 'reduce_scatter_single', '_reduce_scatter_base', 'barrier'):
        if nm not in vars(PG): continue
        def counted(self, *args, _nm=nm, **kwargs):
            counts[_nm] += 1
            return was[_nm](self, *args, **kwargs)
        was[nm] = vars(PG)[nm]
        setattr(PG, nm, counted)
    try:
        with learn.distrib_ctx(**ctx): learn.fit(2, cbs=[Step(), StepEnd()])
    finally:
        for nm, f in was.items(): setattr(PG, nm, f)
    return res[2:]


def test_messages_of_a_step(worlds):
    "P4: a number that grows neither with the parameters, while they are few bytes, nor with the workers; the loss is one of them"
    for size in (2, 3):
        for strategy, expected in dict(ddp=dict(all_gather_single=1), zero1=dict(all_gather_single=2), zero2=dict(all_gather_single=2, reduce_scatter_single=1)).items():
            for depth in ((1, 20) if size==3 else (20,)):
                for steps in worlds(size)(sent, ctx_of(strategy), depth): assert steps==[expected]*6, (strategy, depth, steps)
        every = [worlds(size)(sent, dict(strategy='fsdp', split_batches=True), depth) for depth in ((1, 20) if size==3 else (20,))]
        assert every[0]==every[-1] and all(sum(o.values())==3 for steps in every[0] for o in steps), every[0][0]


def loop_threads():
    def name(thread):
        try: return Path(f'/proc/self/task/{thread}/comm').read_text().strip()
        except OSError: pass  # it has ended since
    return [name(t) for t in os.listdir('/proc/self/task')].count('gloo_tcp_loop')


def threads_of_a_group(strategy):
    from fastai.test_utils import synth_learner
    from fastdist.all import setup_distrib, teardown_distrib
    teardown_distrib()
    before = loop_threads()
    setup_distrib()
    set_seed(1)
    learn = synth_learner()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(strategy=strategy): learn.fit(1)
    inside = loop_threads()
    teardown_distrib()
    return before, inside, loop_threads()


@pytest.mark.parametrize('strategy', ['zero2', 'fsdp'])
def test_its_group_ends(world2, strategy):
    "torch's caches of sharded tensors held the group, whose thread woke 100 times a second until the process ended"
    for before, inside, after in world2(threads_of_a_group, strategy): assert after <= before < inside
