# Where each name of this package is: for type checkers, and for `lazy_names`
from .dl import DistributedDL as DistributedDL
