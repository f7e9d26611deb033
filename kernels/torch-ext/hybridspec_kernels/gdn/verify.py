"""A block of w tokens -> GDN outputs and compact factors, without any per-token state (Eq. 3, 9, 10)."""

from typing import NamedTuple

import torch
from torch import Tensor

from .gates import compute_dtype, gdn_gates_ref, to_value_heads, unit_rows_ref


class CompactFactors(NamedTuple):
    """What a GDN layer keeps of a block: Eq. 2 rebuilds the state after any of its tokens from these and S0.

    Attributes:
        z: `[..., W, HV, V]`, fp32, the updates.
        k: `[..., W, H, K]`, fp32, the unit keys, not scaled by any decay.
        g: `[..., W, HV]`, fp32, the cumulative log decay since the start of the block.
    """

    z: Tensor
    k: Tensor
    g: Tensor


def gdn_verify_ref(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, CompactFactors]:
    """Verify a block of tokens from the state before it (Eq. 3 for the factors, Eq. 10 for the outputs).

    Args:
        q, k: `[W, H, K]`, after the convolution, not yet normalised.
        v: `[W, HV, V]`, after the convolution.
        a, b: `[W, HV]`, raw gate projections. A_log, dt_bias: `[HV]`.
        state: `[HV, V, K]`, S0; read only.

    Returns:
        `outputs` `[W, HV, V]` in v's dtype, and the block's compact factors in fp32 (fp64 if an input is).
    """
    dtype = compute_dtype(q, k, v, state)
    heads = v.shape[1]
    log_decay, beta = gdn_gates_ref(a, b, A_log, dt_bias, dtype)
    g = log_decay.cumsum(0)
    unit_k = unit_rows_ref(k, dtype)
    # [HV, W, ·]
    queries = to_value_heads(unit_rows_ref(q, dtype) * q.shape[-1] ** -0.5, heads).transpose(0, 1)
    keys = to_value_heads(unit_k, heads).transpose(0, 1)
    values, s0_t = v.to(dtype).transpose(0, 1), state.to(dtype).transpose(1, 2)
    decay, beta = g.exp().t()[..., None], beta.t()[..., None]

    gamma = decay_mask(g)
    system = (beta * gamma * (keys @ keys.transpose(1, 2))).tril(-1)
    rhs = beta * (values - decay * (keys @ s0_t))
    z = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    out = decay * (queries @ s0_t) + (gamma * (queries @ keys.transpose(1, 2))) @ z
    return out.transpose(0, 1).to(v.dtype), CompactFactors(z.transpose(0, 1), unit_k, g)


def decay_mask(g: Tensor) -> Tensor:
    """Gamma: `[W, HV]` cumulative log decay -> `[HV, W, W]`, `exp(g_i - g_j)` for j <= i and 0 above the diagonal."""
    difference = g.t()[:, :, None] - g.t()[:, None, :]
    # masked before exp: above the diagonal the difference is positive and overflows under strong decay
    causal = torch.ones_like(difference, dtype=torch.bool).tril()
    return difference.masked_fill(~causal, float("-inf")).exp()
