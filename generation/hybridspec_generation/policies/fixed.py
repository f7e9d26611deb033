"""The same length every round: `static:N`, `full` (vanilla DFlash, N = W) and autoregressive decoding (N = 1)."""

import torch

from hybridspec_kernels import fix_length, fix_length_ref

from ..state import RoundState


class FixedLength:
    """Verify `length` tokens in every round."""

    corrects = False

    def __init__(self, length: int) -> None:
        self.length = length

    def select(self, state: RoundState) -> None:
        """Write the fixed length, and what the budget allows of it."""
        fix = fix_length if state.kernels else fix_length_ref
        fix(self.length, state.remaining, state.nominal_length, state.stage0_length, block=state.block)

    def correct(self, state: RoundState) -> None:
        """Verify what Stage 0 ran on."""
        torch.minimum(state.nominal_length, state.stage0_length, out=state.verify_length)
