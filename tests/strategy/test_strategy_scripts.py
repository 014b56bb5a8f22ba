"What scripts have that strategies differ in: layers left out of some steps, norms to clip by, types, buffers, lazy layers, files. Exact, or an error that says what to do"
import pytest
from accelerate.utils import DistributedDataParallelKwargs
from strategies import *

INF = float('inf')


def trained_in(ctx, model, n=30, bs=5, dtype=torch.float64, epochs=1, **kwargs):
    "The weights, or the text of the error"
    import fastdist.all
    torch.manual_seed(3)
    learn = quiet(learner(n=n, bs=bs, n_val=7, opt=kwargs.pop('opt', Adam), wd=0.1, dtype=dtype, model=model, **kwargs))
    try:
        with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(epochs)
    except (RuntimeError, ValueError) as e: return f'{type(e).__name__}: {e}'
    return weights(learn)


class Few(nn.Module):
    "Parameters of fewer rows than there are workers, and a number"
    def __init__(self):
        super().__init__()
        self.a, self.b, self.one, self.scale = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 1), nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(1, 3)
    def forward(self, x): return self.out(self.one(self.b(self.a(x).relu()))*self.scale)


def clipped(ctx, norm): return trained_in(ctx, lambda: Few().double(), cbs=GradientClip(0.05, norm_type=norm), opt=SGD, n=20)


class Dropped(nn.Module):
    "Leaves a layer out of some batches, in all workers"
    def __init__(self, of):
        super().__init__()
        self.a, self.spare, self.b, self.k, self.of = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), 0, of
    def forward(self, x):
        h = self.a(x).relu()
        if self.training: self.k += 1
        return self.b(h if self.training and self.k in self.of else h+self.spare(h))


def dropped(ctx, of): return trained_in(ctx, lambda: Dropped(of).double())


class Grows(nn.Module):
    "With a buffer that is as long as the longest batch"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer('ones', torch.ones(1))
    def forward(self, x):
        if len(x) > len(self.ones): self.ones = x.new_ones(len(x))
        return self.lin(x)*(self.ones[:1])


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3).double(), nn.Parameter(torch.ones(5, 1).double())
    def forward(self, x): return self.b(self.a(x.float()).relu()*self.c[:, 0])


class Penalty(Callback):
    "Of the gradient of the model by its inputs"
    def before_batch(self): self.learn.xb = (self.xb[0].requires_grad_(),)
    def after_loss(self):
        if not self.training: return
        g, = torch.autograd.grad(self.pred.sum(), self.xb[0], create_graph=True)
        self.learn.loss_grad = self.loss_grad+g.pow(2).sum(1).mean()


class OfParameters(Callback):
    "The norm of the gradient is trained, too"
    def after_loss(self):
        if not self.training: return
        gs = torch.autograd.grad(self.loss_grad, list(self.model.parameters()), create_graph=True)
        self.learn.loss_grad = self.loss_grad+sum(g.pow(2).sum() for g in gs)


class Looked(nn.Module):
    "Gradients of the rows that a batch looks up"
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(9, 4, sparse=True), nn.Linear(8, 3)
    def forward(self, x): return self.lin(self.emb(x[:, :2].abs().mul(4).long().clamp(0, 8)).flatten(1))


class Whole(nn.Module):
    "With parameters of whole numbers, as of masks and quantized layers, which are never trained"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        for nm, o in dict(mask=torch.arange(6)%3 > 0, codes=torch.arange(3, dtype=torch.int8), times=torch.tensor(2)).items(): setattr(self, nm, nn.Parameter(o, requires_grad=False))
    def forward(self, x): return self.b(self.a(x)*self.mask)*self.times+self.codes


def to_float(ctx):
    "Trained in another type from the second fit on, with a layer of which some workers have no rows"
    import fastdist.all
    class Float(Callback):
        def before_batch(self): self.learn.xb = (self.xb[0].float(),)
    torch.manual_seed(3)
    learn = quiet(learner(n=20, n_val=7, opt=SGD, model=lambda: Few().double()))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.fit(1)
        learn.model.float()
        learn.fit(1, cbs=Float())
    return weights(learn)


