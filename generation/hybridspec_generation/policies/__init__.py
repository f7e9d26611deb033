"""Length policies, one a file. A policy sees the round's buffers and writes lengths; it never changes the output."""

from .base import LengthPolicy
from .fixed import FixedLength
from .hybridspec import HybridSpecPolicy, NominalPolicy

__all__ = ["FixedLength", "HybridSpecPolicy", "LengthPolicy", "NominalPolicy"]
