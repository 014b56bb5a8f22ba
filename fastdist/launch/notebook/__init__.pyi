# Where each name of this package is: for type checkers, and for `lazy_names`
from .launcher import launch_in_notebook as launch_in_notebook
