"""What scripts do that strategies differ in, with parameters and gradients between the passes, backward passes of their own, models of
which a worker has a part: the weights of one process, or an error that says what to do.
(contract/test_every_strategy.py has what all can.)"""
from unittest.mock import patch as put

import pytest
from fastai.callback.hook import ActivationStats
from table import *

case = Cases()


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 7), nn.ReLU()), nn.Linear(7, 3)).double()


def few_rows():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 1), nn.Linear(1, 3)).double()


def fitted(within, before=noop, cls=Learner, ctx=None, **kwargs):
    """Two epochs in the context, of whose batches the last leaves one of three workers without samples, and one after it; weights, and what
    a callback has noted"""
    learn = quiet(learner(**{**dict(n=12, n_val=7, opt=Adam, model=net, lr=.02), **kwargs}))
    learn.__class__ = cls
    before(learn)
    with within(learn, **(ctx or {})): learn.fit(2)
    learn.fit(1)
    return dict(weights=weights(learn), noted=[o for cb in learn.cbs for o in vars(cb).get('noted', ())])


def add(name, tol=1e-7, **kwargs): case(lambda within: fitted(within, **{k: v() if k in ('cbs', 'loss') else v for k, v in kwargs.items()}),
                                        tol=tol, name=name)


# Callbacks that look at, and write to, parameters and gradients

class Decides(Callback):
    "Looks at the numbers of parameters and gradients, and clips by hand, by Python's numbers and by a condition"
    order = 5
    def before_fit(self): self.noted = []
    def before_step(self):
        for p in self.model.parameters():
            n = p.grad.norm().item()
            self.noted += [n, float(p.detach().max()), (p.grad**2).sum().item(), p.grad.abs().max().tolist(),
                           *np.ravel(p.detach().tolist())]
            p.grad.mul_(min(1., .05/n))
            if p.grad.abs().mean() > .002: p.grad.mul_(.5)


class Assigns(Callback):
    "Looks at rows and at all in one row, and writes to some of them; a layer has fewer rows than there are workers"
    order = 5
    def before_fit(self): self.noted = []
    def before_step(self):
        for p in self.model.parameters():
            self.noted += [p.grad.view(-1)[0].item(), int(p.grad.argmax()), p.grad[-1].sum().item(), float(p.grad.flatten().sort()[0][-1])]
            p.grad[p.grad.abs() < .002] = 0.
            p.grad[0] = p.grad[0]*.5
    def after_step(self):
        for p in self.model.parameters(): p.data[-1:] = p.data[-1:]*.9


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


# Optimizers

def own_stat(p, n=0, best=None, avg=None, **kwargs):
    norm = p.grad.data.norm().item()
    return dict(n=n+1, best=norm if best is None else min(best, norm),
                avg=(torch.zeros_like(p.data) if avg is None else avg).lerp_(p.grad.data, .3))
def own_step(p, lr, n, best, avg, **kwargs): p.data.add_(avg, alpha=-lr*min(1., best*3)/n**.5)
def own(params, lr, **kwargs): return Optimizer(params, [own_stat, own_step], lr=lr)


class Clipping(Optimizer):
    "Goes by a norm of all in a step of its own, though each of its functions steps number by number"
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for pg in self.param_lists for p in pg], .05)
        super().step(closure)
def clipping(params, lr, **kwargs): return Clipping(params, SGD(params, lr, mom=.9).cbs, lr=lr, mom=.9)


class ClosureStep(Learner):
    def _step(self):
        def closure():
            self.opt.zero_grad()
            loss = self.loss_func(self.model(*self.xb), *self.yb)
            loss.backward()
            return loss
        self.opt.step(closure)


class SamOpt(torch.optim.SGD):
    "It calls the closure between its two steps"
    @torch.no_grad()
    def step(self, closure):
        ps = [p for g in self.param_groups for p in g['params']]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        moved = [p.grad*(.5/norm) for p in ps]
        for p, e in zip(ps, moved): p.add_(e)
        with torch.enable_grad(): closure()
        for p, e in zip(ps, moved): p.sub_(e)
        return super().step()


# Backward passes and gradients of one's own

class Penalty(Callback):
    "Of the parameters, added to the loss"
    def after_loss(self):
        if not self.training: return
        for p in self.model.parameters(): self.learn.loss_grad = self.learn.loss_grad+.3*F.mse_loss(p,
            torch.ones_like(p))+.02*p[0].pow(2).sum()


class GradientPenalty(Callback):
    "WGAN-GP's kind: a gradient of a gradient"
    run_valid = False
    def after_loss(self):
        x = self.xb[0].detach().clone().requires_grad_()
        g, = torch.autograd.grad(self.learn.model(x).sum(), x, create_graph=True)
        self.learn.loss_grad = self.learn.loss_grad + .5*((g.norm(dim=1)-1)**2).mean()


