"A step with more backward passes than its loss's own: SAM, auxiliary losses, optimizers with a closure"
import pytest
from strategies import *


class Sam(Callback):
    "Sharpness-aware minimization in an event of a callback's"
    order, run_valid = GradientAccumulation.order+1, False
    def __init__(self, event, to_none): setattr(self, event, partial(self.sam, to_none))
    def sam(self, to_none):
        ps = [p for p in self.model.parameters() if p.requires_grad]
        norm = sum(float(p.grad.pow(2).sum()) for p in ps)**0.5
        with torch.no_grad():
            moved = [p.grad*(0.5/norm) for p in ps]
            for p, e in zip(ps, moved): p.add_(e)
        if to_none:
            for p in ps: p.grad = None
        else: self.learn.opt.zero_grad()
        self.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p, e in zip(ps, moved): p.sub_(e)


class Aux(Callback):
    "An auxiliary loss with a backward of its own, of all parameters or of some"
    run_valid = False
    def __init__(self, event, part=False, weight=0.3):
        self.part, self.weight, self.new = part, weight, event in ('before_batch', 'after_backward')
        setattr(self, event, self.aux)
    def aux(self):
        if not self.training: return
        if self.part: out = self.learn.model.body(*self.xb)
        else: out = self.learn.model(*self.xb) if self.new else self.pred
        (out.pow(2).mean()*self.weight).backward(retain_graph=True)


class Penalty(Callback):
    "Of the parameters alone"
    run_valid = False
    def after_loss(self):
        if self.training: (sum(p.pow(2).sum() for p in self.model.parameters())*0.05).backward()


class OwnBackward(Callback):
    "In place of fastai's, of the loss as other callbacks have made it"
    run_valid = False
    def before_backward(self):
        from fastai.basics import CancelBackwardException # not the test module's, which travels by value
        self.learn.loss_grad.backward()
        raise CancelBackwardException()


class OwnStep(Callback):
    "In place of all that fastai does with a batch"
    run_valid = False
    def before_batch(self):
        from fastai.basics import CancelBatchException
        self.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        self.learn.opt.step()
        self.learn.opt.zero_grad()
        raise CancelBatchException()


class Clip(GradientClip): order = 900 # after the other callbacks


class TwoBackwards(Learner):
    def _backward(self):
        self.loss_grad.backward(retain_graph=True)
        (self.pred.pow(2).mean()*0.3).backward(retain_graph=True)
        self.loss_grad.backward()


class TwoSteps(Learner):
    "The loss that counts is that of the last"
    def _do_one_batch(self):
        super()._do_one_batch()
        if self.training: super()._do_one_batch()


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
        moved = [p.grad*(0.5/norm) for p in ps]
        for p, e in zip(ps, moved): p.add_(e)
        with torch.enable_grad(): closure()
        for p, e in zip(ps, moved): p.sub_(e)
        return super().step()


class Recorded(Learner):
    "As optimizers need it that go by second derivatives"
    def _backward(self): self.loss_grad.backward(create_graph=True)


class LetGo(Callback):
    "No graph of an earlier batch is kept by its gradients"
    order = 2000
    def after_batch(self): assert not any(p.grad.requires_grad for p in self.model.parameters() if p.grad is not None)


class GradientPenalty(Callback):
    "WGAN-GP's kind: a gradient of a gradient"
    run_valid = False
    def after_loss(self):
        x = self.xb[0].detach().clone().requires_grad_()
        g, = torch.autograd.grad(self.learn.model(x).sum(), x, create_graph=True)
        self.learn.loss_grad = self.learn.loss_grad + 0.5*((g.norm(dim=1)-1)**2).mean()


class Made(Callback):
    "Gradients that no backward pass has made"
    run_valid = False
    def __init__(self, averaged): self.averaged = averaged
    def before_backward(self):
        import torch.distributed as dist
        from fastai.basics import CancelBackwardException
        ps, shared = list(self.learn.model.parameters()), self.averaged and dist.is_initialized()
        scale = self.learn.dl.counts.mine/self.learn.dl.counts.total if shared else 1
        for p, g in zip(ps, torch.autograd.grad(self.learn.loss_grad*scale, ps)):
            p.grad = g.contiguous().clone()
            if shared: dist.all_reduce(p.grad)
        raise CancelBackwardException()


