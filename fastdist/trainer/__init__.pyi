# Where each name of this package is: for type checkers, and for `lazy_names`
from .learner import DistributedTrainer as DistributedTrainer
