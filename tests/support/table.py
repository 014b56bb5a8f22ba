"""Tables of cases that run in one process and in many. A case is a function of `within`, where `within(learn)` is the context to train in; what it returns,
a nest of tensors, numbers and texts, has to be the same in one process and in each worker."""
import contextlib, os, traceback

from strategies import *


class Within:
    "The context of a learner: none in one process. `n` is the number of workers, `many` whether there are any"
    def __init__(self, ctx):
        self.ctx, self.many = ctx, ctx is not None
        self.n = int(os.environ.get('WORLD_SIZE', 1)) if self.many else 1

    def __call__(self, learn, **kwargs):
        if not self.many: return contextlib.nullcontext()
        import fastdist.all
        return learn.distrib_ctx(**{**dict(split_batches=True), **self.ctx, **kwargs})

    def wait(self):
        "Until all are here"
        import torch.distributed as dist
        if dist.is_initialized(): dist.barrier()


class Cases:
    def __init__(self): self.fs, self.tols, self.one = {}, {}, {}

    def __call__(self, f=None, tol=2e-7, name=None):
        "A decorator; `tol` is the largest difference of a weight. All other numbers may differ by ten times that, and at least by float32's rounding"
        if f is None: return partial(self, tol=tol, name=name)
        self.fs[name or f.__name__], self.tols[name or f.__name__] = f, tol
        return f

    def __iter__(self): return iter(self.fs)
    def __getstate__(self): return dict(vars(self), one={})

    def run(self, names, ctx=None):
        "Results by name; an error is its traceback, so that it is seen which case had it"
        res = {}
        for nm in names:
            try: res[nm] = self.fs[nm](Within(ctx))
            except Exception: res[nm] = traceback.format_exc()
        return res

    def check(self, world, names=None, one=None, **ctx):
        "Each worker's results are those of one process, or `one`; without a `world`, the context is in this process"
        names = list(names or self)
        one = self.one if one is None else one
        one.update(self.run([o for o in names if o not in one]))
        faults = []
        for rank, got in enumerate(world(self.run, names, ctx, timeout=300) if world else [self.run(names, ctx)]):
            for nm in names:
                if isinstance(o := one[nm], str): faults.append(f'{nm}, in one process: {o}')
                elif isinstance(o := got[nm], str): faults.append(f'{nm}, rank {rank}: {o}')
                else: faults += [f'{nm}, rank {rank}: {o}' for o in differences(one[nm], o, self.tols[nm])]
        assert not faults, '\n'.join(faults)


def differences(a, b, tol, at=()):
    "Where two nests differ, and by how much"
    where = '.'.join(map(str, at))
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys(): return [f'{where}: {a.keys()} and {getattr(b, "keys", lambda: b)()}']
        return [o for k in a for o in differences(a[k], b[k], tol, (*at, k))]
    if isinstance(a, (list, tuple, L)):
        if not isinstance(b, (list, tuple, L)) or len(a) != len(b): return [f'{where}: {a} and {b}']
        if not all(isinstance(o, (int, float)) for o in (*a, *b)): return [o for i, (x, y) in enumerate(zip(a, b)) for o in differences(x, y, tol, (*at, i))]
    elif not isinstance(a, (float, Tensor)): return [] if type(a) is type(b) and a == b else [f'{where}: {a!r} and {b!r}']
    a, b = (torch.as_tensor(o).double() for o in (a, b))
    if a.shape != b.shape: return [f'{where}: shapes {a.shape} and {b.shape}']
    least = tol if 'weights' in at else max(10*tol, 1e-6)*max(1., a.nan_to_num().abs().max().item() if a.numel() else 1.)
    return [] if (off := diff(a, b)) <= least else [f'{where}: {off:.2e}, allowed {least:.0e}']


@contextlib.contextmanager
def shared_folder(within):
    "A new folder of all workers"
    import shutil, tempfile
    path = [tempfile.mkdtemp()]
    if within.many and within.n > 1:
        import torch.distributed as dist
        from fastdist.all import setup_distrib
        setup_distrib()
        dist.broadcast_object_list(path)
    try: yield Path(path[0])
    finally:
        within.wait()
        shutil.rmtree(path[0], ignore_errors=True)


def numbers(values): return [[float(o) for o in v if not isinstance(o, str)] for v in values]


def result(learn, **more):
    "What a fit leaves"
    rec = learn.recorder
    return dict(weights=weights(learn), losses=[float(o) for o in rec.losses], values=numbers(rec.values), opt=state_of(learn.opt), **more)


__all__ = [o for o in dir() if not o.startswith('_')]
