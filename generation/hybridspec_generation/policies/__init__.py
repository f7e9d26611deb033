"""Length policies, one a file. A policy sees the round's buffers and writes lengths; it never changes the output."""

from .base import LengthPolicy
from .dcut import DCutPolicy
from .dspark import DSparkPolicy
from .evict import EvictPolicy
from .fixed import FixedLength
from .hybridspec import HybridSpecPolicy, NominalPolicy

__all__ = [
    "DCutPolicy", "DSparkPolicy", "EvictPolicy", "FixedLength", "HybridSpecPolicy", "LengthPolicy", "NominalPolicy",
]  # fmt: skip
