"""All that a script needs: `from fastdist.all import *`, in place of `from fastai.distributed import *`"""
import fastai.distributed as _fastai

from fastdist.data.dl import DistributedDL
from fastdist.launch.notebook.launcher import end_workers, launch_in_notebook
from fastdist.callbacks.data_parallel import ParallelTrainer
from fastdist.checkpoint.resume import Resume
from fastdist.metrics.losses import GlobalBatchLoss
from fastdist.monitor.monitor import DistMonitor
import fastdist.monitor.plan # `learn.distrib_plan`
from fastdist.trainer.learner import DistributedTrainer
from fastdist.world import (RemoteError, fail_together, get_rank, get_world_size, is_master, print_in_order, rank0_first,
                            rank0_only, rank0_read, setup_distrib, teardown_distrib)

__all__ = ['ParallelTrainer', 'DistributedDL', 'DistributedTrainer', 'rank0_first', 'setup_distrib', 'teardown_distrib',
           'get_rank', 'get_world_size', 'is_master', 'DistMonitor', 'GlobalBatchLoss',
           'RemoteError', 'fail_together', 'print_in_order', 'rank0_only', 'rank0_read', 'launch_in_notebook',
           'end_workers', 'Resume']

# A script may import fastai.distributed as well, before or after: its names are these, as the methods of `Learner` are
for _nm in _fastai.__all__: setattr(_fastai, _nm, globals()[_nm])