class PartBackward(Callback):
    "An auxiliary loss of a part of the model, whose forward is called by itself"
    run_valid = False
    def after_pred(self): self.learn.model[0](*self.xb).pow(2).mean().backward()


class OwnStep(Callback):
    "In place of all that fastai does with a batch"
    run_valid = False
    def before_batch(self):
        from fastai.callback.core import CancelBatchException
        self.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        self.learn.opt.step()
        self.learn.opt.zero_grad()
        raise CancelBatchException()


class TwoSteps(Learner):
    "The loss that counts is that of the last"
    def _do_one_batch(self):
        super()._do_one_batch()
        if self.training: super()._do_one_batch()


class Recorded(Learner):
    "As optimizers need it that go by second derivatives"
    def _backward(self): self.loss_grad.backward(create_graph=True)


class Made(Callback):
    "Gradients that no backward pass has made, each worker's its own"
    run_valid = False
    def before_backward(self):
        from fastai.callback.core import CancelBackwardException  # not that of this module, which travels by value
        ps = list(self.learn.model.parameters())
        for p, g in zip(ps, torch.autograd.grad(self.learn.loss_grad, ps)): p.grad = g.clone()
        raise CancelBackwardException()


# Models

class Dropped(nn.Module):
    "Leaves a layer out of some batches, in all workers"
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.spare, self.b, self.k = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3), 0
    def forward(self, x):
        h = self.a(x).relu()
        self.k += self.training
        return self.b(h if self.training and self.k in (2, 5) else h+self.spare(h))


class Grows(nn.Module):
    "With a buffer that is as long as the longest batch"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer('ones', torch.ones(1))
    def forward(self, x):
        if len(x) > len(self.ones): self.ones = x.new_ones(len(x))
        return self.lin(x)*self.ones[:1]


class Mixed(nn.Module):
    "Of two types"
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3).double()
    def forward(self, x): return self.b(self.a(x.float()).relu().double())


class Looked(nn.Module):
    "Rows of a table, looked up by a batch"
    def __init__(self, **kwargs):
        super().__init__()
        torch.manual_seed(3)
        self.emb, self.lin = nn.Embedding(9, 4, **kwargs), nn.Linear(8, 3)
    def forward(self, x): return self.lin(self.emb(x[:, :2].abs().mul(4).long().clamp(0, 8)).flatten(1))


class WholeNumbers(nn.Module):
    "With parameters of whole numbers, as of masks and quantized layers, which are never trained"
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        whole = dict(mask=torch.arange(6) % 3 > 0, codes=torch.arange(3, dtype=torch.int8), times=torch.tensor(2))
        for nm, o in whole.items(): setattr(self, nm, nn.Parameter(o, requires_grad=False))
    def forward(self, x): return self.b(self.a(x)*self.mask)*self.times+self.codes


class Result:
    def __init__(self, logits): self.logits = logits


class GivesObject(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.c = nn.Linear(4, 6), nn.Linear(6, 3)
    def forward(self, x): return Result(self.c(self.a(x).tanh()))


def of_object(o, y): return F.cross_entropy(o.logits, y).float()
of_object.loss_divisor = None  # a mean over samples
def lazy(): return nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(3)).double()


def keeps_model(learn):
    "The loss goes by the weights of a model that the script has kept"
    kept = learn.model
    def loss(p, y): return (F.cross_entropy(p, y) + .01*sum(o.pow(2).sum() for o in kept.parameters())).float()
    loss.loss_divisor, learn.loss_func = None, loss


class Changes(Callback):
    def before_epoch(self):
        if self.epoch == 1: self.learn.model[-1] = nn.Linear(7, 3, dtype=torch.float64)


for nm, cb in dict(decides=Decides, swaps=Swaps, copies=Copies, penalty=Penalty, gradient_penalty=GradientPenalty,
                   part_backward=PartBackward, made=Made, own_step=OwnStep,
                   changed_in_a_fit=Changes, activations=ActivationStats).items(): add(nm, cbs=cb)
for nm, cls in dict(two_steps=TwoSteps, recorded=Recorded).items(): add(nm, cls=cls)
for nm, m in dict(dropped=Dropped, grows=Grows, whole_numbers=WholeNumbers).items(): add(nm, model=lambda m=m: m().double(), n=30, bs=5)
for nm, option in dict(sparse='sparse', renormed='max_norm', counted='scale_grad_by_freq').items():
    add(nm, model=lambda o=option: Looked(**{o: True if o != 'max_norm' else .5}).double(), opt=partial(SGD, mom=.9))
for norm in 'inf', 1: add(f'clip_{norm}', model=few_rows, opt=SGD, cbs=lambda o=norm: GradientClip(.05, norm_type=o))
add('assigns', model=few_rows, cbs=Assigns)
add('hooked', before=hooked)
add('own', opt=own)
add('clipping', opt=clipping)
add('closure', cls=ClosureStep, opt=partial(OptimWrapper, opt=SamOpt))
add('mixed', tol=1e-6, model=Mixed)
add('lazy', model=lazy)
add('gives_object', model=lambda: GivesObject().double(), loss=lambda: of_object)
add('kept', before=keeps_model)


