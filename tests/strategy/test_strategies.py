"Every strategy gives the weights, the numbers and the optimizer state of one process, and leaves no trace"
import itertools

import pytest
from strategies import *

TOL = dict(weights=1e-7, losses=1e-6, values=1e-6, opt=1e-6)
REFERENCE = {}


def reference(case, opt):
    "In one process; computed once"
    if (case, opt) not in REFERENCE: REFERENCE[case, opt] = fit(case, {**OPTS, **MORE_OPTS}[opt])
    return REFERENCE[case, opt]


def differences(world, strategy, pairs, **ctx):
    "The largest differences to one process, of all workers, by case and optimizer"
    every = world(fits, ctx_of(strategy, **ctx), pairs, timeout=300)
    return {k: {o: max((diff(getattr(reference(*k), o), getattr(m[k], o)) for m in every), default=0.) for o in TOL} for k in every[0]}


def turned(k):
    "Each way of stepping, with the `k`th optimizer and those that follow it, in turn"
    return [*zip(CASES, [*OPTS, *OPTS, *OPTS][k:])]


# A strategy, a way of stepping, an optimizer and a number of workers: each two of them meet in one of the cells. Each strategy steps in each way by two
# and by three workers, with another optimizer by each; which one goes with which way is another for the next strategy. All 72 cells cost twice as much.
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('n', [2, 3])
def test_matrix(worlds, n, strategy):
    "10 steps with each optimizer, in each mode of stepping. What bf16 rounds depends on how a batch is divided, as much for 'ddp' as for the others"
    held_to(worlds, n, strategy, turned((STRATEGIES.index(strategy)+n) % 3))


def test_matrix_of_one(worlds):
    "A worker alone shares nothing out: each strategy has half of the ways of stepping"
    for i, strategy in enumerate(STRATEGIES): held_to(worlds, 1, strategy, turned(i % 3)[i % 2::2])


def held_to(worlds, n, strategy, pairs):
    found = differences(worlds(n), strategy, pairs)
    for (case, opt), d in found.items(): print(f"{strategy} {n} {case} {opt}: {d['weights']:.1e}")
    assert [*found]==pairs
    for (case, opt), d in found.items():
        if case=='bf16': assert d['weights'] < (1e-9 if n==1 else 0.05), (case, opt, d)
        else: assert all(d[k] < TOL[k] for k in TOL), (case, opt, d)


@pytest.mark.parametrize('strategy', STRATEGIES[1:])
def test_bf16_is_that_of_ddp(world3, strategy):
    pairs = [('bf16', list(OPTS)[STRATEGIES[1:].index(strategy)])]  # what is rounded does not know which optimizer steps
    ddp, m = (world3(fits, ctx_of(s), pairs)[0] for s in ('ddp', strategy))
    for k in ddp: assert diff(ddp[k].weights, m[k].weights) < 2e-6


@pytest.mark.parametrize('strategy', STRATEGIES[1:])
def test_optimizers(world3, strategy):
    opts = [o for o in MORE_OPTS if o!='adafactor']
    # which parameters step, and how their gradients came to be, is no optimizer's business: each of them meets that with one of the strategies
    # 'zero1' and 'zero2' share out what steps in the same way: each has every other optimizer
    plain = {'zero1': opts[::2], 'zero2': opts[1::2], 'fsdp': opts}[strategy]
    pairs = [*itertools.product(['plain'], plain), *[*zip(itertools.cycle(['frozen', 'clip']), opts)][STRATEGIES[1:].index(strategy)::3]]
    for k, d in differences(world3, strategy, pairs).items(): assert all(d[o] < TOL[o] for o in TOL), (k, d)


def fails(ctx, opt):
    try: fit('plain', MORE_OPTS[opt], ctx)
    except Exception as e: return str(e)


def test_optimizer_that_cannot(world2):
    for m in world2(fails, ctx_of('zero1'), 'adafactor'): assert "Adafactor cannot step parameters of which each worker has a part: use strategy='ddp'" in m


class OwnStep:
    "A step of one's own, which needs to know the whole parameter"
    @staticmethod
    def step(p, lr, **kwargs): p.data.sub_(p.grad.data/p.grad.data.abs().max(), alpha=lr)


