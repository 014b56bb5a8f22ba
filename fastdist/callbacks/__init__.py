"""What a user adds to a fit"""
from ..lazy import lazy_names

__getattr__,__all__ = lazy_names(__name__, __file__)