@case
def changed_between_fits(within):
    learn = quiet(learner(n=12, model=net))
    with within(learn):
        learn.fit(1)
        learn.model.insert(1, nn.BatchNorm1d(8).double())
        learn.fit(1, reset_opt=True)
    return dict(weights=weights(learn))


class Awkward(nn.Module):
    "Parameters of one row, of fewer rows than workers, of primes, and with the strides of another shape"
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        shapes = (), (1,), (2,), (7,), (1, 5), (2, 1, 3), (13, 2), (5, 1, 1, 2)
        self.ps = nn.ParameterList([nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in shapes])
        self.ps.append(nn.Parameter(torch.randn(5, 7, generator=g, dtype=torch.float64).t()))
        self.head = nn.Linear(4, 3).double()
    def forward(self, x): return self.head(x)*(1 + .1*sum((p.flatten()*(i+1)+x.mean(1, True)).sin().sum(1, True) for i,
                                                          p in enumerate(self.ps)))


@case(tol=1e-7)
def many_messages(within):
    "Parameters that are sent in more than one message, as those of large models are"
    from fastdist.strategy import fsdp, zero1
    learn = quiet(learner(n=20, n_val=5, opt=Adam, lr=.05, wd=.1, cbs=GradientClip(.5), model=lambda: (torch.manual_seed(3), Awkward())[1],
                          splitter=lambda m: [[*m.ps], [*m.head.parameters()]]))
    with put.object(zero1, 'at_once', 64), put.object(fsdp, 'at_once', 64), within(learn):
        learn.freeze()
        learn.fit(1)
        learn.unfreeze()
        learn.fit(1)
    return dict(weights=weights(learn), opt=state_of(learn.opt))


IN_SHARDS = r"parameters and gradients are in shards.*use strategy='zero1'"
OTHERWISE = r"the DTensors that strategy='\w+' .*use strategy='zero1' or 'ddp'"
EVERY, REPLICATED, SHARDED = 'ddp zero1 zero2 fsdp', 'ddp zero1', 'zero2 fsdp'
SECOND = r"strategy='(zero2|fsdp)'.*use strategy='"
ERRORS = dict(  # by strategies
    made=(EVERY, f'come from no backward pass|{OTHERWISE}'),
    lazy=(EVERY, r'0.weight, 0.bias, 2.weight, .* have no shape yet.*run a batch through the model before'),
    grows=(EVERY, r'the buffer ones of the model differs: .*\(torch.float64, \(\d,\)\).*can be a plain attribute of its module'),
    renormed=(EVERY, '0 has max_norm.*Leave it out|emb has max_norm.*Leave it out'),
    counted=(EVERY, 'emb has scale_grad_by_freq.*Leave it out'),
    changed_in_a_fit=(EVERY, 'at the beginning of epoch 1 of this fit the learner has another model, or other layers.*between two fits'),
    clipping=('zero1', "with strategy='zero1' would have the gradients of some parameters only: .*use strategy='ddp'"),
    closure=('zero1 zero2 fsdp', "use strategy='"), gradient_penalty=(SHARDED, SECOND), penalty=('fsdp', IN_SHARDS),
    mixed=(SHARDED, OTHERWISE), sparse=(SHARDED, OTHERWISE), assigns=(SHARDED, OTHERWISE), copies=(SHARDED, OTHERWISE),
    swaps=(SHARDED, IN_SHARDS),
    hooked=(SHARDED, r"1.0.weight has a hook .*strategy='\w+'.*use strategy='zero1'"),
    gives_object=(SHARDED, f"GivesObject returns .* use strategy='zero1'|{OTHERWISE}"),
    kept=(SHARDED, 'take learn.model'), changed_between_fits=(SHARDED, 'leave the context before you change the model'))


def message(text): return re.split(r'\n(?=[\w.]*Error: )', text)[-1]


@pytest.mark.parametrize('n,strategy', [(3, 'ddp'), (2, 'zero1'), (3, 'zero2'), (2, 'fsdp')])
def test_exact_or_an_error(worlds, n, strategy):
    fails = {k: text for k, (strategies, text) in ERRORS.items() if strategy in strategies.split()}
    for rank, got in enumerate(worlds(n)(case.run, [*fails], ctx_of(strategy), timeout=300)):
        for nm, text in fails.items():
            assert isinstance(got[nm], str) and re.search(text, message(got[nm]), re.S) and f'rank {rank}: ' in message(got[nm]), (nm, rank,
                got[nm])
    case.check(worlds(n), [o for o in case if o not in fails], **ctx_of(strategy))
