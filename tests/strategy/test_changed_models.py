"Models that change in a context, and parameters that the optimizer has beside the model's"
import pytest
from strategies import *


def model(bn=True, out=3, seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), *([nn.BatchNorm1d(7)] if bn else []), nn.ReLU(), nn.Linear(7, out)).double()


def new_head(learn, bn=False):
    import torch.distributed as dist
    torch.manual_seed(dist.get_rank() if dist.is_initialized() and dist.get_rank() else 0) # its own weights in each worker
    return nn.Sequential(nn.Linear(7, 5), *([nn.BatchNorm1d(5)] if bn else []), nn.ReLU(), nn.Linear(5, 3)).double()


def head_and_opt(learn):
    learn.fit(1)
    learn.model[-1] = new_head(learn)
    learn.create_opt()
    learn.fit(2)


def head_none(learn):
    learn.fit(1)
    learn.model[-1] = new_head(learn, bn=True)
    learn.opt = None
    before = learn.validate()
    learn.fit(1)
    learn.model[0].weight = nn.Parameter(torch.ones(7, 4).double()/3)
    learn.fit(1, reset_opt=True)


def inserted(learn):
    learn.fit(1)
    learn.model.insert(1, nn.BatchNorm1d(7).double())
    learn.fit(1) # the optimizer does not know of it
    learn.fit(1, reset_opt=True)


def other(learn):
    learn.fit(1)
    learn.model = model(seed=4)
    learn.create_opt()
    learn.fit(1)
    learn.model = nn.Sequential(learn.model, nn.BatchNorm1d(3).double())
    learn.fit(1, reset_opt=True)


class NewHead(Callback):
    "Another head, and its optimizer, as the fit begins"
    def before_fit(self):
        self.learn.model[-1] = new_head(self.learn, bn=True)
        self.learn.create_opt()


def before_fit(learn): learn.fit(2, cbs=NewHead())


def accumulated(learn):
    "Gradients of a batch wait for the step when the model changes"
    for i in range(2):
        learn.fit(1, cbs=GradientAccumulation(12))
        if i: break
        learn.model.extend([nn.BatchNorm1d(3).double(), nn.Linear(3, 3).double()])
        learn.create_opt()


class Warm(nn.Module):
    "A loss with a temperature to learn, and class centres"
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.temperature, self.centers = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(3, 3))
        self.double()
    def forward(self, o, y):
        return (F.cross_entropy(o/self.temperature, y) + 0.1*(o-self.centers[y]).pow(2).mean()).float()


class Second(Callback):
    "A second module, after the model"
    def __init__(self): self.head = new_head(None, bn=True)
    def before_train(self): self.head.train()
    def before_validate(self): self.head.eval()
    def after_pred(self): self.learn.pred = self.head(self.pred)


class SecondInList(Second):
    def __init__(self): self.heads = [new_head(None, bn=True)]
    @property
    def head(self): return self.heads[0]


def in_closure():
    "A callback that has its module nowhere"
    head = new_head(None, bn=True)
    class InClosure(Callback):
        head = property(lambda self: head)
        def before_train(self): head.train()
        def before_validate(self): head.eval()
        def after_pred(self): self.learn.pred = head(self.pred)
    return InClosure()


CHANGES = dict(head_and_opt=head_and_opt, head_none=head_none, inserted=inserted, other=other, before_fit=before_fit, accumulated=accumulated)
BESIDE = dict(loss=lambda: dict(loss=Warm()), loss_accumulated=lambda: dict(loss=Warm(), cbs=GradientAccumulation(12)),
              module=lambda: dict(model=lambda: model(out=7), cbs=Second()), in_a_list=lambda: dict(model=lambda: model(out=7), cbs=SecondInList()),
              in_closure=lambda: dict(model=lambda: model(out=7), cbs=in_closure()))


def fitted(name, ctx=None):
    import fastdist.all
    warnings.simplefilter('ignore')
    kw = BESIDE[name]() if name in BESIDE else {}
    beside = [m for m in (kw.get('loss'), getattr(kw.get('cbs'), 'head', None)) if m]
    learn = quiet(learner(n=22, n_val=4, bs=8, opt=partial(SGD, mom=0.9), lr=0.05, **{'model': model, **kw}, splitter=lambda m: [params(m), *map(params, beside)]))
    def plain(): return not any(type(p) is not nn.Parameter for p in learn.model.parameters()) and not any('hook' in k and v for m in learn.model.modules() for k, v in vars(m).items())
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): CHANGES.get(name, lambda learn: learn.fit(2))(learn)
    assert plain() and all(type(m) in (nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.ReLU) for m in learn.model.modules())
    return {**weights(learn), **{f'beside.{k}': v.detach().clone() for m in beside for k, v in m.state_dict().items()}}, learn.recorder.values[-1], state_of(learn.opt)


