"What autocast casts on a GPU, of the ops that tests use under it: products to half precision, losses to float32"
import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

OPS = {'linear': None, 'cross_entropy_loss': torch.float32}  # `None` is the type that autocast was given
CAST = torch.float16, torch.bfloat16, torch.float32  # float64 stays
_library = None


def _casting(op, dtype):
    def f(*args, **kwargs):
        to = dtype or torch.get_autocast_dtype('fakegpu')
        def cast(o): return o.to(to) if isinstance(o, torch.Tensor) and o.dtype in CAST else o
        with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)): return op(*map(cast, args), **kwargs)
    return f


def install():
    "Take 'cuda' for the device in `torch.autocast`, and in a gradient scaler"
    global _library
    _library = torch.library.Library('aten', 'IMPL')
    for o, dtype in OPS.items(): _library.impl(o, _casting(getattr(torch.ops.aten, o).default, dtype), 'AutocastPrivateUse1')
    for cls in torch.autocast, torch.amp.GradScaler:
        def init(self, device_type='cuda', *args, _init=cls.__init__, **kwargs):
            _init(self, 'fakegpu' if torch.device(device_type).type == 'cuda' else device_type, *args, **kwargs)
        cls.__init__ = init