def own_opt(params, lr, **kwargs): return Optimizer(params, [OwnStep.step], lr=lr)


def with_own(ctx=None): return fit('plain', own_opt, ctx)


@pytest.mark.parametrize('strategy', STRATEGIES[1:])
def test_a_step_of_ones_own(world3, strategy):
    one = with_own()
    for m in world3(with_own, ctx_of(strategy)): assert diff(one.weights, m.weights) < 1e-7


def shapes_in_ctx(ctx, clip=None):
    "What a worker has of parameters, gradients and optimizer state, in the middle of a fit and after it"
    import fastdist.all
    from torch.distributed.tensor import DTensor
    from fastdist.strategy.shards.sharding import local
    learn = quiet(learner(n=20, bs=5, opt=Adam, model=lambda: Scaled(False).double(), splitter=splitter))
    res = []
    class Look(Callback):
        order = 2000
        def before_step(self): self.grads = sum(local(p.grad).numel() for p in learn.model.parameters() if p.grad is not None)
        def after_step(self):
            res.append((sum(local(p).numel() for p in learn.model.parameters()), self.grads, sum(local(o).numel() for s in learn.opt.state.values() for o in s.values() if isinstance(o, torch.Tensor))))
    with learn.distrib_ctx(**ctx): learn.fit(1, cbs=Look())
    n = sum(p.numel() for p in learn.model.parameters())
    return n, res


@pytest.mark.parametrize('size', [2, 3])
def test_what_is_sharded_is(worlds, size):
    "Each worker has about 1/size of what its strategy shards, and all of the rest"
    for strategy, sharded in dict(ddp=(0, 0, 0), zero1=(0, 0, 1), zero2=(0, 1, 1), fsdp=(1, 1, 1)).items():
        every = worlds(size)(shapes_in_ctx, ctx_of(strategy))
        n = every[0][0]
        for step in range(4):
            for i, whole in enumerate((n, n, 2*n)):
                each = [m[1][step][i] for m in every]
                if sharded[i]:
                    assert max(each) < whole*0.6 if size==2 else max(each) < whole*0.5
                    assert whole <= sum(each) <= whole+2*size # a number alone is in all
                else: assert each==[whole]*size


def before_in_after(ctx, opt):
    "An optimizer that was made before, goes on in the context, and after it in one process"
    import fastdist.all
    learn = quiet(learner(n=20, bs=5, opt={**OPTS, **MORE_OPTS}[opt], model=lambda: Scaled(True).double(), splitter=splitter, lr=0.05))
    learn.fit(1)
    opt, ps, model, classes = learn.opt, list(learn.model.parameters()), learn.model, [type(m) for m in learn.model.modules()]
    attrs, keys = [sorted(vars(m)) for m in model.modules()], list(model.state_dict())
    hooks = [{k: len(v) for k, v in vars(m).items() if 'hook' in k and isinstance(v, dict)} for m in model.modules()]
    if ctx is None: learn.fit(1)
    else:
        with learn.distrib_ctx(**ctx): learn.fit(1)
    assert learn.opt is opt and learn.model is model and classes==[type(m) for m in model.modules()]
    assert all(a is b for a, b in zip(ps, model.parameters())) and all(type(p) is nn.Parameter for p in ps)
    assert attrs==[sorted(vars(m)) for m in model.modules()] and keys==list(model.state_dict())
    assert hooks==[{k: len(v) for k, v in vars(m).items() if 'hook' in k and isinstance(v, dict)} for m in model.modules()]
    assert not {'step', 'zero_grad', 'state_dict', 'load_state_dict'} & set(vars(opt))
    assert all(p._backward_hooks is None or not p._backward_hooks for p in ps)
    learn.fit(1)
    return SimpleNamespace(weights=weights(learn), opt=state_of(learn.opt))


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_optimizer_before_and_after(worlds, strategy):
    # one of fastai's for each, and the other kinds, of which one has a copy of the parameters and one is torch's, for who shares an optimizer out and who has all of it
    more = dict(ddp=['ranger'], zero1=['lamb', 'adamw'], zero2=['ranger'], fsdp=['ranger', 'adamw'])[strategy]
    for i, opt in enumerate(['adam', *more]):
        one = before_in_after(None, opt)
        for m in worlds(2 + (STRATEGIES.index(strategy)+i) % 2)(before_in_after, ctx_of(strategy), opt):
            assert diff(one.weights, m.weights) < 1e-7
            assert diff(one.opt, m.opt) < 1e-6


