"""Token-by-token GDN recurrence (Eq. 1): the definition that the block forms are checked against."""

import torch
from torch import Tensor

from .gates import compute_dtype, gdn_gates_ref, to_value_heads, unit_length_ref


def gdn_recurrent_ref(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and the state after every token, one token at a time (Eq. 1).

    Args:
        q, k: `[W, H, K]`, after the convolution, not yet normalised.
        v: `[W, HV, V]`, after the convolution.
        a, b: `[W, HV]`, raw gate projections. A_log, dt_bias: `[HV]`.
        state: `[HV, V, K]`, the state before the first token; not modified.

    Returns:
        `outputs` `[W, HV, V]` and `states` `[W, HV, V, K]`, both fp32 (fp64 if an input is).
    """
    dtype = compute_dtype(q, k, v, state)
    heads = v.shape[1]
    log_decay, beta = gdn_gates_ref(a, b, A_log, dt_bias, dtype)
    q = to_value_heads(q.to(dtype) * unit_length_ref(q, dtype) * q.shape[-1] ** -0.5, heads)
    k = to_value_heads(k.to(dtype) * unit_length_ref(k, dtype), heads)
    v, state = v.to(dtype), state.to(dtype)
    outputs, states = [], []
    for i in range(q.shape[0]):
        decayed = log_decay[i].exp()[:, None, None] * state
        z = beta[i][:, None] * (v[i] - torch.einsum("hvk,hk->hv", decayed, k[i]))
        state = decayed + z[:, :, None] * k[i][:, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[i]))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)
