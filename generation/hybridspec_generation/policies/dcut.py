"""D-Cut at batch size one: the best ratio of tokens to time among four fixed fractions of the block."""

import torch
from torch import Tensor

from ..config import SelectionTables
from .ratio import RatioPolicy, first_best


class DCutPolicy(RatioPolicy):
    """Verify a quarter, a half, three quarters or all of the block: 4, 8, 12 or 16 tokens of 16, at least 2.

    A length w scores `(1 + sum_{i<w} s_i) / time(w)`, s_i being the product of the first i uncalibrated confidences.
    D-Cut's printed sum leaves open whether it counts the token that a round always emits. It does here, so that the
    ratio is that of all emitted tokens; `anchor_tokens=0` is the other reading, which leans to longer lengths.

    Args:
        tables: of which the costs are read.
        anchor_tokens: 1 or 0, the token that is always emitted.
    """

    def __init__(self, tables: SelectionTables, anchor_tokens: int = 1) -> None:
        super().__init__(tables)
        self.anchor_tokens = anchor_tokens
        block = len(tables.target_cost) - 1
        lengths = sorted({max(2, -(-block * quarters // 4)) for quarters in (1, 2, 3, 4)})
        self.lengths = torch.tensor(lengths, device=tables.target_cost.device)

    def choose(self, ratio: Tensor) -> Tensor:
        """The best of the four, the shorter of equal ones."""
        return self.lengths.index_select(0, first_best(ratio.index_select(0, self.lengths - 2)))
