"""What users do with parameters and gradients between the passes, and in the forward, where each worker has its rows of them: exact, or an error that
says what to do"""
import pytest
from strategies import *


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 7), nn.ReLU()), nn.Linear(7, 3)).double()


def trained_by(ctx, cbs=None, model=net, opt=Adam, before=noop, after=noop, **kwargs):
    "The weights and what the callback has seen, or the text of the error"
    import fastdist.all
    learn = quiet(learner(n=12, n_val=7, opt=opt, model=model, cbs=cbs, lr=0.02, **kwargs)) # the last batch leaves one of three workers without samples
    before(learn)
    try:
        with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx, watchdog=60): learn.fit(2)
    except (RuntimeError, ValueError, AssertionError) as e: return f'{type(e).__name__}: {e}'
    learn.fit(1)
    return weights(learn), [o for cb in learn.cbs for o in vars(cb).get('noted', ())]


class Seen(Callback):
    "Looks at numbers of parameters and gradients, as one logs them"
    order = 5
    def after_create(self): self.noted = []
    def before_step(self):
        for p in self.model.parameters():
            n = p.grad.norm()
            self.noted += [n.item(), float(p.detach().norm()), (p.grad**2).sum().item(), float(p.detach().max()), float(f'{n:.9f}'), p.grad.abs().max().tolist(),
                          float(p.grad.cpu().numpy().sum()), int(p.grad.norm()*100), *np.ravel(p.detach().tolist())]


class Decides(Callback):
    "Clips by hand, by Python's numbers and by a condition"
    order = 5
    def before_step(self):
        for p in self.model.parameters():
            n = p.grad.norm().item()
            p.grad.mul_(min(1., .05/n))
            if p.grad.abs().mean() > .002: p.grad.mul_(.5)


class Signs(Callback):
    "Gradients whose size is a mean of all: torch leaves such a product to be put together, where each worker has as many rows"
    order = 5
    def before_step(self):
        for p in self.model.parameters(): p.grad = torch.sign(p.grad)*p.grad.abs().mean()


class Assigns(Callback):
    "Looks at the largest numbers, at rows and at all in one row, and writes to some of them; a layer has fewer rows than there are workers"
    order = 5
    def before_fit(self):
        self.noted = []
        self.was = [p.detach().clone() for p in self.model.parameters()]
    def before_step(self):
        ps = list(self.model.parameters())
        for p, w in zip(ps, self.was):
            g = p.grad
            self.noted += [g.abs().max().item(), float(p.detach().min()), g.view(-1)[0].item(), int(g.argmax()), g[-1].sum().item(), g[g > 0].sum().item(),
                           float(F.mse_loss(p.detach(), w)), g.isnan().any().item(), float(g.norm(float('inf'))), float(g.flatten().sort()[0][-1]),
                           *(float(row.sum()) for row in g)]
        self.noted += [torch.tensor([p.grad.norm() for p in ps]).norm().item(), torch.cat([p.grad.view(-1) for p in ps]).abs().mean().item(),
                       torch.stack([p.grad.norm() for p in ps]).max().item()]
        for p in ps:
            p.grad[p.grad.abs() < .002] = 0.
            p.grad[0] = p.grad[0]*.5
            p.grad.masked_fill_(torch.arange(p.numel()).view(p.shape)%5 == 1, .001)
    def after_step(self):
        for p in self.model.parameters(): p.data[-1:] = p.data[-1:]*.9


class Penalty(Callback):
    "Added to the loss"
    def after_loss(self):
        if not self.training: return
        for p in self.model.parameters():
            added = .3*F.mse_loss(p, torch.ones_like(p))+.01*p.view(-1).abs().max()+.02*p[0].pow(2).sum()
            self.learn.loss_grad = self.learn.loss_grad+added


class Zeroes(Callback):
    "Rows, as a view of which is written to"
    order = 5
    def before_step(self):
        for p in self.model.parameters(): p.grad[:1].zero_()


def few_rows():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)).double()


def own_stat(p, n=0, best=None, avg=None, **kwargs):
    norm = p.grad.data.norm().item()
    return dict(n=n+1, best=norm if best is None else min(best, norm), avg=(torch.zeros_like(p.data) if avg is None else avg).lerp_(p.grad.data, .3))
def own_step(p, lr, n, best, avg, **kwargs): p.data.add_(avg, alpha=-lr*min(1., best*3)/n**.5)
def own(params, lr, **kwargs): return Optimizer(params, [own_stat, own_step], lr=lr)


class Replaces(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, dict(lr=lr))
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g['params']:
                if p.grad is not None: p.data = p.data-g['lr']*p.grad


def clip(opt, *_): nn.utils.clip_grad_norm_([p for pg in opt.param_lists for p in pg], .05)
class Clipping(Optimizer):
    "Goes by a norm of all in a step of its own, though each of its functions steps number by number"
    def step(self, closure=None):
        clip(self)
        super().step(closure)
def clipping(params, lr, **kwargs): return Clipping(params, SGD(params, lr, mom=.9).cbs, lr=lr, mom=.9)


class Clamps(Callback):
    def after_step(self):
        for p in self.model.parameters(): p.data = p.data.clamp(-.2, .2)


