"""The same length every round: `static:N`, `full` (vanilla DFlash, N = W) and autoregressive decoding (N = 1)."""

from torch import Tensor

from ..state import RoundState


class FixedLength:
    """Verify `length` tokens in every round."""

    extra_tokens = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def select(self, state: RoundState) -> None:
        """Write the fixed length."""
        state.nominal_length.fill_(self.length)

    def correct(self, state: RoundState) -> Tensor:
        """Keep it."""
        return state.nominal_length
