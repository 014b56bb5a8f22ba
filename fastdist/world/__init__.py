"""Who this process is, and how processes start, wait, communicate and fail together: all that a loop of one's own needs"""
from ..lazy import lazy_names

__getattr__,__all__ = lazy_names(__name__, __file__)