def all_fitted(names, ctx): return {n: fitted(n, ctx) for n in names}


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('world', [2, 3])
def test_changed_and_beside(worlds, world, strategy):
    sharded = strategy in ('zero2', 'fsdp') # `learn.model` is a sharded copy there, whose layers stay
    names = [*BESIDE] if sharded else [*CHANGES, *BESIDE]
    if not ONE: ONE.update(all_fitted([*CHANGES, *BESIDE], None))
    for every in worlds(world)(all_fitted, names, ctx_of(strategy)):
        for n in names: assert max(map(diff, ONE[n], every[n])) < 2e-6, n # fastai keeps losses in float32
    for text in worlds(world)(refused, ctx_of(strategy)) if sharded else (): assert 'leave the context before you change the model' in text, text


def refused(ctx):
    try: fitted('inserted', ctx)
    except RuntimeError as e: return str(e)


ONE = {}


class Changes(Callback):
    "In a fit that trains, at epoch `at`: another model, layer or parameter, or another type"
    def __init__(self, event, what, at): self.event, self.what, self.at = event, what, at
    def before_batch(self): self.change('before_batch')
    def before_epoch(self): self.change('before_epoch')
    def after_epoch(self): self.change('after_epoch')
    def change(self, event):
        learn = self.learn
        if event != self.event or learn.epoch != self.at or event == 'before_batch' and not (self.training and self.iter == 1): return
        if self.what == 'model': learn.model = mlp()
        elif self.what == 'layer': learn.model[-1] = nn.Linear(8, 3, dtype=torch.float64)
        elif self.what == 'parameter': learn.model[-1].bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        else: learn.model.float().double(), learn.model.half()


def changed_in_fit(strategy, event, what, at):
    import fastdist.all
    learn = quiet(learner(n=40, bs=5))
    try:
        with learn.distrib_ctx(**ctx_of(strategy)): learn.fit(3, cbs=Changes(event, what, at))
    except RuntimeError as e: return str(e)


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('event,what,at,when', [
    ('after_epoch', 'model', 0, 'at the beginning of epoch 1'), ('before_epoch', 'layer', 1, 'at the beginning of epoch 1'), ('after_epoch', 'type', 1, 'at the beginning of epoch 2')])
def test_changed_in_a_fit(world2, strategy, event, what, at, when):
    "It is told when, and what to do, in all workers"
    for text in world2(changed_in_fit, strategy, event, what, at):
        assert f'{when} of this fit the learner has another model, or other layers' in text and 'between two fits' in text, text


class Tempered(nn.CrossEntropyLoss):
    "Cross entropy with a temperature to learn"
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5).double())
    def forward(self, o, y): return super().forward(o/self.temperature, y).float()


def without_labels(ctx=None):
    "The first batch has labels in one share only, a later one in some samples of both"
    import fastdist.all
    loss, ds = Tempered(), Items(40)
    ds.y[1:8:2], ds.y[20:24] = -100, -100
    learn = quiet(Learner(DataLoaders(TfmdDL(ds, bs=8), TfmdDL(Items(8), bs=8)), mlp(), loss_func=loss, opt_func=SGD, lr=.1, splitter=lambda m: [params(m), params(loss)]))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(watchdog=60, **ctx): learn.fit(1)
    return {**weights(learn), 'temperature': loss.temperature.detach().clone()}


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_labels_left_out_beside(world2, strategy):
    "A loss function's own parameters, where a share has no labels, and so no gradient of them: the others waited for it"
    one = without_labels()
    for o in world2(without_labels, ctx_of(strategy)): assert diff(one, o) < 1e-7


class Head(nn.Sequential):
    "Whose state dict has the last layer alone, as where the body is downloaded"
    def state_dict(self, *args, **kwargs): return {k: v for k, v in super().state_dict(*args, **kwargs).items() if k.startswith('2.')}


def own_seeds(ctx=None):
    import fastdist.all
    from fastdist.world import get_rank
    def model():
        torch.manual_seed(get_rank())
        return Head(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    learn = quiet(learner(n=40, bs=8, model=model, opt=SGD))
    with contextlib.nullcontext() if ctx is None else learn.distrib_ctx(**ctx): learn.fit(1)
    return dict(learn.model.named_parameters())


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_part_of_a_state_dict(world2, strategy):
    "All parameters begin as rank 0's, and not those of the state dict alone"
    one = {k: v.detach() for k, v in own_seeds().items()}
    for o in world2(own_seeds, ctx_of(strategy)): assert diff(one, {k: v.detach() for k, v in o.items()}) < 1e-12