def smooth(): return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)).double()
def lazy(): return nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3)).double()
def materialised():
    model = lazy()
    model(torch.ones(2, 4).double())
    return model


def each(strategy):
    "All cases, by name"
    ctx = None if strategy is None else ctx_of(strategy)
    units = strategy and dict(split_batches=True, strategy=strategy) # all of the model is one
    find = strategy and (ctx if strategy in ('zero2', 'fsdp') else ctx_of(strategy, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]))
    res = {f'clip {o}': clipped(ctx, o) for o in (INF, 'inf', 1, 3.)}
    res |= {'dropped': dropped(find, (2, 5)), 'dropped, not allowed': dropped(ctx, (2, 5)), 'dropped at last': dropped(ctx, (6,))}
    res |= dict(mixed=trained_in(units, Mixed), penalty=trained_in(ctx, smooth, cbs=Penalty()), materialised=trained_in(ctx, materialised))
    res |= dict(sparse=trained_in(ctx, lambda: Looked().double(), opt=partial(SGD, mom=.9)), whole=trained_in(ctx, Whole))
    if strategy in (None, 'ddp', 'zero1'): res |= dict(to_float=to_float(ctx))
    if strategy is not None: res |= dict(lazy=trained_in(ctx, lazy), grows=trained_in(ctx, lambda: Grows().double(), n=22, epochs=2))
    if strategy in (None, 'fsdp'): res['of parameters'] = trained_in(ctx, smooth, cbs=OfParameters())
    return res


OTHERWISE = r"rank \d: with strategy='(zero2|fsdp)' .*use strategy='zero1' or 'ddp'"
ERRORS = {
    'lazy': ('ddp zero1 zero2 fsdp', r'rank \d: 0.weight, 0.bias, 1.weight, .* have no shape yet.*run a batch through the model before'),
    'grows': ('ddp zero1 zero2 fsdp', r'rank \d: the buffer ones of the model differs: .*torch.float64 of shape \(\d,\).*Give it the same shape'),
    'dropped, not allowed': ('ddp zero1', 'the loss does not depend on spare.weight, spare.bias, .*find_unused_parameters=True'),
    'dropped at last': ('ddp zero1', 'the loss does not depend on spare.weight, spare.bias, .*find_unused_parameters=True'),
    'mixed': ('zero2 fsdp', OTHERWISE),
    'penalty': ('zero2 fsdp', OTHERWISE), 'sparse': ('zero2 fsdp', OTHERWISE), 'of parameters': ('fsdp', OTHERWISE)}
ONE = {}


@pytest.mark.parametrize('size,strategy', [(3, 'ddp'), (2, 'zero1'), (2, 'zero2'), (3, 'fsdp')])
def test_exact_or_an_error(worlds, size, strategy):
    ONE.update(ONE or each(None))
    for r, found in enumerate(worlds(size)(each, strategy)):
        for nm, o in found.items():
            fails, text = ERRORS.get(nm, ('', None))
            if strategy in fails.split(): assert isinstance(o, str) and re.search(text, o, re.S), (nm, r, o)
            else: assert isinstance(o, dict) and diff(ONE[nm], o) < (1e-6 if nm in ('mixed', 'to_float') else 1e-7), (nm, r, o if isinstance(o, str) else diff(ONE[nm], o))


def embedded(ctx, **kwargs):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(9, 4, **kwargs), nn.Flatten(), nn.Linear(8, 3)).double()
    class Ids(Callback):
        def before_batch(self): self.learn.xb = (self.xb[0][:, :2].abs().mul(4).long().clamp(0, 8),)
    return trained_in(ctx, lambda: model, n=20, cbs=Ids())


@pytest.mark.parametrize('option', [dict(max_norm=.5), dict(scale_grad_by_freq=True)])
def test_embeddings_that_go_by_their_batch(worlds, option):
    "Each worker would renorm the rows that it looks up, or count its own samples: different models, or other gradients"
    alone, = worlds(1)(embedded, ctx_of('ddp'), **option)
    assert diff(embedded(None, **option), alone) < 1e-7
    for strategy in STRATEGIES:
        for o in worlds(2)(embedded, ctx_of(strategy), **option): assert isinstance(o, str) and re.search(f'ValueError.*0 has {[*option][0]}.*Leave it out', o), o
