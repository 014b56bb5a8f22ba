"What autocast casts on a GPU, of the ops that tests use: products to half precision, losses to float32"
import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

HALF = 'linear', 'matmul', 'mm', 'addmm', 'bmm', 'conv1d', 'conv2d'
FLOAT = 'log_softmax.int', 'softmax.int', 'nll_loss', 'nll_loss_nd', 'cross_entropy_loss', 'mse_loss', 'layer_norm', 'pow.Tensor_Scalar'
CAST = torch.float16, torch.bfloat16, torch.float32  # float64 stays
_library = None


def _casting(op, dtype):
    def f(*args, **kwargs):
        to = dtype or torch.get_autocast_dtype('fakegpu')
        def cast(o): return o.to(to) if isinstance(o, torch.Tensor) and o.dtype in CAST and o.device.type == 'fakegpu' else o
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)): return op(*map(cast, args), **kwargs)
    return f


def install():
    "Take 'cuda' for the device in `torch.autocast`, and in a gradient scaler"
    global _library
    _library = torch.library.Library('aten', 'IMPL')
    for names, dtype in ((HALF, None), (FLOAT, torch.float32)):
        for o in names:
            name, _, overload = o.partition('.')
            _library.impl(o, _casting(getattr(getattr(torch.ops.aten, name), overload or 'default'), dtype), 'AutocastPrivateUse1')
    for cls in torch.autocast, torch.amp.GradScaler:
        def init(self, device_type='cuda', *args, _init=cls.__init__, **kwargs):
            _init(self, 'fakegpu' if torch.device(device_type).type == 'cuda' else device_type, *args, **kwargs)
        cls.__init__ = init
