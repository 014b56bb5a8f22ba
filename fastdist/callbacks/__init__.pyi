# Where each name of this package is: for type checkers, and for `lazy_names`
from .data_parallel import ParallelTrainer as ParallelTrainer
