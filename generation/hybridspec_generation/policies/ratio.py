"""Expected tokens of a round over its latency: what the competing rules maximise, each over its own lengths."""

import math

import torch
from torch import Tensor

from hybridspec_kernels import limit_length_ref

from ..config import SelectionTables
from ..state import RoundState


class RatioPolicy:
    """Picks by (anchor + sum of prefix probabilities) / (time of the whole round), drafting included.

    Attributes:
        anchor_tokens: what a round emits besides the accepted draft tokens.
    """

    corrects = False
    anchor_tokens = 1

    def __init__(self, tables: SelectionTables) -> None:
        self.tables = tables

    def select(self, state: RoundState) -> None:
        """Write the prefix probabilities that the rule assumes, w0, and what the budget allows of it."""
        t = self.tables
        torch.cumprod(self.acceptance(state.confidence), 0, out=state.prefix_prob)
        tokens = self.anchor_tokens + state.prefix_prob.cumsum(0)
        state.nominal_length.copy_(self.choose(tokens / (t.fixed_cost + t.target_cost[2:])))
        state.stage0_length.copy_(limit_length_ref(state.nominal_length, state.remaining, state.block))

    def correct(self, state: RoundState) -> None:
        """Verify what Stage 0 ran on."""
        torch.minimum(state.nominal_length, state.stage0_length, out=state.verify_length)

    def acceptance(self, confidence: Tensor) -> Tensor:
        """`[D]`: each draft token's probability of acceptance after those before it; here the confidence as it is."""
        return confidence

    def choose(self, ratio: Tensor) -> Tensor:
        """`[1]`, the length; ratio: `[D]`, of the lengths 2..W, NaN from the first confidence that is NaN on."""
        raise NotImplementedError


def first_best(ratio: Tensor) -> Tensor:
    """`[1]`, index of the best ratio, of equal ones the first; NaN is worth nothing."""
    return ratio.nan_to_num(nan=-math.inf, posinf=math.inf).argmax(0, keepdim=True)
