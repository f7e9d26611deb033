"""Compact factors + S0 -> the state after m committed tokens, all GDN layers at once, in place (Eq. 7)."""

import torch
from torch import Tensor

from .gates import to_value_heads
from .verify import CompactFactors


def gdn_commit_ref(state: Tensor, factors: CompactFactors, num_committed: Tensor) -> None:
    """Advance every GDN layer's state through the committed tokens, in place (Eq. 7).

    Args:
        state: `[L, HV, V, K]`, fp32 (or fp64), the states at the start of the round.
        factors: z `[L, W, HV, V]`, k `[L, W, H, K]`, g `[L, W, HV]`; rows from `num_committed` on are ignored,
            whatever they hold.
        num_committed: `[1]`, integer, on the state's device, 1..W. Never read by the host.
    """
    z, k, g = factors
    kept = torch.arange(z.shape[1], device=z.device) < num_committed
    g_m = g.index_select(1, num_committed.long() - 1)
    # where, not a product: ignored rows may hold NaN
    weight = torch.where(kept[None, :, None], g_m - g, float("-inf")).exp()
    z = torch.where(kept[None, :, None, None], z, 0.0) * weight[..., None]
    k = to_value_heads(torch.where(kept[None, :, None, None], k, 0.0), z.shape[2])
    state.mul_(g_m[:, 0].exp()[..., None, None]).add_(torch.einsum("lwhv,lwhk->lhvk", z, k))
