"`from fastdist.all import *` in place of `from fastai.distributed import *`, and beside it, in either order"
import inspect, subprocess, sys

import pytest

CHECK = '''
import fastai.distributed as theirs, fastdist.all as ours
names = 'ParallelTrainer setup_distrib teardown_distrib DistributedDL DistributedTrainer rank0_first'.split()
for o in names: assert globals()[o] is getattr(ours, o) is getattr(theirs, o) and globals()[o].__module__.startswith('fastdist'), o
for o in 'to_parallel detach_parallel parallel_ctx to_distributed detach_distributed distrib_ctx'.split():
    assert getattr(Learner, o).__module__.startswith('fastdist'), o
from torch.nn.parallel import DataParallel, DistributedDataParallel
assert DataParallel.reset.__module__ == DistributedDataParallel.reset.__module__ == 'fastdist.callbacks.data_parallel'
import torch, threading
import sys
assert torch.nn.utils.get_total_norm.__code__.co_filename.startswith(torch.__path__[0]), 'replaced outside of a context'
dear = {'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.fsdp', 'torch.distributed.checkpoint', 'sympy', 'triton'} & set(sys.modules)
assert not dear, f'a third of the time that fastai takes: {dear}'
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized() and threading.active_count() == 1
import psutil
me = psutil.Process()
assert not me.children() and not me.net_connections(), (me.children(), me.net_connections())
'''


ORDERS = [('fastdist.all', 'fastai.distributed'), ('fastai.distributed', 'fastdist.all'), ('fastdist.all', 'fastdist.all'), ('fastdist.trainer.learner', 'fastdist.all')]
EACH = '''
import os, sys
from fastai.basics import * # as all of them do; what follows is a process for each
for order in {orders}:
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]: sys.exit(f'the order {{order}}')
    else:
        for o in order: exec(f'from {{o}} import *')
        exec({check!r})
        sys.stdout.flush()
        os._exit(0)
'''


@pytest.mark.cold
def test_either_order():
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', EACH.format(orders=ORDERS, check=CHECK)], capture_output=True, text=True, timeout=300)
    assert res.returncode == 0, res.stdout + res.stderr


ACCEPTED = ('split_batches', 'gradient_accumulation_steps', 'cpu', 'kwargs_handlers', 'fsdp_plugin', 'parallelism_config', 'dynamo_backend',
            'dynamo_plugin', 'project_dir')


def test_help_shows_accelerates_arguments():
    import pydoc
    from accelerate import Accelerator
    from fastai.basics import Learner
    import fastdist.all
    text = pydoc.render_doc(Learner.distrib_ctx)
    for o in inspect.signature(Accelerator.__init__).parameters:
        if o == 'self': continue
        assert (f'{o}=' in text) == (f' {o}\n' in text) == (o in ACCEPTED), o  # the name, and what it means
    assert 'sync_bn=True, in_notebook=False' in ' '.join(text.split()) and "batch norm's statistics from the global batch?" in text and "Literal['ddp'" in text
    for f in (Learner.to_distributed, fastdist.all.DistributedTrainer): assert 'split_batches' in inspect.signature(f).parameters


LIGHT = '''
import sys
import fastdist.world as world, fastdist.comm
from importlib import import_module
for o in 'ranks store errors rendezvous group'.split(): import_module(f'fastdist.world.{o}')
for o in 'collectives gather rank0'.split(): import_module(f'fastdist.comm.{o}')
for o in world.__all__:
    if o != 'fail_together': getattr(world, o)
assert not {'fastai', 'accelerate', 'pandas', 'torchvision', 'torch._dynamo'} & set(sys.modules), {'fastai', 'accelerate', 'pandas', 'torchvision', 'torch._dynamo'} & set(sys.modules)
print(world.get_rank(), world.get_device(), world.all_gather_list('x'), world.all_reduce_dict(dict(loss=2.)))
world.setup_distrib(); world.teardown_distrib() # one process
assert not {'fastai', 'accelerate'} & set(sys.modules)
'''


@pytest.mark.cold
def test_world_needs_neither_fastai_nor_accelerate():
    "A plain PyTorch loop does not pay for them"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', LIGHT], capture_output=True, text=True, timeout=120)
    assert res.returncode == 0 and "['x'] {'loss': 2.0}" in res.stdout, res.stdout + res.stderr
