# Where each name of this package is: for type checkers, and for `lazy_names`
from .base import Strategy as Strategy
from .ddp import Replica as Replica
from .zero import ShardedSteps as ShardedSteps
from .zero import ShardedGradients as ShardedGradients
from .fsdp import FullyShard as FullyShard
