"""How a model lives on many workers"""
from ..lazy import lazy_names

__getattr__,__all__ = lazy_names(__name__, __file__)
