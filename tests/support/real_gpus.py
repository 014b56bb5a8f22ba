"""GPUs of this machine, for workers that may be more than there are.

A GPU of which several workers are is not what a user may have: nccl joins no two of one GPU. It does where they are of different hosts, and
each can be told that it is. So a machine with one GPU runs all that one with four does, with real streams, memory and collectives, though
not their time."""
import os

HIDDEN = 'FASTDIST_TEST_HIDDEN_GPUS'


def hide():
    """Whether there are GPUs; this process and all that it starts see none from then on, but the workers of `gpu_worlds`, in whose
    environment `shown()` is"""
    if HIDDEN in os.environ: return bool(os.environ[HIDDEN])
    import torch
    seen = os.environ.get('CUDA_VISIBLE_DEVICES')
    n = torch.cuda._device_count_nvml() if torch.version.cuda else 0  # the driver, once asked, goes by the environment of that moment
    os.environ[HIDDEN] = (seen or ','.join(map(str, range(n)))) if n > 0 else ''
    if n > 0: os.environ['CUDA_VISIBLE_DEVICES'] = ''
    return n > 0


def shown(): return dict(CUDA_VISIBLE_DEVICES=os.environ[HIDDEN], FASTDIST_TEST_GPUS='real')


def share(size):
    "Let `size` workers of this machine be of its GPUs in turn"
    import torch
    n = torch.cuda.device_count()
    if size <= n: return
    from fastdist.world import process_group
    os.environ['NCCL_HOSTID'] = os.environ.get('RANK', os.environ.get('I'))
    process_group._own_gpu = lambda store, local_rank, *_: local_rank % n
