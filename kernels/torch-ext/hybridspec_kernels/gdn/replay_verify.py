"""A block of w tokens -> GDN outputs from a checkpoint and a ring of later updates: ReplaySSM, to compare with.

The state before the block is Eq. 2 over the ring. It is applied to the block's keys and queries and never formed; the
rest is Eq. 3, 9 and 10. The block's own updates go to the ring's next entries.
"""

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_tensor
from ..tiles import dot_precision, input_dot, log_decay, opaque, split_dot, wide_dot, widen, within, write_strength
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .gates import NORM_EPS, to_value_heads
from .recurrent_verify import check_block, split_heads
from .verify import CompactFactors, gdn_verify_ref, solve_rows


def replay_ref(state: Tensor, ring: CompactFactors, count: Tensor) -> Tensor:
    """The state `[..., HV, V, K]` after the ring's first `count` entries (Eq. 2), in the state's dtype.

    Args:
        state: `[..., HV, V, K]`, the checkpoint. ring: leading dimensions as in `state`.
        count: `[1]`, integer, on the device; entries from there on are ignored, whatever they hold.
    """
    z, k, g = (factor.to(state.dtype) for factor in ring)
    live = torch.arange(z.shape[-3], device=z.device)[:, None] < count
    g_n = torch.where(count > 0, g.index_select(-2, (count.long() - 1).clamp_min(0)), 0.0)
    # where, not a product: ignored entries may hold NaN
    weight = torch.where(live, g_n - g, float("-inf")).exp()
    z = torch.where(live[..., None], z, 0.0) * weight[..., None]
    k = to_value_heads(torch.where(live[..., None], k, 0.0), z.shape[-2])
    return g_n.exp()[..., 0, :, None, None] * state + torch.einsum("...rhv,...rhk->...hvk", z, k)


def gdn_replay_verify_ref(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring: CompactFactors,
    count: Tensor,
    out: Tensor,
    *,
    key_heads: int,
) -> None:
    """Arguments of `gdn_replay_verify`, which describes them; the state before the block is formed here."""
    before = replay_ref(state, ring, count)
    outputs, (z, k, g) = gdn_verify_ref(*split_heads(x, state, key_heads), a, b, A_log, dt_bias, before)
    out.copy_(outputs)
    g_n = torch.where(count > 0, ring.g.index_select(0, (count.long() - 1).clamp_min(0)), 0.0)
    entries = count + torch.arange(len(x), device=x.device)
    for buffer, factor in zip(ring, (z, k, g + g_n), strict=True):
        buffer.index_copy_(0, entries, factor.to(buffer.dtype))


