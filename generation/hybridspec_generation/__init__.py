"""HybridSpec decoding: the algorithm. Start reading at `decode.py`; it knows no transformers."""

from .config import AcceptanceTable, CostTable, ExpertTable, HybridSpecConfig
from .decode import decode, read_round
from .report import DecodeReport
from .state import RoundState

__all__ = [
    "AcceptanceTable",
    "CostTable",
    "DecodeReport",
    "ExpertTable",
    "HybridSpecConfig",
    "RoundState",
    "decode",
    "read_round",
]
