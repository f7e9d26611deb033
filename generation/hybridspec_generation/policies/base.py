"""What the round asks of a length policy."""

from typing import Protocol

from torch import Tensor

from ..state import RoundState


class LengthPolicy(Protocol):
    """Chooses the nominal length before the target runs, and may correct it at the router boundary.

    Attributes:
        extra_tokens: tokens beyond w0 that Stage 0 processes: 1 with the routing correction, else 0.
    """

    extra_tokens: int

    def select(self, state: RoundState) -> None:
        """Write `state.nominal_length` (and `state.prefix_prob` if it estimates acceptance)."""
        ...

    def correct(self, state: RoundState) -> Tensor:
        """Return w_c, `[1]`, int32, after Stage 0 has filled the router boundary."""
        ...
