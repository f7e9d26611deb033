"""The same length every round: `static:N`, `full` (vanilla DFlash, N = W) and autoregressive decoding (N = 1)."""

from hybridspec_kernels import fix_length, fix_length_ref

from ..state import RoundState
from .base import Uncorrected


class FixedLength(Uncorrected):
    """Verify `length` tokens in every round."""

    def __init__(self, length: int) -> None:
        self.length = length

    def select(self, state: RoundState) -> None:
        """Write the fixed length, and what the budget allows of it."""
        fix = fix_length if state.kernels else fix_length_ref
        fix(self.length, state.remaining, state.nominal_length, state.stage0_length, block=state.block)