@jit
def _gdn_replay_verify_kernel(
    x, a, b, A_log, dt_bias, state, ring_z, ring_k, ring_g, count, out,
    W: tl.constexpr, R: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + HV * V
    i_v, i_hv = tl.program_id(0), tl.program_id(1)
    i_h = i_hv // (HV // H)
    o_t, o_r, o_k = tl.arange(0, BT), tl.arange(0, R), tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_t, m_k, m_v = o_t < W, within(o_k, K, BK), within(o_v, V, BV)
    m_tk, m_tv = m_t[:, None] & m_k[None, :], m_t[:, None] & m_v[None, :]
    start_next(USE_PDL)

    # what is read up to the wait has not changed since the last commit
    n = tl.load(count)
    m_r = o_r < n
    p_s = state + i_hv.to(tl.int64) * (V * K) + o_v[:, None] * K + o_k[None, :]
    p_rk = ring_k + o_r[:, None] * (H * K) + i_h * K + o_k[None, :]
    p_rz = ring_z + o_r[:, None] * (HV * V) + i_hv * V + o_v[None, :]
    # [BV, BK]
    b_s = tl.load(p_s, mask=m_v[:, None] & m_k[None, :], other=0.0)
    rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
    b_dt = tl.load(dt_bias + i_hv).to(tl.float32)
    # [], [R], [R, BK], [R, BV]
    g_n = tl.load(ring_g + (n - 1) * HV + i_hv, mask=n > 0, other=0.0)
    r_g = tl.load(ring_g + o_r * HV + i_hv, mask=m_r, other=0.0)
    r_k = tl.load(p_rk, mask=m_r[:, None] & m_k[None, :], other=0.0)
    r_z = tl.load(p_rz, mask=m_r[:, None] & m_v[None, :], other=0.0)
    # all loads before the first use: they are one trip to memory then, not several in a row
    r_k, r_z = opaque(r_k), opaque(r_z)
    s_high, s_low = widen(b_s, PRECISION)
    r_z *= tl.exp(tl.where(m_r, g_n - r_g, float("-inf")))[:, None]
    await_previous(USE_PDL)

    # [BT, BK], [BT, BK], [BT, BV]
    p_x = x + o_t[:, None] * C
    b_q = tl.load(p_x + i_h * K + o_k[None, :], mask=m_tk, other=0.0)
    b_k = tl.load(p_x + H * K + i_h * K + o_k[None, :], mask=m_tk, other=0.0)
    b_v = tl.load(p_x + 2 * H * K + i_hv * V + o_v[None, :], mask=m_tv, other=0.0)
    # [BT]
    b_a = tl.load(a + o_t * HV + i_hv, mask=m_t, other=0.0)
    b_b = tl.load(b + o_t * HV + i_hv, mask=m_t, other=0.0)
    b_q, b_k, b_v = opaque(b_q), opaque(b_k), opaque(b_v)
    beta = write_strength(b_b)
    g = tl.cumsum(tl.where(m_t, log_decay(b_a, rate, b_dt), 0.0), 0)
    # the keys' squared lengths are the diagonal of their products, [BT, BT]
    b_kk = input_dot(b_k, tl.trans(b_k), PRECISION)
    k_scale = tl.rsqrt(tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_kk, 0.0), 1) + EPS)
    q_squares = b_q.to(tl.float32) * b_q.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(q_squares, 1) + EPS) * K**-0.5

    # S_n applied to the raw queries and keys, [BT, BV]
    s_high, s_low, r_k = tl.trans(s_high), tl.trans(s_low), tl.trans(r_k)
    decay = tl.exp(g_n)
    b_qs = decay * wide_dot(b_q, s_high, s_low, PRECISION)
    b_ks = decay * wide_dot(b_k, s_high, s_low, PRECISION)
    b_qs = split_dot(input_dot(b_q, r_k, PRECISION), r_z, b_qs, PRECISION)
    b_ks = split_dot(input_dot(b_k, r_k, PRECISION), r_z, b_ks, PRECISION)

    # masked before exp: above the diagonal the difference is positive and overflows under strong decay
    gamma = tl.exp(tl.where(o_t[None, :] <= o_t[:, None], g[:, None] - g[None, :], float("-inf")))
    gamma *= k_scale[None, :]
    b_x = tl.where(o_t[None, :] < o_t[:, None], gamma * b_kk, 0.0)
    rhs = beta[:, None] * (b_v.to(tl.float32) - (tl.exp(g) * k_scale)[:, None] * b_ks)
    b_z = solve_rows((-beta * k_scale)[:, None] * b_x, rhs, W, PRECISION)
    b_y = q_scale[:, None] * gamma * input_dot(b_q, tl.trans(b_k), PRECISION)
    b_o = split_dot(b_y, b_z, (tl.exp(g) * q_scale)[:, None] * b_qs, PRECISION)

    o_o = o_t[:, None] * (HV * V) + i_hv * V + o_v[None, :]
    tl.store(out + o_o, b_o.to(out.dtype.element_ty), mask=m_tv)
    tl.store(ring_z + n * (HV * V) + o_o, b_z * k_scale[:, None], mask=m_tv)
    if i_v == 0:
        tl.store(ring_g + (n + o_t) * HV + i_hv, g_n + g, mask=m_t)
        if i_hv % (HV // H) == 0:
            tl.store(ring_k + (n + o_t)[:, None] * (H * K) + i_h * K + o_k[None, :], b_k, mask=m_tk)


@launcher
def gdn_replay_verify(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    ring: CompactFactors,
    count: Tensor,
    out: Tensor,
    *,
    key_heads: int,
    overlap: bool = False,
) -> None:
    """Verify a block of tokens of one layer from its checkpoint and ring; append the block to the ring.

    Args:
        x: `[W, C]`, W <= 16, the convolved rows: H*K queries, H*K keys, HV*V values.
        a, b: `[W, HV]`, raw gate projections. A_log, dt_bias: `[HV]`.
        state: `[HV, V, K]`, fp32, the checkpoint; read only.
        ring: the updates since the checkpoint, z `[R, HV, V]` fp32, k `[R, H, K]` in x's dtype, g `[R, HV]` fp32 and
            cumulative from the checkpoint on; R = `ring_capacity` of the longest block. The first `count` entries
            are read, the next W written.
        count: `[1]`, int32, on the device, at most R - W: the ring's committed entries. Never read by the host.
        out: `[W, HV, V]`, written in its dtype.
        key_heads: H. Each key head serves `HV // H` consecutive value heads.
        overlap: start before the previous kernel ends, which must not be a commit of this ring or write a parameter.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    check_block(x, a, b, A_log, dt_bias, state, out, key_heads)
    W, R, (HV, V, K) = len(x), len(ring.z), state.shape
    if W > MAX_TOKENS:
        raise ValueError(
            f"The replay kernel verifies up to {MAX_TOKENS} tokens, got {W}: its solve covers one "
            f"{MAX_TOKENS} x {MAX_TOKENS} tile. Use a shorter block or gdn_recurrent_verify."
        )
    check_ring(ring, (), HV, V, key_heads, K, x.dtype, W)
    check_tensor("count", count, (1,), torch.int32)
    options = launch_options(x.device, overlap)
    BK, BV = max(16, triton.next_power_of_2(K)), min(32, max(16, triton.next_power_of_2(V)))
    _gdn_replay_verify_kernel[(triton.cdiv(V, BV), HV)](
        x, a, b, A_log, dt_bias, state, *ring, count, out,
        W=W, R=R, H=key_heads, HV=HV, K=K, V=V, BT=MAX_TOKENS, BK=BK, BV=BV, EPS=NORM_EPS,
        PRECISION=dot_precision(x.dtype), num_warps=8, **options,
    )  # fmt: skip


def ring_capacity(block: int) -> int:
    """Entries of the ring for blocks of up to `block` tokens: a power of two that holds two of them, at least 16."""
    return max(16, 1 << (2 * block - 1).bit_length())


def check_ring(
    ring: CompactFactors, layers: tuple[int, ...], HV: int, V: int, H: int, K: int, dtype: torch.dtype, longest: int
) -> None:
    """Raise unless the ring has these sizes (after the dimensions `layers`) and room for blocks of `longest`."""
    R = ring.z.shape[len(layers)]
    smallest = ring_capacity(longest)
    if R & (R - 1) or smallest > R:
        raise ValueError(
            f"The ring has {R} entries; for blocks of {longest} tokens it must be a power of two from {smallest} on, "
            f"since it is a tile of the kernel and takes two blocks. Allocate ring_capacity({longest}) entries."
        )
    check_tensor("ring.z", ring.z, (*layers, R, HV, V), torch.float32)
    check_tensor("ring.k", ring.k, (*layers, R, H, K), dtype)
    check_tensor("ring.g", ring.g, (*layers, R, HV), torch.float32)
