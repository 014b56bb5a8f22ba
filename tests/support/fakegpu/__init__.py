"""GPUs that are not there, so that a machine without one runs the branches for GPUs, with real numbers.

`install(library)`: from then on 'cuda:1' is the device 1 of device.cpp, which `build()` compiles: memory of the CPU's whose bytes are counted, and on
which an op on tensors of two devices is an error. `torch.cuda` answers for it, and the backend 'nccl' is gloo under nccl's rules (nccl.py).
`HostSyncs` counts where the host waits for the device (waits.py). Autocast casts what tests use (autocast.py); products in half precision are the CPU's.

What it does not show: the order of kernels on streams, waits of autograd's own threads, the rounding of a GPU's kernels of half precision,
cuDNN, links between GPUs, and time.
"""
from .build import build, no_backend, why_not
from .waits import HostSyncs

installed = False


def install(library):
    "Let this process have the devices; before anything of it asks for one"
    global installed
    if installed: return
    from . import cuda, nccl
    cuda.install(str(library))
    nccl.install()
    installed = True
