"""HybridSpec decoding: the algorithm. Start reading at `decode.py`; it knows no transformers."""

from .config import HybridSpecConfig
from .decode import decode, read_round
from .report import DecodeReport
from .state import RoundState
from .tables import AcceptanceTable, CalibratedFor, CostTable, ExpertTable, cost_at

__all__ = [
    "AcceptanceTable",
    "CalibratedFor",
    "CostTable",
    "DecodeReport",
    "ExpertTable",
    "HybridSpecConfig",
    "RoundState",
    "cost_at",
    "decode",
    "read_round",
]
