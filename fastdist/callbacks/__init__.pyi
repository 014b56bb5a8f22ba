# Where each name of this package is: for type checkers, and for `lazy_names`
from .data_parallel import ParallelTrainer as ParallelTrainer
from .divergence import DivergenceCheck as DivergenceCheck
from .divergence import DivergenceError as DivergenceError
from .divergence import check_same as check_same
