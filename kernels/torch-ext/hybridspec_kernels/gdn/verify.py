"""A block of w tokens -> GDN outputs and compact factors, without any per-token state (Eq. 3, 9, 10)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..tiles import (
    convolve,
    dot_precision,
    input_dot,
    load_taps,
    log_decay,
    opaque,
    split_dot,
    wide_dot,
    widen,
    within,
    write_strength,
)
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .gates import compute_dtype, gdn_gates_ref, to_value_heads, unit_length_ref


class CompactFactors(NamedTuple):
    """What a GDN layer keeps of a block: Eq. 2 rebuilds the state after any of its tokens from these and S0.

    The equations' z and unit k appear only as the product z k^T. Stored are the key as the convolution gave it and z
    divided by the key's length: the product is the same, and the key is an exact 16-bit matrix operand.

    Attributes:
        z: `[..., W, HV, V]`, fp32, the updates over the lengths of their keys.
        k: `[..., W, H, K]`, model dtype, the keys, neither normalised nor decayed.
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
        `outputs` `[W, HV, V]` in v's dtype, and the block's compact factors, z and g in fp32 (fp64 if an input is).
    """
    dtype = compute_dtype(q, k, v, state)
    heads = v.shape[1]
    log_decay, beta = gdn_gates_ref(a, b, A_log, dt_bias, dtype)
    g = log_decay.cumsum(0)
    # over the lengths: [W, H, 1]
    q_scale, k_scale = unit_length_ref(q, dtype) * q.shape[-1] ** -0.5, unit_length_ref(k, dtype)
    # [HV, W, ·]
    queries = to_value_heads(q.to(dtype) * q_scale, heads).transpose(0, 1)
    keys = to_value_heads(k.to(dtype) * k_scale, heads).transpose(0, 1)
    values, s0_t = v.to(dtype).transpose(0, 1), state.to(dtype).transpose(1, 2)
    decay, beta = g.exp().t()[..., None], beta.t()[..., None]

    gamma = decay_mask(g)
    system = (beta * gamma * (keys @ keys.transpose(1, 2))).tril(-1)
    rhs = beta * (values - decay * (keys @ s0_t))
    z = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    out = decay * (queries @ s0_t) + (gamma * (queries @ keys.transpose(1, 2))) @ z
    z = z.transpose(0, 1) * to_value_heads(k_scale, heads)
    return out.transpose(0, 1).to(v.dtype), CompactFactors(z, k, g)


def decay_mask(g: Tensor) -> Tensor:
    """Gamma: `[W, HV]` cumulative log decay -> `[HV, W, W]`, `exp(g_i - g_j)` for j <= i and 0 above the diagonal."""
    difference = g.t()[:, :, None] - g.t()[:, None, :]
    # masked before exp: above the diagonal the difference is positive and overflows under strong decay
    causal = torch.ones_like(difference, dtype=torch.bool).tril()
    return difference.masked_fill(~causal, float("-inf")).exp()


@jit
def _gdn_verify_kernel(
    x, conv_weight, a, b, A_log, dt_bias, state, z, k, g, out,
    W: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TAPS: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One value head x BV value columns. Row r of a tile is a key (r < N), then a query if both fit into 16 rows."""
    i_v, i_hv = tl.program_id(0), tl.program_id(1)
    i_h = i_hv // (HV // H)
    C: tl.constexpr = 2 * H * K + HV * V
    ROWS: tl.constexpr = TAPS if TAPS > 0 else 1
    PACKED: tl.constexpr = W <= 8
    N: tl.constexpr = 8 if PACKED else 16
    o_r, o_k, o_v = tl.arange(0, 16), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    t_r, is_key = o_r % N, o_r < N
    m_r, m_k, m_v = t_r < W, o_k < K, within(o_v, V, BV)
    # [16, K] and [16, V], channels of the rows
    o_x = tl.where(is_key, H * K, 0)[:, None] + (i_h * K + o_k)[None, :]
    o_q = (0 * o_r)[:, None] + (i_h * K + o_k)[None, :]
    o_value = (0 * o_r)[:, None] + (2 * H * K + i_hv * V + o_v)[None, :]
    m_x = m_r[:, None] & m_k[None, :]
    m_value = (m_r & is_key)[:, None] & m_v[None, :]

    # nothing here was written by the kernel in front, which may still be running
    b_s = tl.load(state + (i_hv * V + o_v)[:, None] * K + o_k[None, :], mask=m_v[:, None] & m_k[None, :], other=0.0)
    rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
    b_dt = tl.load(dt_bias + i_hv).to(tl.float32)
    if TAPS > 0:
        # a tile of equal rows: a vector would reach the rows' layout through shared memory
        w_x = load_taps(conv_weight + o_x, m_k[None, :], C, TAPS)
        w_v = load_taps(conv_weight + o_value, m_v[None, :], C, TAPS)
        if not PACKED:
            w_q = load_taps(conv_weight + o_q, m_k[None, :], C, TAPS)
    s_high, s_low = widen(b_s, PRECISION)
    await_previous(USE_PDL)

    # all loads before the first use: they are one trip to memory then, not several in a row
    if not PACKED:
        r_q = load_taps(x + t_r[:, None] * C + o_q, m_x, C, ROWS)
    r_x = load_taps(x + t_r[:, None] * C + o_x, m_x, C, ROWS)
    r_v = load_taps(x + t_r[:, None] * C + o_value, m_value, C, ROWS)
    a_c = tl.load(a + o_r * HV + i_hv, mask=o_r < W, other=0.0)
    b_r = tl.load(b + t_r * HV + i_hv, mask=m_r & is_key, other=0.0)
    # after the loads: started earlier, kernels of several layers share a multiprocessor and its loads queue
    start_next(USE_PDL)
    b_x, b_v = r_x[0], r_v[0]
    if TAPS > 0:
        b_x, b_v = convolve(r_x, w_x, TAPS), convolve(r_v, w_v, TAPS)
    b_x, b_v = opaque(b_x), opaque(b_v)

    # inner products of the raw rows with the keys [16, 16] and with the state [16, BV]
    b_gram = input_dot(b_x, tl.trans(b_x), PRECISION)
    b_xs = wide_dot(b_x, tl.trans(s_high), tl.trans(s_low), PRECISION)
    if not PACKED:
        b_q = r_q[0]
        if TAPS > 0:
            b_q = convolve(r_q, w_q, TAPS)
        b_q = opaque(b_q)
        b_qk = input_dot(b_q, tl.trans(b_x), PRECISION)
        b_qs = wide_dot(b_q, tl.trans(s_high), tl.trans(s_low), PRECISION)
        q32 = b_q.to(tl.float32)
        l_q = tl.rsqrt(tl.sum(q32 * q32, 1) + 1e-6) * K**-0.5

    # cumulative log decays g_i (row) and g_j (column)
    la_c = tl.where(o_r < W, log_decay(a_c, rate, b_dt), 0.0)
    g_r = tl.sum(tl.where(o_r[None, :] <= t_r[:, None], la_c[None, :], 0.0), 1)
    # the same sums, not their like in another order: g_i - g_i must be 0 however large g is
    g_c = tl.sum(tl.where(o_r[:, None] == o_r[None, :], g_r[:, None], 0.0), 0)
    b_d = g_r[:, None] - g_c[None, :]
    if i_v == 0:
        tl.store(g + t_r * HV + i_hv, g_r, mask=m_r & is_key)
        if i_hv % (HV // H) == 0:
            tl.store(k + (t_r * H + i_h)[:, None] * K + o_k[None, :], b_x, mask=m_x & is_key[:, None])

    # 1 / length of every row, from the diagonal
    squares = tl.where(o_r[:, None] == o_r[None, :], b_gram, 0.0)
    l_r, l_c = tl.rsqrt(tl.sum(squares, 1) + 1e-6), tl.rsqrt(tl.sum(squares, 0) + 1e-6)

    # (I - X) U = R with X = I - H in the keys' rows (Eq. 3); a query's row of X U + R is its output (Eq. 10)
    beta = write_strength(b_r)
    scale = tl.where(is_key, -beta, K**-0.5) * l_r
    before = (o_r[None, :] < t_r[:, None]) | ((o_r[None, :] == t_r[:, None]) & (o_r >= N)[:, None])
    # masked before exp: above the diagonal the difference overflows
    gamma = tl.exp(tl.where(before & (o_r < W)[None, :], b_d, float("-inf")))
    b_X = b_gram * gamma * (scale[:, None] * l_c[None, :])
    rhs = tl.where(is_key, beta, 0.0)[:, None] * b_v.to(tl.float32) + (scale * tl.exp(g_r))[:, None] * b_xs
    b_u = solve_rows(b_X, rhs, W, PRECISION)
    if PACKED:
        b_o = split_dot(b_X, b_u, rhs, PRECISION)
        m_o = m_r & (o_r >= N)
    else:
        gamma = tl.exp(tl.where(o_r[None, :] <= o_r[:, None], b_d, float("-inf")))
        b_qk *= gamma * (l_q[:, None] * l_c[None, :])
        b_o = split_dot(b_qk, b_u, (l_q * tl.exp(g_r))[:, None] * b_qs, PRECISION)
        m_o = m_r
    o_o = (t_r * HV + i_hv)[:, None] * V + o_v[None, :]
    tl.store(z + o_o, b_u * l_r[:, None], mask=m_value)
    tl.store(out + o_o, b_o.to(out.dtype.element_ty), mask=m_o[:, None] & m_v[None, :])


@jit
def solve_rows(X, rhs, W: tl.constexpr, PRECISION: tl.constexpr):
    """`(I - X)^-1 rhs` for a strictly lower triangular X of W rows, exactly (finite series).

    In blocks of four: with the diagonal blocks D of X and T = D + D^2 + D^3, the system is (I - M) u = (I + T) rhs,
    M = (I + T)(X - D), whose block powers end at M^3. One series over all 16 rows would need X^8, whose entries reach
    thousands when keys repeat, and lose every digit.
    """
    u = rhs
    if W > 1 and W <= 4:
        u = split_dot(X, rhs, rhs, PRECISION)
        if W > 2:
            X2 = split_dot(X, X, tl.zeros_like(X), PRECISION)
            u = split_dot(X2, u, u, PRECISION)
    if W > 4:
        o_r = tl.arange(0, 16)
        same_block = (o_r // 4)[:, None] == (o_r // 4)[None, :]
        D = tl.where(same_block, X, 0.0)
        rest = tl.where(same_block, 0.0, X)
        T = split_dot(D, D, D, PRECISION)
        T = split_dot(T, D, D, PRECISION)
        M = split_dot(T, rest, rest, PRECISION)
        u = split_dot(T, rhs, rhs, PRECISION)
        u = split_dot(M, u, u, PRECISION)
        if W > 8:
            M2 = split_dot(M, M, tl.zeros_like(M), PRECISION)
            u = split_dot(M2, u, u, PRECISION)
    return u


@launcher
def gdn_verify(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    factors: CompactFactors,
    out: Tensor,
    *,
    conv_weight: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Verify w <= 16 tokens of one layer: outputs into `out`, compact factors into rows 0..w-1 of `factors`.

    Args:
        x: `[w, C]`, the convolved q | k | v of the tokens (C = 2*H*K + HV*V); with `conv_weight`, `[taps-1+w, C]`, the
            inputs of the convolution from `taps-1` tokens before the block on.
        a, b: `[w, HV]`, raw gate projections. A_log, dt_bias: `[HV]`.
        state: `[HV, V, K]`, fp32, S0; read only.
        factors: z `[>=w, HV, V]` fp32, k `[>=w, H, K]` x's dtype, g `[>=w, HV]` fp32; written.
        out: `[w, HV, V]`; written in its own dtype.
        conv_weight: `[taps, C]`; convolution and SiLU happen in the same launch.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on). That kernel must not
            write `state`, `A_log`, `dt_bias` or `conv_weight`.

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    w, (HV, V, K), H = len(out), state.shape, factors.k.shape[-2]
    taps = 0 if conv_weight is None else len(conv_weight)
    check_verify(x, a, b, A_log, dt_bias, state, factors, out, conv_weight)
    block_v, warps = tile_shape(w, taps, x.dtype)
    block_v = min(block_v, max(16, triton.next_power_of_2(V)))
    _gdn_verify_kernel[(triton.cdiv(V, block_v), HV)](
        x, x if conv_weight is None else conv_weight, a, b, A_log, dt_bias, state, *factors, out,
        W=w, H=H, HV=HV, K=K, V=V, TAPS=taps, BK=max(16, triton.next_power_of_2(K)), BV=block_v,
        PRECISION=dot_precision(x.dtype), num_warps=warps, **launch_options(x.device, overlap),
    )  # fmt: skip


def tile_shape(w: int, taps: int, dtype: torch.dtype) -> tuple[int, int]:
    """Value columns and warps of a program, as measured on an H200 with 32 heads of 128 x 128."""
    wide = w > 8 and not taps and dtype != torch.float32
    return (64, 4) if wide else (32, 4)


def check_verify(
    x: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, factors: CompactFactors,
    out: Tensor, conv_weight: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the verify kernel would read wrongly."""
    w, (HV, V, K), H = len(out), state.shape, factors.k.shape[-2]
    if not 1 <= w <= MAX_TOKENS:
        raise ValueError(f"gdn_verify takes 1 to {MAX_TOKENS} tokens, got {w}. Verify fewer, or use gdn_verify_ref.")
    check_input_dtype("x", x)
    if not H or HV % H:
        raise ValueError(
            f"gdn_verify needs value heads that key heads share evenly, got {HV} for {H}. Check factors.k."
        )
    C, taps = 2 * H * K + HV * V, 0 if conv_weight is None else len(conv_weight)
    check_tensor("x", x, (w + max(taps - 1, 0), C))
    check_tensor("a", a, (w, HV))
    check_tensor("b", b, (w, HV))
    check_tensor("A_log", A_log, (HV,))
    check_tensor("dt_bias", dt_bias, (HV,))
    check_tensor("state", state, (HV, V, K), torch.float32)
    check_tensor("factors.z", factors.z, (len(factors.z), HV, V), torch.float32)
    check_tensor("factors.k", factors.k, (len(factors.k), H, K), x.dtype)
    check_tensor("factors.g", factors.g, (len(factors.g), HV), torch.float32)
    check_tensor("out", out, (w, HV, V))
    if conv_weight is not None:
        check_tensor("conv_weight", conv_weight, (taps, C))
    if min(len(factor) for factor in factors) < w:
        raise ValueError(f"factors has {[len(f) for f in factors]} rows for {w} tokens. Pass buffers of at least {w}.")
