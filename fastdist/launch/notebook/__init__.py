"""Workers that a notebook starts"""
from ...lazy import lazy_names

__getattr__,__all__ = lazy_names(__name__, {
    '.launcher': 'launch_in_notebook',
    '.fork': 'check_fork'})
