"`torch.cuda`, of devices that are memory of the CPU's"
import ctypes, os
from types import ModuleType, SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from . import autocast, parallel
from .waits import note, state

memory = int(os.environ.get('FAKEGPU_BYTES', 2**33))
lib = None


def limit_memory(nbytes):
    "Allocations beyond that many bytes on a device fail in this process, as where a GPU's memory runs out"
    lib.fakegpu_limit(ctypes.c_long(nbytes))


def index_of(d):
    "The number of a device, however it is written"
    if isinstance(d, int): return d
    d = None if d is None else torch.device(d).index
    return lib.fakegpu_current() if d is None else d


def real(d):
    "What 'cuda:1' is here"
    if isinstance(d, str) and d.partition(':')[0] == 'cuda': d = torch.device(d)
    return torch.device('fakegpu', index_of(d)) if isinstance(d, torch.device) and d.type == 'cuda' else d


def on_cpu(t):
    "The same memory, as a tensor of the CPU"
    return torch.ops.fakegpu.on_cpu(t)


def set_device(d):
    i = index_of(d)
    if i >= 0 and not lib.fakegpu_set(i): raise RuntimeError(f'CUDA error: invalid device ordinal ({i} of {lib.fakegpu_count()})')


class Nothing:
    "A context, such as that of a stream, in which nothing is different"
    def __init__(self, *args): pass
    def __enter__(self): return self
    def __exit__(self, *args): pass


class OnDevice(Nothing):
    def __init__(self, d): self.new = index_of(d)
    def __enter__(self): self.old = lib.fakegpu_current(); set_device(self.new)
    def __exit__(self, *args): set_device(self.old)


class Event:
    "Has happened when the host has waited for it, or for something that the device does later"
    at = 0
    def __init__(self, *args, **kwargs): pass
    def record(self, *args): state.recorded = self.at = state.recorded + 1
    def wait(self, *args): pass
    def query(self): return self.at <= state.ended
    def elapsed_time(self, other): return 0.
    def synchronize(self):
        if not self.query(): note('event', self.at)


class Stream(Nothing):
    stream_id = cuda_stream = 0
    device_type = int(torch._C._autograd.DeviceType.PrivateUse1)
    def __init__(self, *args, **kwargs): self.device, self.device_index = torch.device('fakegpu', lib.fakegpu_current()), lib.fakegpu_current()
    def wait_stream(self, other): pass
    def wait_event(self, event): pass
    def record_event(self, event=None): return event or Event()
    def query(self): return True
    def is_capturing(self): return False
    def synchronize(self): note('stream')


_generators = {}


def _generator(d=None): return _generators.setdefault(index_of(d), torch.Generator().manual_seed(0))


def _uuid(i):  # of the machine's, whatever number this process has it by
    seen = os.environ.get('CUDA_VISIBLE_DEVICES')
    return f"fake-{seen.split(',')[i] if seen else i}"

def _properties(d=None): return SimpleNamespace(name='Fake GPU', uuid=_uuid(index_of(d)), total_memory=memory, major=9, minor=0, multi_processor_count=1)


def _answers():
    "What `torch.cuda`, and the module of the device, say and do"
    return dict(
        is_available=lambda: lib.fakegpu_count() > 0, is_initialized=lambda: True, init=lambda: None, _lazy_init=lambda: None, _is_in_bad_fork=lambda: False,
        device_count=lambda: lib.fakegpu_count(), current_device=lambda: lib.fakegpu_current(), set_device=set_device, device=OnDevice,
        _exchange_device=lambda d: lib.fakegpu_current(), _maybe_exchange_device=lambda d: lib.fakegpu_current(),
        synchronize=lambda d=None: note('synchronize'), Stream=Stream, Event=Event, stream=Nothing, set_stream=lambda s: None,
        current_stream=lambda d=None: Stream(), default_stream=lambda d=None: Stream(), is_current_stream_capturing=lambda: False,
        get_rng_state=lambda d=None: _generator().get_state(), set_rng_state=lambda s, d=None: _generator().set_state(s),
        manual_seed=lambda s: _generator().manual_seed(s), manual_seed_all=lambda s: [_generator(i).manual_seed(s) for i in range(lib.fakegpu_count())],
        mem_get_info=lambda d=None: (memory-lib.fakegpu_used(index_of(d)), memory), memory_allocated=lambda d=None: lib.fakegpu_used(index_of(d)),
        max_memory_allocated=lambda d=None: lib.fakegpu_peak(index_of(d)), reset_peak_memory_stats=lambda d=None: lib.fakegpu_reset_peak(index_of(d)),
        empty_cache=lambda: None, can_device_access_peer=lambda a, b: True, get_device_capability=lambda d=None: (9, 0),
        get_device_name=lambda d=None: 'Fake GPU', get_device_properties=_properties, is_bf16_supported=lambda *args: True, is_tf32_supported=lambda: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16])


set_data = torch.Tensor.data.__set__


def copy_storage(self, source, non_blocking=None):
    "Between devices, as `torch.save` and `torch.load` do"
    ctypes.memmove(self.data_ptr(), source.data_ptr(), source.nbytes())
    return self


class CudaIsFake(TorchFunctionMode):
    "Takes 'cuda' for the device in all of torch's functions"
    moves = torch.Tensor.to, torch.Tensor.new_empty, torch.Tensor.new_zeros

    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get('device') is not None: kwargs['device'] = real(kwargs['device'])
        if f in self.moves: args = tuple(map(real, args))
        if f == set_data and type(args[0].data) is type(args[1]) is torch.Tensor and args[0].device.type != args[1].device.type:
            with torch.no_grad(): torch.ops.fakegpu.take_data(*args)
        return f(*args, **kwargs)


