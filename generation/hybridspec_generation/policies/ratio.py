"""Expected tokens of a round over its latency: what the competing rules maximise, each over its own lengths."""

from collections.abc import Sequence

import torch

from hybridspec_kernels import select_ratio, select_ratio_ref

from ..state import RoundState
from ..tables import SelectionTables
from .base import Uncorrected


class RatioPolicy(Uncorrected):
    """Picks by (anchor + sum of prefix probabilities) / (time of the whole round), drafting included.

    Args:
        tables: of which the costs and, if calibrated, the isotonic table are read.
        lengths: those of 2..W that the rule may take, ascending; None: all.

    Attributes:
        anchor_tokens: what a round emits besides the accepted draft tokens.
        calibrated: acceptances are the isotonic table's at the confidences, instead of the confidences as they are.
        rising: take the length before the first that does not raise the ratio, instead of the best.
    """

    anchor_tokens = 1
    calibrated = False
    rising = False

    def __init__(self, tables: SelectionTables, lengths: Sequence[int] | None = None) -> None:
        self.tables = tables
        allowed = range(2, len(tables.target_cost)) if lengths is None else lengths
        self.lengths = torch.tensor(allowed, dtype=torch.int32, device=tables.target_cost.device)

    def select(self, state: RoundState) -> None:
        """Write the prefix probabilities that the rule assumes, w0, and what the budget allows of it."""
        t = self.tables
        select = select_ratio if state.kernels else select_ratio_ref
        select(
            state.confidence, state.remaining, t.target_cost, t.fixed_cost, self.lengths, state.prefix_prob,
            state.nominal_length, state.stage0_length, anchor_tokens=self.anchor_tokens, rising=self.rising,
            calibration=(t.confidence_knots, t.acceptance_knots) if self.calibrated else None,
        )  # fmt: skip
