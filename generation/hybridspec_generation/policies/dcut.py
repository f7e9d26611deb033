"""D-Cut at batch size one: the best ratio of tokens to time among four fixed fractions of the block."""

from ..tables import SelectionTables
from .ratio import RatioPolicy


class DCutPolicy(RatioPolicy):
    """Verify a quarter, a half, three quarters or all of the block: 4, 8, 12 or 16 tokens of 16, at least 2.

    A length w scores `(1 + sum_{i<w} s_i) / time(w)`, s_i being the product of the first i uncalibrated confidences,
    and of equal ones the shorter is taken.
    D-Cut's printed sum leaves open whether it counts the token that a round always emits. It does here, so that the
    ratio is that of all emitted tokens; `anchor_tokens=0` is the other reading, which leans to longer lengths.

    Args:
        tables: of which the costs are read.
        anchor_tokens: 1 or 0, the token that is always emitted.
    """

    def __init__(self, tables: SelectionTables, anchor_tokens: int = 1) -> None:
        block = len(tables.target_cost) - 1
        super().__init__(tables, sorted({max(2, -(-block * quarters // 4)) for quarters in (1, 2, 3, 4)}))
        self.anchor_tokens = anchor_tokens
