"""A block of w tokens -> GDN outputs and the full state after every token (Eq. 1): SGLang's verifier, to compare with.

What it stores is `V * K` numbers per token, head and layer, of which the commit keeps one token's.
"""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..tiles import log_decay, within, write_strength
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .gates import NORM_EPS
from .recurrent import gdn_recurrent_ref


def gdn_recurrent_verify_ref(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    token_states: Tensor,
    out: Tensor,
    *,
    key_heads: int,
) -> None:
    """`gdn_recurrent_ref` with the arguments of `gdn_recurrent_verify`, which describes them."""
    outputs, states = gdn_recurrent_ref(*split_heads(x, state, key_heads), a, b, A_log, dt_bias, state)
    out.copy_(outputs)
    token_states.copy_(states)


@jit
def _gdn_recurrent_verify_kernel(
    x, a, b, A_log, dt_bias, state, token_states, out,
    W: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, EPS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + HV * V
    i_v, i_hv = tl.program_id(0), tl.program_id(1)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = within(o_k, K, BK), within(o_v, V, BV)
    m_s = m_v[:, None] & m_k[None, :]
    o_s = i_hv.to(tl.int64) * (V * K) + o_v[:, None] * K + o_k[None, :]
    o_q = i_hv // (HV // H) * K + o_k
    start_next(USE_PDL)

    # [BV, BK]
    b_s = tl.load(state + o_s, mask=m_s, other=0.0)
    rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
    b_dt = tl.load(dt_bias + i_hv).to(tl.float32)
    p_states = token_states + o_s
    await_previous(USE_PDL)

    for i_t in range(W):
        p_x = x + i_t * C
        # [BK], [BK], [BV]
        b_q = tl.load(p_x + o_q, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_x + H * K + o_q, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_x + 2 * H * K + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        decay = tl.exp(log_decay(tl.load(a + i_t * HV + i_hv), rate, b_dt))
        beta = write_strength(tl.load(b + i_t * HV + i_hv))
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * K**-0.5
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)

        b_s *= decay
        b_z = beta * (b_v - tl.sum(b_s * b_k[None, :], 1))
        b_s += b_z[:, None] * b_k[None, :]
        b_o = tl.sum(b_s * b_q[None, :], 1)
        tl.store(out + (i_t * HV + i_hv) * V + o_v, b_o.to(out.dtype.element_ty), mask=m_v)
        tl.store(p_states, b_s, mask=m_s)
        # a pointer that moves: the offset of a token's states outgrows int32
        p_states += HV * V * K


@launcher
def gdn_recurrent_verify(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    token_states: Tensor,
    out: Tensor,
    *,
    key_heads: int,
    overlap: bool = False,
) -> None:
    """Verify a block of tokens of one layer, keeping the state after each of them (Eq. 1).

    Args:
        x: `[W, C]`, the convolved rows: H*K queries, H*K keys, HV*V values.
        a, b: `[W, HV]`, raw gate projections. A_log, dt_bias: `[HV]`.
        state: `[HV, V, K]`, fp32, the state before the first token; read only.
        token_states: `[W, HV, V, K]`, fp32, written: the state after each token.
        out: `[W, HV, V]`, written in its dtype.
        key_heads: H. Each key head serves `HV // H` consecutive value heads.
        overlap: start before the previous kernel ends, which must not be one that writes `state` or a parameter.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    check_block(x, a, b, A_log, dt_bias, state, out, key_heads)
    check_tensor("token_states", token_states, (len(x), *state.shape), state.dtype)
    HV, V, K = state.shape
    options = launch_options(x.device, overlap)
    # one warp on few rows: the loop is a chain of latencies, and many small programs hide them
    BV = min(4, triton.next_power_of_2(V))
    _gdn_recurrent_verify_kernel[(triton.cdiv(V, BV), HV)](
        x, a, b, A_log, dt_bias, state, token_states, out,
        W=len(x), H=key_heads, HV=HV, K=K, V=V, BK=triton.next_power_of_2(K), BV=BV, EPS=NORM_EPS,
        num_warps=1, **options,
    )  # fmt: skip


def split_heads(x: Tensor, state: Tensor, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """`x` `[W, C]` -> q, k `[W, H, K]` and v `[W, HV, V]` for a state `[HV, V, K]`."""
    HV, V, K = state.shape
    q, k, v = x.split([key_heads * K, key_heads * K, HV * V], dim=-1)
    return q.unflatten(-1, (key_heads, K)), k.unflatten(-1, (key_heads, K)), v.unflatten(-1, (HV, V))


def check_block(
    x: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, out: Tensor, key_heads: int
) -> None:
    """Raise unless a block's tensors have the sizes that `state` and `key_heads` imply, fp32 state included."""
    W, (HV, V, K) = len(x), state.shape
    if HV % key_heads:
        raise ValueError(
            f"{HV} value heads do not divide among {key_heads} key heads. Pass the layer's key_heads and its state."
        )
    check_tensor("state", state, (HV, V, K), torch.float32)
    check_tensor("x", x, (W, 2 * key_heads * K + HV * V))
    check_tensor("out", out, (W, HV, V))
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(name, tensor, (W, HV))
    for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(name, tensor, (HV,))
