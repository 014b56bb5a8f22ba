# Where each name of this package is: for type checkers, and for `lazy_names`
from .monitor import DistMonitor as DistMonitor
