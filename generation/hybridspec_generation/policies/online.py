"""What the rounds of this request emitted, over what they cost -> rho (Eq. 4), on the GPU."""

import torch

from ..state import RoundState
from ..tables import SelectionTables


def observe_round(tables: SelectionTables, state: RoundState) -> None:
    """Add the last round's tokens and modelled seconds to `tables.observed`; `tables.throughput` becomes their ratio.

    Before a request's first round, and where a captured round runs to warm up, nothing was emitted and nothing
    changes.
    """
    emitted = state.num_committed
    seconds = tables.fixed_cost + tables.target_cost.index_select(0, state.verify_length)
    tables.observed.add_(torch.cat([emitted, seconds * (emitted > 0)]))
    torch.div(tables.observed[:1], tables.observed[1:], out=tables.throughput)
