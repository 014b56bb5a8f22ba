"What torch's `DataParallel` asks of the devices of one process, which torch has for CUDA only"
import sys

import torch
import torch.nn.parallel.comm as comm


def _at(i): return torch.device('fakegpu', i)


def broadcast_coalesced(tensors, devices, buffer_size=0):
    "The device that has them keeps its own, as with CUDA"
    return [[t.detach().to(_at(i)) for t in tensors] for i in devices]


def reduce_add_coalesced(inputs, destination=None, buffer_size=0):
    return tuple(sum(t.detach().to(_at(destination)) for t in ts) for ts in zip(*inputs))


def scatter(tensor, devices, chunk_sizes=None, dim=0, streams=None, *, out=None):
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    return tuple(p.to(_at(i), copy=True) for p, i in zip(parts, devices))


def gather(tensors, dim=0, destination=None, *, out=None): return torch.cat([t.to(_at(destination)) for t in tensors], dim)


def install():
    for f in broadcast_coalesced, reduce_add_coalesced, scatter, gather: setattr(comm, f.__name__, f)
    sys.modules['torch.nn.parallel.data_parallel']._get_available_device_type = lambda: 'fakegpu'
