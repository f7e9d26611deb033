"""Compact factors + S0 -> the state after m committed tokens, all GDN layers at once, in place (Eq. 7)."""

import torch
from torch import Tensor

from ..checks import check_count, check_tensor
from ..conv.commit import check_window, conv_commit_ref, move_window
from ..tiles import dot_precision, split_bf16, split_dot, within
from ..triton_support import await_previous, jit, launch_options, launcher, tl, triton
from .gates import to_value_heads
from .verify import CompactFactors

BLOCK_V, BLOCK_C = 32, 1024


def gdn_commit_ref(
    state: Tensor, factors: CompactFactors, num_committed: Tensor, *, conv_rows: Tensor | None = None, taps: int = 0
) -> None:
    """Advance every GDN layer's state, and its convolution window, through the committed tokens, in place (Eq. 7).

    Args:
        state: `[L, HV, V, K]`, fp32 (or fp64), the states at the start of the round.
        factors: z `[L, W, HV, V]`, k `[L, W, H, K]`, g `[L, W, HV]`; rows from `num_committed` on are ignored,
            whatever they hold.
        num_committed: `[1]`, integer, on the state's device, 0..W. Never read by the host.
        conv_rows: `[L, taps-1+W, C]` or None, the windows and the convolution inputs of the round's tokens; see
            `conv_commit_ref`. taps: width of the convolution.
    """
    z, k, g = factors
    kept = torch.arange(z.shape[1], device=z.device) < num_committed
    g_m = torch.where(num_committed > 0, g.index_select(1, (num_committed.long() - 1).clamp_min(0)), 0.0)
    # where, not a product: ignored rows may hold NaN
    weight = torch.where(kept[None, :, None], g_m - g, float("-inf")).exp()
    z = torch.where(kept[None, :, None, None], z, 0.0) * weight[..., None]
    k = to_value_heads(torch.where(kept[None, :, None, None], k, 0.0), z.shape[2]).to(z.dtype)
    state.mul_(g_m[:, 0].exp()[..., None, None]).add_(torch.einsum("lwhv,lwhk->lhvk", z, k))
    if conv_rows is not None:
        conv_commit_ref(conv_rows, taps, num_committed)


@jit
def _gdn_commit_kernel(
    state, z, k, g, conv_rows, num_committed,
    W: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    TAPS: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Programs of a layer: [BV, K] tiles of its HV states, then BC channels each of its convolution window."""
    i_v, i_hv, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if i_hv < HV:
        i_h = i_hv // (HV // H)
        o_t, o_k, o_v = tl.arange(0, BW), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
        m_k, m_v = o_k < K, within(o_v, V, BV)
        p_s = state + (i_l * HV + i_hv) * (V * K) + (o_v[:, None] * K + o_k[None, :])
        b_s = tl.load(p_s, mask=m_v[:, None] & m_k[None, :], other=0.0)
        await_previous(USE_PDL)
        m = tl.load(num_committed).to(tl.int32)
        # masked loads: rejected rows may hold anything
        m_t = o_t < m
        p_g = g + i_l * (W * HV) + i_hv
        g_m = tl.load(p_g + (m - 1) * HV, mask=m > 0, other=0.0)
        g_t = tl.load(p_g + o_t * HV, mask=m_t, other=0.0)
        p_k = k + i_l * (W * H * K) + i_h * K
        b_k = tl.load(p_k + o_t[:, None] * (H * K) + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        p_z = z + i_l * (W * HV * V) + i_hv * V
        b_z = tl.load(p_z + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_z = tl.trans(b_z * tl.exp(tl.where(m_t, g_m - g_t, float("-inf")))[:, None])
        b_s = b_s * tl.exp(g_m)
        if PRECISION == "bf16":
            z_high, z_low = split_bf16(b_z)
            update = tl.dot(z_low, b_k, acc=tl.dot(z_high, b_k))
        else:
            update = split_dot(b_z, b_k.to(tl.float32), tl.zeros_like(b_s), PRECISION)
        tl.store(p_s, b_s + update, mask=m_v[:, None] & m_k[None, :])
    else:
        await_previous(USE_PDL)
        o_c = ((i_hv - HV) * tl.num_programs(0) + i_v) * BC + tl.arange(0, BC)
        rows = conv_rows + i_l * ((TAPS - 1 + W) * C)
        move_window(rows, o_c, tl.load(num_committed).to(tl.int32), C, TAPS)


@launcher
def gdn_commit(
    state: Tensor,
    factors: CompactFactors,
    num_committed: Tensor,
    *,
    conv_rows: Tensor | None = None,
    taps: int = 0,
    overlap: bool = False,
) -> None:
    """`gdn_commit_ref` in one launch: the states of all layers and, with `conv_rows`, their convolution windows.

    Args:
        state: `[L, HV, V, K]`, fp32. factors, num_committed, conv_rows, taps: see `gdn_commit_ref`.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on). That kernel must not
            write `state`, and the kernel behind this one must not read it before it waits.

    Raises:
        ValueError: for a layout or dtype that the kernel does not read, or a device without it.
    """
    (L, HV, V, K), (W, H) = state.shape, factors.k.shape[1:3]
    check_tensor("state", state, (L, HV, V, K), torch.float32)
    check_tensor("factors.z", factors.z, (L, W, HV, V), torch.float32)
    check_tensor("factors.k", factors.k, (L, W, H, K))
    check_tensor("factors.g", factors.g, (L, W, HV), torch.float32)
    check_count("num_committed", num_committed)
    if not H or HV % H:
        raise ValueError(f"factors.k has {H} key heads for {HV} value heads, which they must share evenly.")
    if conv_rows is not None:
        check_window(conv_rows.shape[1], taps)
        check_tensor("conv_rows", conv_rows, (L, taps - 1 + W, conv_rows.shape[-1]))
    channels = 0 if conv_rows is None else conv_rows.shape[-1]
    tiles = triton.cdiv(V, BLOCK_V)
    _gdn_commit_kernel[(tiles, HV + triton.cdiv(triton.cdiv(channels, BLOCK_C), tiles), L)](
        state, *factors, state if conv_rows is None else conv_rows, num_committed,
        W=W, H=H, HV=HV, K=K, V=V, C=channels, TAPS=taps, BW=max(16, triton.next_power_of_2(W)),
        BK=max(16, triton.next_power_of_2(K)), BV=BLOCK_V, BC=BLOCK_C,
        PRECISION=dot_precision(factors.k.dtype), num_warps=4, **launch_options(state.device, overlap),
    )  # fmt: skip
