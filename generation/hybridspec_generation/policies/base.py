"""What the round asks of a length policy."""

from typing import Protocol

import torch

from ..state import RoundState


class LengthPolicy(Protocol):
    """Chooses the nominal length before the target runs, and may correct it at the router boundary.

    Attributes:
        corrects: whether `correct` decides something that Stage 0 had to show.

    No length may exceed what the output budget allows (`hybridspec_kernels.limit_length_ref`).
    """

    corrects: bool

    def select(self, state: RoundState) -> None:
        """Write `nominal_length`, `stage0_length` and, if it estimates acceptance, `prefix_prob`."""
        ...

    def correct(self, state: RoundState) -> None:
        """Write `verify_length`, at most `stage0_length`, after Stage 0 has filled the router boundary."""
        ...


class Uncorrected:
    """A policy that decides nothing at the router boundary."""

    corrects = False

    def correct(self, state: RoundState) -> None:
        """Verify w0, within what Stage 0 ran on."""
        torch.minimum(state.nominal_length, state.stage0_length, out=state.verify_length)