def saves(ctx, path):
    "Save, load, export, predict, validate, find a learning rate: in the context"
    import fastdist.all
    from contextlib import nullcontext
    learn = quiet(learner(n=20, bs=5, n_val=11, opt=Adam, model=lambda: Scaled(True).double(), splitter=splitter, lr=0.05, metrics=accuracy, path=path))
    res = {}
    with nullcontext() if ctx is None else learn.distrib_ctx(**ctx):
        learn.fit(1)
        learn.save('a')
        res['saved'] = learn.validate()
        learn.fit(1)
        res['later'] = learn.validate()
        learn.load('a')
        res['loaded'] = learn.validate()
        learn.fit(1)
        res['again'] = learn.validate()
        res['lr'] = learn.lr_find(num_it=5, show_plot=False).valley
        res['found'] = learn.validate()
        learn.fit(1)
        res['after lr_find'] = learn.validate()
        learn.export('e.pkl')
        learn.fit(1)
        res['after export'] = learn.validate()
        preds = learn.get_preds()
        res['preds'] = preds[0].flatten().tolist()
        torch.save(weights(learn), f'{path}/plain.pth') if ctx is None else None
        learn.save('b')
    res['weights'] = weights(learn)
    return res


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_save_load_export_predict(worlds, strategy, tmp_path):
    (tmp_path/'one').mkdir()
    one = saves(None, tmp_path/'one')
    size = size_of((strategy, STRATEGIES))
    path = tmp_path/f'{size}'
    path.mkdir()
    for m in worlds(size)(saves, ctx_of(strategy), path, timeout=200):
        for k in one: assert diff(one[k], m[k]) < 1e-6, k
    for nm in 'ab': # files for one process, as fastai writes them
        a, b = (torch.load(p/f'models/{nm}.pth', weights_only=False) for p in (tmp_path/'one', path))
        assert list(a['model'])==list(b['model']) and diff(a['model'], b['model']) < 1e-7
        assert all(type(o) is torch.Tensor for o in b['model'].values())
        for s, t in zip(a['opt']['state'], b['opt']['state']): assert s.keys()==t.keys() and all(diff(s[k], t[k]) < 1e-6 for k in s if not isinstance(s[k], bool))
    learn = load_learner(path/'e.pkl')
    assert type(learn.model) is Scaled and all(type(p) is nn.Parameter for p in learn.model.parameters())
    assert diff(weights(load_learner(tmp_path/'one/e.pkl')), weights(learn)) < 1e-7


class Residual(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Linear(n, 2*n), nn.Linear(2*n, n)
    def forward(self, x): return x+self.b(self.a(x).relu())


def alive(ctx):
    "Parameters and modules that are left of a learner after its context and its end"
    import gc
    import fastdist.all
    def count():
        # by its type first: torch asks in Python whether an object is a parameter, which took 10 s for all that there are
        found = [o for o in gc.get_objects() if issubclass(type(o), (torch.Tensor, Residual))]
        return [sum(isinstance(o, c) for o in found) for c in (nn.Parameter, Residual)]
    gc.collect()
    before = count()
    learn = quiet(learner(n=20, bs=5, opt=Adam, model=lambda: nn.Sequential(nn.Linear(4, 6), *[Residual(6) for _ in range(3)], nn.Linear(6, 3)).double()))
    learn._do_epoch_validate = noop # a forward without gradients would let go of the last graph
    with learn.distrib_ctx(**ctx): learn.fit(1)
    during = count()
    del learn
    gc.collect()
    return before, during, count()


def test_nothing_stays_alive(world2):
    for strategy in STRATEGIES:
        for before, during, after in world2(alive, ctx_of(strategy)):
            assert during[1]==before[1]+3 and during[0] >= before[0]+16
            assert after[1]==before[1] and after[0] <= before[0], (strategy, before, during, after)