def install(library):
    global lib
    torch.ops.load_library(library)
    lib = ctypes.CDLL(library)
    for o in ('used', 'peak'): getattr(lib, f'fakegpu_{o}').restype = ctypes.c_long
    lib.fakegpu_register()
    torch.utils.rename_privateuse1_backend('fakegpu')
    module = ModuleType('torch.fakegpu')
    for k, v in _answers().items():
        setattr(module, k, v)
        setattr(torch.cuda, k, v)
    torch._register_device_module('fakegpu', module)
    torch.accelerator.current_stream = module.current_stream  # torch's own takes any event for its own, and reads beyond the end of ours
    torch.utils.generate_methods_for_privateuse1_backend(for_module=True, for_storage=True)
    torch.Tensor.cuda = lambda self, device=None, *args, **kwargs: self.to(torch.device('fakegpu', index_of(device)))
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.is_pinned = lambda self, *args: self.device.type == 'cpu'  # all of its memory is alike
    torch.Tensor.is_cuda = property(lambda self: self.device.type == 'fakegpu')
    compatible = torch._has_compatible_shallow_copy_type
    def has_compatible_type(input: torch.Tensor, from_: torch.Tensor) -> bool:  # as the CPU and CUDA have; torch's compiler looks at the signature
        return compatible(input, from_) or type(input.data) is type(from_) is torch.Tensor
    torch._has_compatible_shallow_copy_type = has_compatible_type
    torch.UntypedStorage.copy_ = copy_storage
    restored = torch.serialization.default_restore_location
    torch.serialization.default_restore_location = lambda storage, location: restored(storage, location.replace('cuda', 'fakegpu'))
    CudaIsFake().__enter__()
    autocast.install()
    parallel.install()
    _add_kernels()
    from accelerate import PartialState  # what asks it for the device compares it with that of tensors
    set_device = PartialState.set_device
    def set_real_device(self):
        set_device(self)
        self.device = real(self.device)
    PartialState.set_device = set_real_device


def _add_kernels():
    "Kernels that the CPU has under other names"
    def conv(x, w, b, *args): return torch.ops.aten.convolution(on_cpu(x), on_cpu(w), None if b is None else on_cpu(b), *args).to(x.device)
    def conv_backward(g, x, w, *args):
        *args, mask = args
        res = torch.ops.aten.convolution_backward(on_cpu(g), on_cpu(x), on_cpu(w), [g.shape[1]], *args, mask)
        return tuple(None if r is None else r.to(x.device) for r in res)
    def batch_norm(x, *args):  # the fallback takes running averages, which its schema does not call changed, for what is read only
        res = torch.ops.aten.native_batch_norm(*(on_cpu(o) if isinstance(o, torch.Tensor) else o for o in (x, *args)))
        return tuple(o.to(x.device) for o in res)
    global _kernels
    _kernels = torch.library.Library('aten', 'IMPL')
    _kernels.impl('convolution_overrideable', conv, 'PrivateUse1')
    _kernels.impl('convolution_backward_overrideable', conv_backward, 'PrivateUse1')
    _kernels.impl('native_batch_norm', batch_norm, 'PrivateUse1')
    for k, f in dict(batch_norm_stats=_stats, batch_norm_gather_stats_with_counts=_gather_stats, batch_norm_elemt=_elements,
                     batch_norm_backward_reduce=_backward_reduce, batch_norm_backward_elemt=_backward_elements).items(): _kernels.impl(k, f, 'PrivateUse1')


# --- the kernels of torch's SyncBatchNorm, which only GPUs have

def _by_channel(t, x): return t.view(1, -1, *[1]*(x.dim()-2))


def _dims(x): return [i for i in range(x.dim()) if i != 1]


def _stats(x, eps):
    var, mean = torch.var_mean(x if x.dtype == torch.float64 else x.float(), _dims(x), correction=0)
    return mean, (var+eps).rsqrt()


def _gather_stats(x, mean, invstd, running_mean, running_var, momentum, eps, counts):
    n = counts.view(-1, 1).to(mean.dtype)
    total = n.sum()
    m = (mean*n).sum(0)/total
    var = (((1/invstd**2-eps)+(mean-m)**2)*n).sum(0)/total
    if running_mean is not None: running_mean.mul_(1-momentum).add_(m*momentum)
    if running_var is not None: running_var.mul_(1-momentum).add_(var*total/(total-1)*momentum)
    return m, (var+eps).rsqrt()


def _elements(x, w, b, mean, invstd, eps):
    y = (x-_by_channel(mean, x))*_by_channel(invstd, x)
    return (y if w is None else y*_by_channel(w, x)+_by_channel(b, x)).to(x.dtype)


def _backward_reduce(g, x, mean, invstd, w, input_g, weight_g, bias_g):
    if w is None and weight_g: raise RuntimeError('tensor does not have a device')  # as seen on a GPU
    sums, products = g.sum(_dims(x)), (g*(x-_by_channel(mean, x))).sum(_dims(x))
    return sums, products, products*invstd if weight_g else None, sums.clone() if bias_g else None


def _backward_elements(g, x, mean, invstd, w, sums, products, counts):
    n = counts.sum()
    res = g-_by_channel(sums/n, x)-(x-_by_channel(mean, x))*_by_channel(invstd*invstd*products/n, x)
    return res*_by_channel(invstd if w is None else invstd*w, x)