def torch_opt(opt, **kwargs): return partial(OptimWrapper, opt=partial(opt, **kwargs))


CASES = dict(
    sam_after_backward=lambda: dict(cbs=Sam('after_backward', False)),
    sam_before_step=lambda: dict(cbs=[Sam('before_step', True), Clip(0.1)]),
    sam_accumulated=lambda: dict(cbs=[Sam('before_step', False), GradientAccumulation(8)]),
    aux_before=lambda: dict(cbs=Aux('after_loss')),
    aux_first=lambda: dict(cbs=Aux('after_pred', True)),
    aux_after=lambda: dict(cbs=[Aux('after_backward'), Clip(0.1)]),
    aux_accumulated=lambda: dict(cbs=[Aux('before_backward', True), Aux('after_backward'), GradientAccumulation(8)]),
    penalty=lambda: dict(cbs=Penalty()),
    own=lambda: dict(cbs=OwnBackward()),
    own_accumulated=lambda: dict(cbs=[OwnBackward(), GradientAccumulation(8)]),
    own_step=lambda: dict(cbs=OwnStep()),
    aux_before_batch=lambda: dict(cbs=[Aux('before_batch'), Clip(0.1)]),
    gradient_penalty=lambda: dict(cbs=GradientPenalty()),
    made=lambda: dict(cbs=Made(False)), made_averaged=lambda: dict(cbs=Made(True)),
    two=lambda: dict(cls=TwoBackwards), two_steps=lambda: dict(cls=TwoSteps),
    recorded=lambda: dict(cls=Recorded, cbs=LetGo()),
    sam_opt=lambda: dict(cls=ClosureStep, opt=torch_opt(SamOpt)))


def fitted(name, ctx=None):
    import fastdist.all
    kw = CASES[name]()
    cls = kw.pop('cls', Learner)
    def model():
        torch.manual_seed(3)
        return Scaled(True).double()
    learn = learner(n=17, n_val=4, model=model, **{'opt': partial(SGD, mom=0.9), 'lr': 0.05, **kw}) # 5 samples a batch, and 2 in the last: none, for one worker of three
    learn.__class__ = cls
    quiet(learn)
    try:
        with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(2)
    except RuntimeError as e: return str(e)
    return weights(learn), learn.recorder.values[-1]


def all_fitted(names, ctx): return {n: fitted(n, ctx) for n in names}


ONE = {}
CLOSURES, MADE = ['sam_opt'], ['made', 'made_averaged']
ERRORS = dict(ddp=[], zero1=CLOSURES, zero2=[*CLOSURES, 'gradient_penalty'], fsdp=[*CLOSURES, 'aux_first', 'aux_accumulated', 'penalty', 'gradient_penalty'])


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('world', [2, 3])
def test_more_backwards(worlds, world, strategy):
    "As one process, or an error that says which strategy does it"
    # each that fails ends the group, so one of a kind is enough
    names = [n for n in CASES if n not in MADE and n not in ERRORS[strategy] or n in (CLOSURES[0], 'gradient_penalty')]
    fails = [n for n in names if n in ERRORS[strategy]]
    fits = [n for n in names if n not in fails]
    # a second backward pass is DDP's in both: what shares the optimizer out has every other of them
    if strategy == 'zero1': fits = [*fits[::2], *(['recorded'] if 'recorded' not in fits[::2] else [])]
    ONE.update(all_fitted([n for n in fits if n not in ONE], None))
    for every in worlds(world)(all_fitted, fits, ctx_of(strategy)):
        for n, got in every.items(): assert max(map(diff, ONE[n], got)) < 2e-6, n # fastai keeps losses in float32
    for n in fails:
        for text in worlds(world)(fitted, n, ctx_of(strategy)):
            assert isinstance(text, str) and "use strategy='" in text and (n in CLOSURES or f'strategy={strategy!r}' in text), (n, text)


@pytest.mark.parametrize('strategy', STRATEGIES[:2])
def test_gradients_of_no_backward(world3, strategy):
    "Those of torch.autograd.grad and the like are each worker's own: one that averages them trains as one process"
    want = fitted('made_averaged')
    for got in world3(fitted, 'made_averaged', ctx_of(strategy)): assert max(map(diff, want, got)) < 2e-6
    for text in world3(fitted, 'made', ctx_of(strategy)): assert 'come from no backward pass' in text
