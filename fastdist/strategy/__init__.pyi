# Where each name of this package is: for type checkers, and for `lazy_names`
from .base import Strategy as Strategy
from .ddp import Replica as Replica
from .zero1 import Zero1 as Zero1
from .fsdp import FullyShard as FullyShard