class Swaps(Callback):
    "An average of the weights takes their places in validation"
    def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        for a, p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .3)
    def swap(self):
        for i, p in enumerate(self.model.parameters()): self.avg[i], p.data = p.data, self.avg[i]
    before_validate = after_validate = swap


class Copies(Callback):
    def before_fit(self): self.model_of = deepcopy(self.model)
    def after_fit(self): del self.model_of


def hooked(learn): learn.model[1][0].weight.register_hook(lambda g: g*.5)


class Teacher(nn.Module):
    "Writes into parameters in its forward"
    def __init__(self):
        super().__init__()
        self.a, self.t, self.c = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 3)
    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.t.parameters(), self.a.parameters()): p.mul_(.9).add_(q, alpha=.1)
        return self.c(self.a(x).tanh())+self.c(self.t(x)).detach()*.1


class Others(Callback):
    "A forward with other parameters than the model's own"
    run_valid = False
    def after_loss(self):
        from torch.func import functional_call
        near = functional_call(self.learn.model, {k: p*1.01 for k, p in self.learn.model.named_parameters()}, self.xb)
        self.learn.loss_grad = self.learn.loss_grad + F.mse_loss(near, self.pred.detach()).float()


class Result:
    def __init__(self, logits): self.logits = logits


class GivesObject(nn.Module):
    def __init__(self, wraps=lambda o: Result(o)):
        super().__init__()
        self.a, self.c = nn.Linear(4, 6), nn.Linear(6, 3)
    def forward(self, x): return Result(self.c(self.a(x).tanh()))


def of_object(o, y): return F.cross_entropy(o.logits, y).float()
of_object.loss_divisor = None # a mean over samples


CASES = dict(seen=lambda: dict(cbs=Seen()), decides=lambda: dict(cbs=Decides()), signs=lambda: dict(cbs=Signs()),
             own=lambda: dict(opt=own), clipping=lambda: dict(opt=clipping),
             replaces=lambda: dict(opt=partial(OptimWrapper, opt=Replaces)), clamps=lambda: dict(cbs=Clamps()), swaps=lambda: dict(cbs=Swaps()),
             assigns=lambda: dict(cbs=Assigns(), model=few_rows), penalty=lambda: dict(cbs=Penalty()), zeroes=lambda: dict(cbs=Zeroes()),
             copies=lambda: dict(cbs=Copies()), hooked=lambda: dict(before=hooked), others=lambda: dict(cbs=Others()),
             teacher=lambda: dict(model=lambda: Teacher().double()), gives_object=lambda: dict(model=lambda: GivesObject().double(), loss=of_object))
IN_SHARDS = r"rank \d: parameters and gradients are in shards.*use strategy='zero1'"
OTHERWISE = r"rank \d: with strategy='\w+' .* DTensors .*use strategy='zero1' or 'ddp'"
HOOKED = r"has a hook .*strategy='\w+'.*use strategy='zero1'"
SHARDS = dict(assigns=OTHERWISE, zeroes=IN_SHARDS, clamps=IN_SHARDS, swaps=IN_SHARDS, copies=OTHERWISE,
              replaces=r"rank \d: Replaces cannot step parameters of which each worker has a part: use strategy='zero1' or 'ddp'",
              hooked=f'1.0.weight {HOOKED}',
              teacher="t.weight is written to in a forward.*use strategy='zero1'", gives_object=f"GivesObject returns .* use strategy='zero1'|{OTHERWISE}")
ERRORS = dict(zero1={k: "with strategy='zero1' would have the gradients of some parameters only: .*use strategy='ddp'" for k in CASES if 'clip' in k},
              zero2=SHARDS, fsdp=dict(SHARDS, penalty=IN_SHARDS))
ONE = {}


def every(ctx, names=None): return {k: trained_by(ctx, **f()) for k, f in CASES.items()}


@pytest.mark.parametrize('size,strategy', [(3, 'ddp'), (2, 'zero1'), (3, 'zero2'), (2, 'fsdp'), (3, 'one unit')])
def test_exact_or_an_error(worlds, size, strategy):
    "'one unit' is 'fsdp' as it is without an argument: all of this small model is gathered as one"
    ONE.update(ONE or every(None))
    ctx = dict(split_batches=True, strategy='fsdp') if strategy == 'one unit' else ctx_of(strategy)
    errors = ERRORS.get(dict(ctx)['strategy'], {})
    if strategy == 'one unit': errors = {k: v for k, v in errors.items() if k != 'penalty'} # which is gathered from the forward to the backward
    for r, found in enumerate(worlds(size)(every, ctx)):
        for nm, o in found.items():
            if nm == 'others' and strategy == 'fsdp': continue # docs/strategies.md: it is trained with the model's own
            if nm in errors: assert isinstance(o, str) and re.search(errors[nm], o, re.S), (nm, r, o)
            else: assert isinstance(o, tuple) and diff(ONE[nm][0], o[0]) < 1e-7 and diff(ONE[nm][1], o[1]) < 1e-6, (nm, r, o if isinstance(o, str) else diff(ONE[nm][0], o[0]))
