"What every strategy is held to: the same fit in one process and in many, for each optimizer and each way of stepping"
from accelerate.utils import FullyShardedDataParallelPlugin
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.training import GradientClip
from learners import *

OPTS = dict(sgd=partial(SGD, mom=0.9), adam=Adam, lamb=Lamb)
MORE_OPTS = dict(plain_sgd=SGD, rmsprop=partial(RMSProp, mom=0.9), larc=Larc, radam=RAdam, qhadam=QHAdam, ranger=partial(ranger, k=2),
                 lookahead=lambda ps, lr, **kw: Lookahead(SGD(ps, lr, mom=0.9), k=3), adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
                 torch_sgd=partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9)), adafactor=partial(OptimWrapper, opt=torch.optim.Adafactor))
CASES = 'plain clip accumulate bf16 frozen bn'.split()
STRATEGIES = 'ddp zero1 zero2 fsdp'.split()


class Scaled(nn.Module):
    "With a parameter that is a number, and one that is used in two places"
    def __init__(self, bn):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 7), *([nn.BatchNorm1d(7)] if bn else []), nn.ReLU(), nn.Linear(7, 7), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head[0].weight = self.body[-2].weight
    def forward(self, x): return self.head(self.body(x))*self.scale


class Bf16OnCpu(MixedPrecision):
    "fastai's `to_bf16` has no effect on the CPU"
    order = MixedPrecision.order
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cpu', torch.bfloat16)


def splitter(m): return [list(m.body.parameters()), [m.head[0].bias, *m.head[2].parameters(), m.scale]]


def ctx_of(strategy, **kwargs):
    "The arguments of `distrib_ctx`; with units of any size, which would be one here"
    if strategy=='fsdp': kwargs['fsdp_plugin'] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='size_based_wrap', min_num_params=1)
    return dict(split_batches=True, strategy=strategy, **kwargs)


def fit(case, opt, ctx=None, n=50, bs=5, dtype=None, **kwargs):
    "10 steps, in `distrib_ctx(**ctx)` or as fastai does them"
    import fastdist.all
    cbs = dict(clip=[GradientClip(0.05)], accumulate=[GradientAccumulation(11)], bf16=[Bf16OnCpu('bf16')]).get(case)
    dtype = torch.float32 if case=='bf16' else torch.float64 if dtype is None else dtype
    def model():
        torch.manual_seed(3)
        return Scaled(case=='bn').to(dtype)
    learn = quiet(learner(n=n, bs=bs, n_val=7, opt=opt, wd=0.1, lr=0.05, cbs=cbs, model=model, splitter=splitter, dtype=dtype, metrics=accuracy, **kwargs))
    def train():
        if case!='frozen': return learn.fit(1)
        learn.freeze()
        learn.fit(1, slice(0.05))
        learn.unfreeze()
        learn.fit(1, slice(0.01, 0.05))
        learn.freeze() # of an optimizer of torch's no gradients are left that weight decay goes by
        learn.fit(1, slice(0.001))
    if ctx is None: train()
    else:
        with learn.distrib_ctx(**ctx): train()
    return SimpleNamespace(weights=weights(learn), losses=[float(o) for o in learn.recorder.losses], values=[list(v) for v in learn.recorder.values], opt=state_of(learn.opt))


def state_of(opt):
    "What an optimizer remembers, by number of the parameter"
    sd = opt.state_dict()
    states = sd['state'].values() if isinstance(sd['state'], dict) else sd['state']
    res = {f'{i} {k}': torch.as_tensor(v).double() for i, s in enumerate(states) for k, v in s.items() if isinstance(v, (float, int, torch.Tensor)) and not isinstance(v, bool)}
    res['parameters'] = torch.tensor(float(len(states)))
    return {**res, **{f'slow {i}': p for i, p in enumerate(p for pg in sd.get('slow_weights') or [] for p in pg)}}


def size_of(*which):
    """2 workers or 3, in turn by where each of `which`, pairs of a value and its list, stands: what is trained is one thing, among how many it is
    shared out another. So each value meets both sizes in one of the tests, in half of the time"""
    return 2 + sum(list(o).index(v) for v, o in which)%2


def fits(ctx, pairs): return {(c, o): fit(c, {**OPTS, **MORE_OPTS}[o], ctx) for c, o in pairs}


__all__ = [o for o in dir() if not o.startswith('_')]
