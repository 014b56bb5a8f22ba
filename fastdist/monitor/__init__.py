"""How fast a fit is, and what limits it"""
from ..lazy import lazy_names

__getattr__,__all__ = lazy_names(__name__, __file__)
