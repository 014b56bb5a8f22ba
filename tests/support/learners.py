"Small learners that are built alike in one process and in many, in float64 unless a test says otherwise"
import contextlib, warnings
from types import SimpleNamespace

import torch
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.metrics import *

warnings.filterwarnings('ignore', category=FutureWarning)


class Items:
    "`n` samples of 4 features, with a class out of 3 or a number as target"
    def __init__(self, n, classes=True, seed=0, dtype=torch.float64):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 4, generator=g, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, 3, (n,), generator=g) if classes else torch.randn(n, 1, generator=g, dtype=torch.float64).to(dtype)
    def __len__(self): return len(self.x)
    def new_empty(self): return Items(0)
    def __getitem__(self, i): return self.x[i], self.y[i]


def as_single(module, args, loss): return loss.float()


def Double(axis=-1, **kwargs):
    "torch's cross entropy, with what fastai's has beside, computed in float64; only its result is a float32, as fastai's recorder needs"
    loss = nn.CrossEntropyLoss(**kwargs)
    loss.register_forward_hook(as_single)
    loss.y_int, loss.decodes, loss.activation = True, partial(torch.argmax, dim=axis), partial(torch.softmax, dim=axis)
    return loss


class OwnDouble(CrossEntropyLossFlat):
    "The same as a class of the user's, to be derived from"
    def __call__(self, inp, targ, **kwargs): return self.func(inp.as_subclass(torch.Tensor), targ.as_subclass(torch.Tensor), **kwargs).float()


def mlp(bn=False, dtype=torch.float64, seed=3):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8), *([nn.BatchNorm1d(8)] if bn else []), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(dtype)


def dls_of(n, n_val=None, bs=5, val_bs=None, shuffle=True, drop_last=False, seed=7, num_workers=0, dtype=torch.float64, classes=True):
    set_seed(seed)
    trn, val = Items(n, classes, dtype=dtype), Items(n if n_val is None else n_val, classes, seed=1, dtype=dtype)
    return DataLoaders(TfmdDL(trn, bs=bs, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers),
                       TfmdDL(val, bs=val_bs or bs, num_workers=num_workers))


def learner(n=23, n_val=None, bs=5, val_bs=None, bn=False, opt=SGD, wd=None, loss=None, metrics=None, cbs=None, model=None, drop_last=False,
            shuffle=True, lr=0.1, num_workers=0, splitter=trainable_params, path='.', dtype=torch.float64, **kwargs):
    dls = dls_of(n, n_val, bs, val_bs, shuffle, drop_last, num_workers=num_workers, dtype=dtype)
    learn = Learner(dls, model() if model else mlp(bn, dtype), loss_func=loss or Double(), opt_func=opt, lr=lr, wd=wd, metrics=metrics, cbs=cbs, splitter=splitter,
                    path=path, **kwargs)
    return learn


def weights(learn): return {k: v.detach().clone().cpu() for k, v in learn.model.state_dict().items()}


def quiet(learn):
    "Train without a progress bar or a table"
    learn.remove_cbs(learn._grab_cbs(ProgressCallback))
    learn.logger = noop
    return learn


def trained(distrib=False, epochs=2, ctx=None, **kwargs):
    "Weights, losses and values after a fit, in `distrib_ctx(**ctx)` or in one process"
    learn = quiet(learner(**kwargs))
    if distrib:
        import fastdist.all
        with learn.distrib_ctx(**(ctx or {})): learn.fit(epochs)
    else: learn.fit(epochs)
    return SimpleNamespace(weights=weights(learn), losses=[float(o) for o in learn.recorder.losses], values=[list(v) for v in learn.recorder.values])


def diff(a, b):
    "Largest difference between two dicts of tensors, or two lists of numbers; infinity where one alone is nan, which `max` would pass over"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        return max(diff(a[k], b[k]) for k in a)
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert a.shape == b.shape, (a.shape, b.shape)
    off = torch.where((a == b) | a.isnan() & b.isnan(), 0., (a-b).abs()).nan_to_num(nan=torch.inf)
    return off.max().item() if a.numel() else 0.


@contextlib.contextmanager
def counted_collectives(counts):
    """Count in the `Counter` `counts` what process groups are called for, as where there are many workers: small tensors are not gathered. All of
    torch.distributed's functions end there, but for DDP's own, which are called from C++"""
    import torch.distributed as dist
    from fastdist.comm import collectives as pack
    PG, was, few = dist.ProcessGroup, {}, pack._few
    pack._few = 0
    def counted(nm, real):
        def f(self, *args, **kwargs):
            counts[nm] += 1
            return real(self, *args, **kwargs)
        return f
    for nm in ('allreduce', 'broadcast', 'allgather', 'all_gather_single', '_allgather_base', 'barrier', 'reduce', 'gather', 'scatter', 'send', 'recv'):
        if nm not in vars(PG): continue
        was[nm] = vars(PG)[nm]
        setattr(PG, nm, counted(nm, getattr(PG, nm)))
    try: yield counts
    finally:
        pack._few = few
        for nm, f in was.items(): setattr(PG, nm, f)


def from_the_start():
    "As in a new process: the one place where the contract reaches into the package"
    from fastdist.checkpoint.resume import _fits
    _fits.clear()


__all__ = [o for o in dir() if not o.startswith(('_', 'test'))]  # fastcore's test functions are not pytest's
