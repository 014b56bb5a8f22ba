"Where the host waits for a device, so that kernels end before the next ones are queued"
import collections, os, traceback
from types import SimpleNamespace

import fastai, torch
import fastdist
from torch.utils._python_dispatch import TorchDispatchMode

state = SimpleNamespace(counter=None, recorded=0, ended=0)  # how many events were recorded, and how many have happened
_reads = ('aten._local_scalar_dense', 'aten.nonzero', 'aten.masked_select', 'aten.is_nonzero', 'aten.equal', 'aten.unique', 'aten._unique2')


# not by their names: a checkout, and with it an environment, may lie in a folder of the same name
_packages = {o.__name__: os.path.dirname(o.__file__) + os.sep for o in (fastdist, fastai)}


def is_fake(t): return isinstance(t, torch.Tensor) and t.device.type == 'fakegpu'


def note(what, until=None):
    "The host waits here, for all that was queued or `until` an event"
    state.ended = state.recorded if until is None else until
    if state.counter is not None: state.counter[(what, *_where())] += 1


def _where():
    "(whose code, file, function) of the innermost frame of fastdist or fastai"
    frames = [f for f in reversed(traceback.extract_stack()) if '/fakegpu/' not in f.filename and '/tests/' not in f.filename]
    for f in frames:
        for who, folder in _packages.items():
            if f.filename.startswith(folder): return who, f.filename[len(folder):], f.name
    return 'other', *((frames[0].filename, frames[0].name) if frames else ('autograd', ''))


class HostSyncs(TorchDispatchMode):
    "Counts in `found`, by (what, whose code, file, function), where the host waits"
    def __enter__(self):
        self.found = state.counter = collections.Counter()
        return super().__enter__()

    def __exit__(self, *args):
        state.counter = None
        return super().__exit__(*args)

    def of(self, who):
        "Those of `who`"
        return {k: n for k, n in self.found.items() if k[1] == who}

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if what := _wait(str(f), args, kwargs or {}): note(what)
        return f(*args, **(kwargs or {}))


def _wait(name, args, kwargs):
    "Why `name` makes the host wait, if it does"
    if name.startswith(_reads) and any(map(is_fake, args)): return name
    if name.startswith('aten.index.Tensor') and is_fake(args[0]) and any(is_fake(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return 'index by a mask'
    if name.startswith('aten._to_copy') and kwargs.get('device') is not None and not kwargs.get('non_blocking'):
        here, there = is_fake(args[0]), torch.device(kwargs['device']).type
        if here and there == 'cpu': return 'copy to the CPU'
        if not here and there == 'fakegpu' and args[0].dim(): return 'copy from the CPU'  # of a number the host keeps no memory that it waits for
    if name.startswith('aten.copy_') and is_fake(args[0]) != is_fake(args[1]) and not (len(args) > 2 and args[2] or kwargs.get('non_blocking')):
        if is_fake(args[1]) or args[1].dim(): return 'copy between CPU and device'
