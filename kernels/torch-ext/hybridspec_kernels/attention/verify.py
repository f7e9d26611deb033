"""Joint q | k | v projection of a block -> its gated attention over a static cache and itself, in two launches."""

from functools import partial
from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_count, check_input_dtype, check_tensor
from ..tiles import dot_precision, input_dot, within
from ..triton_support import await_previous, jit, launch_options, launcher, loop_bound, start_next, tl, triton
from .heads import (
    check_tables,
    head_norm_ref,
    load_parts,
    load_weights,
    norm_and_turn,
    part_width,
    rotate_ref,
)
from .store import store_slots

# fewest slots of a split, and most splits: the combination holds a row of each
MIN_SLOTS, MAX_SPLITS = 32, 64
MAX_HEAD_DIM = 256
# channels per program of the combination
BLOCK_D = 64


class AttentionScratch(NamedTuple):
    """What the splits, those of the cache and the block as the last one, leave for their combination.

    Attributes:
        partial: `[splits, w_max, HQ, D]`, fp32, the output over the slots of a split alone.
        lse: `[splits, w_max, HQ]`, fp32, log2 of the sum of their exponentials; -inf where nothing was visible.
    """

    partial: Tensor
    lse: Tensor

    @classmethod
    def allocate(
        cls, w_max: int, query_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> "AttentionScratch":
        """Scratch for up to `w_max` tokens; `attention_splits` proposes the number of splits, 2 or more."""
        shape = (splits, w_max, query_heads)
        return cls(
            torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def attention_splits(capacity: int, kv_heads: int, device: torch.device) -> int:
    """Parts of a cache of `capacity` slots, and the block as one more, that keep the device busy: a power of two."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    most = min(processors // kv_heads, -(-capacity // MIN_SLOTS) + 1, MAX_SPLITS)
    return 1 << (max(most, 2).bit_length() - 1)


def attention_verify_ref(
    projected: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    gated: bool,
    zero_centered: bool,
    eps: float,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_from_block: bool = False,
) -> None:
    """Store the block's slots and attend over the visible ones; arguments as of `attention_verify`."""
    w, (HKV, capacity, D) = len(projected), keys.shape
    HQ, width = out.shape[1] // D, D * (2 if gated else 1)
    q, k, v = projected.split([HQ * width, HKV * D, HKV * D], dim=1)
    position = length.long() + torch.arange(w, device=length.device)
    # [w, 1, R]
    angles = cos.index_select(0, position)[:, None], sin.index_select(0, position)[:, None]
    query, gate = q.view(w, HQ, width).split([D, width - D], dim=-1)
    query = rotate_ref(head_norm_ref(query, q_norm, zero_centered, eps), *angles)
    k = rotate_ref(head_norm_ref(k.view(w, HKV, D), k_norm, zero_centered, eps), *angles)
    keys.index_copy_(1, position, k.transpose(0, 1).to(keys.dtype))
    values.index_copy_(1, position, v.view(w, HKV, D).transpose(0, 1).to(values.dtype))

    dtype = torch.promote_types(projected.dtype, torch.float32)
    slots = torch.arange(capacity, device=length.device)
    seen = visible_ref(position, slots, length, causal, window, window_from_block)
    # where, not a product: unused slots may hold anything
    used = seen.any(0)[:, None]
    keys, values = (torch.where(used, x, 0.0).to(dtype).repeat_interleave(HQ // HKV, 0) for x in (keys, values))
    scores = torch.einsum("whd,hsd->hws", query.to(dtype), keys) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    result = torch.einsum("hws,hsd->whd", weights, values).to(projected.dtype)
    if gated:
        result = result * torch.sigmoid(gate)
    out.copy_(result.flatten(1))


def visible_ref(
    position: Tensor, slots: Tensor, length: Tensor, causal: bool, window: int | None, window_from_block: bool
) -> Tensor:
    """`[w, slots]`, bool: which slots the queries at `position` `[w]`, the block's tokens, see."""
    lag = position[:, None] - slots
    seen = slots < length + len(position)
    if causal:
        seen = seen & (lag >= 0)
    if window is not None and window_from_block:
        seen = seen & (slots >= length - window)
    elif window is not None:
        seen = seen & (lag < window) & (-lag < window)
    return seen.expand_as(lag)


@partial(jit, do_not_specialize=["W"])
def _attention_partial_kernel(
    projected, q_norm, k_norm, cos, sin, length, keys, values, part, lse, scale, capacity, W,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, EPS: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, REACH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BM rows of a key head (row t * G + g is its query head g at token t) over consecutive slots, or over the block.

    `scale` contains log2(e). Slots before length - REACH are invisible (REACH < 0: none); WINDOW counts from the
    query (0: all). A split of the cache has at least SHARE times BN slots: with fewer, a program would write more than
    it reads. Only the block's programs write slots, from length on, and no program reads those.
    """
    i_s, i_kv, i_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = HQ // HKV
    WIDTH: tl.constexpr = 2 * D if GATED else D
    N: tl.constexpr = HQ * WIDTH + 2 * HKV * D
    PARTS: tl.constexpr = 2 + (D - R + BC - 1) // BC
    o_r, o_d = i_m * BM + tl.arange(0, BM), tl.arange(0, BD)
    o_t, m_r, m_d = o_r // G, o_r < W * G, within(o_d, D, BD)
    head = i_kv * G + o_r % G
    o_h = o_t * HQ + head
    p_k, p_v = keys + i_kv.to(tl.int64) * capacity * D, values + i_kv.to(tl.int64) * capacity * D
    weights = load_weights(q_norm, D, R, BC, ZERO_CENTERED)
    await_previous(USE_PDL)
    # not behind the length, which takes as long to arrive
    b_q = load_parts(projected + o_t * N + head * WIDTH, m_r, D, R, BC)
    a = tl.load(length).to(tl.int32)
    start_next(USE_PDL)

    first = 0
    if REACH >= 0:
        first = tl.maximum(a - REACH, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(a - first, BN), SPLITS - 1), SHARE) * BN
    begin = first + i_s * share
    end = tl.minimum(begin + share, a)
    if (i_s < SPLITS - 1) & (begin >= end):
        tl.store(lse + i_s * T * HQ + o_h, tl.full((BM,), float("-inf"), tl.float32), mask=m_r)
        return
    row = (a + o_t).to(tl.int64) * R
    b_q = norm_and_turn(b_q, weights, cos + row, sin + row, m_r, D, R, BC, ZERO_CENTERED, EPS)
    b_m, b_l = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    if i_s == SPLITS - 1:
        b_k, b_v = store_slots(
            projected + HQ * WIDTH + i_kv * D, load_weights(k_norm, D, R, BC, ZERO_CENTERED), cos, sin, a, p_k, p_v,
            W, tl.where(i_m == 0, W, 0), N, HKV * D, D, R, BC, BT, BD, ZERO_CENTERED, EPS,
        )  # fmt: skip
        o_n = tl.arange(0, BT)
        # rows behind the last token see as it does
        lag = tl.minimum(o_t, W - 1)[:, None] - o_n[None, :]
        seen = (o_n < W)[None, :]
        if CAUSAL:
            seen &= lag >= 0
        if WINDOW > 0:
            seen &= (lag < WINDOW) & (-lag < WINDOW)
        b_s = tl.where(seen, parts_dot(b_q, b_k, PARTS, PRECISION) * scale, float("-inf"))
        # finite: every token sees itself
        b_m = tl.max(b_s, 1)
        b_p = tl.exp2(b_s - b_m[:, None])
        b_l = tl.sum(b_p, 1)
        acc = input_dot(b_p.to(b_v.dtype), b_v, PRECISION)
    else:
        for i_n in range(0, loop_bound(end - begin), BN):
            o_s = begin + i_n + tl.arange(0, BN)
            m_s = o_s < end
            b_k = load_parts(p_k + o_s * D, m_s, D, R, BC)
            # not left to weights of zero: an unused slot may hold NaN
            b_v = tl.load(p_v + o_s[:, None] * D + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0)
            seen = m_s[None, :]
            if WINDOW > 0:
                seen &= (a + o_t)[:, None] - o_s[None, :] < WINDOW
            b_s = tl.where(seen, parts_dot(b_q, b_k, PARTS, PRECISION) * scale, float("-inf"))
            m_new = tl.maximum(b_m, tl.max(b_s, 1))
            # a row that has seen nothing yet: -inf - -inf is NaN
            m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
            b_p = tl.exp2(b_s - m_finite[:, None])
            decay = tl.exp2(b_m - m_finite)
            b_l = b_l * decay + tl.sum(b_p, 1)
            acc *= decay[:, None]
            acc += input_dot(b_p.to(b_v.dtype), b_v, PRECISION)
            b_m = m_new
    seen_any = b_l > 0
    b_l = tl.where(seen_any, b_l, 1.0)
    tl.store(lse + i_s * T * HQ + o_h, tl.where(seen_any, b_m + tl.log2(b_l), float("-inf")), mask=m_r)
    p_o = part + i_s * T * HQ * D + o_h[:, None] * D + o_d[None, :]
    tl.store(p_o, acc * (1.0 / b_l)[:, None], mask=(m_r & seen_any)[:, None] & m_d[None, :])


@jit
def parts_dot(q, k, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """`q @ k.T` for tiles whose channels come in parts."""
    acc = input_dot(q[0], tl.trans(k[0]), PRECISION)
    for i in tl.static_range(1, PARTS):
        acc += input_dot(q[i], tl.trans(k[i]), PRECISION)
    return acc


@jit
def _attention_combine_kernel(
    part, lse, projected, out,
    HQ: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BD channels of one head at one token: the splits' mean, weighted by their sums of exponentials."""
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    o_s, o_d = tl.arange(0, BS), tl.program_id(2) * BD + tl.arange(0, BD)
    m_d, o_h = within(o_d, D, BD), i_t * HQ + i_h
    await_previous(USE_PDL)
    b_lse = tl.load(lse + o_s * T * HQ + o_h, mask=o_s < SPLITS, other=float("-inf"))
    if GATED:
        b_g = tl.load(projected + i_t * N + (2 * i_h + 1) * D + o_d, mask=m_d, other=0.0)
    # what no split wrote is not read
    m_o = (b_lse > float("-inf"))[:, None] & m_d[None, :]
    b_o = tl.load(part + (o_s * T * HQ + o_h)[:, None] * D + o_d[None, :], mask=m_o, other=0.0)
    start_next(USE_PDL)
    weight = tl.exp2(b_lse - tl.max(b_lse, 0))
    b_y = (tl.sum(b_o * weight[:, None], 0) / tl.sum(weight, 0)).to(out.dtype.element_ty)
    if GATED:
        sigmoid = tl.sigmoid(b_g.to(tl.float32)).to(b_g.dtype)
        b_y = (b_y.to(tl.float32) * sigmoid.to(tl.float32)).to(b_y.dtype)
    tl.store(out + o_h * D + o_d, b_y, mask=m_d)


@launcher
def attention_verify(
    projected: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    length: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    *,
    gated: bool,
    zero_centered: bool,
    eps: float,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_from_block: bool = False,
    overlap: bool = False,
) -> None:
    """Attention of a block's w <= 16 tokens over the cache and each other, visible slots only.

    Query t stands at position length + t, which is also the slot of its key and value. It sees the slots of the block
    and before it: only those up to its own if `causal`, and with a window only those less than `window` positions away
    (in both directions), or with `window_from_block` the block's and the `window` slots before the block.

    Args:
        projected: `[w, N]`, columns q | k | v: q is `[HQ, D]`, or `[HQ, 2*D]` with a head's gate behind its query if
            `gated`; k and v are `[HKV, D]`.
        q_norm, k_norm: `[D]`, projected's dtype, weights of the heads' RMSNorms.
        cos, sin: `[>=capacity, R]`, a row per position, R <= D even: the pairs (i, i + R/2) of the first R channels
            turn, the rest passes. In projected's dtype (products and sum are rounded to it, as transformers rounds
            them) or fp32 (the result is rounded once).
        length: `[1]`, int32 or int64: tokens in front of the block; length + w <= capacity.
        keys, values: `[HKV, capacity, D]`, projected's dtype; written at the block's slots, length to length+w-1.
            Slots behind them, and invisible ones before, may hold anything.
        out: `[w, HQ*D]`, projected's dtype, written.
        scratch: for w tokens or more; overwritten. The number of its splits decides how many programs share a head.
        gated: multiply the output by the sigmoid of the gates.
        zero_centered: the norms' weights are 1 + q_norm and 1 + k_norm, and they round after them (Qwen3.5) instead of
            before (Qwen3).
        eps: of the norms.
        scale: of the scores.
        causal, window, window_from_block: what a query sees, see above.
        overlap: let the launches overlap with the kernels in front of them in the stream (SM90 on), the nearest of
            which must not be one that writes `q_norm`.

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_verify(projected, q_norm, k_norm, cos, sin, length, keys, values, out, scratch, gated, window)
    w, (HKV, capacity, D), (splits, rows, HQ), R = len(projected), keys.shape, scratch.lse.shape, cos.shape[1]
    block_m, block_n, warps, stages = tile_shape(w * HQ // HKV, D, projected.dtype)
    options = launch_options(projected.device, overlap)
    _attention_partial_kernel[(splits, HKV, triton.cdiv(w * HQ // HKV, block_m))](
        projected, q_norm, k_norm, cos, sin, length, keys, values, *scratch, scale * log2(e), capacity, w,
        HQ=HQ, HKV=HKV, D=D, R=R, GATED=gated, ZERO_CENTERED=zero_centered, EPS=eps, T=rows, SPLITS=splits,
        SHARE=triton.cdiv(block_m, block_n), CAUSAL=causal,
        WINDOW=0 if window is None or window_from_block else window,
        REACH=-1 if window is None else window if window_from_block else window - 1,
        BM=block_m, BN=block_n, BT=MAX_TOKENS, BD=max(16, triton.next_power_of_2(D)), BC=part_width(R),
        PRECISION=dot_precision(projected.dtype), num_warps=warps, num_stages=stages,
        # a product and a sum that are each rounded must not become one operation
        enable_fp_fusion=False, **options,
    )  # fmt: skip
    block_d = min(BLOCK_D, triton.next_power_of_2(D))
    _attention_combine_kernel[(w, HQ, triton.cdiv(D, block_d))](
        *scratch, projected, out,
        HQ=HQ, D=D, T=rows, SPLITS=splits, N=projected.shape[1], GATED=gated,
        BS=triton.next_power_of_2(splits), BD=block_d, num_warps=4, **options,
    )  # fmt: skip


def tile_shape(rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows, slots, warps and stages of a program: no spills, and at most the 99 KB of shared memory of SM86."""
    wide = head_dim > 128
    if dtype == torch.float32:
        return (16, 16, 8, 2) if wide else (16, 32, 4, 2)
    slots = 32 if wide else 64
    return (64, slots, 8, 2) if rows > 32 else (32 if rows > 16 else 16, slots, 4, 3)


def check_verify(
    projected: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, length: Tensor, keys: Tensor,
    values: Tensor, out: Tensor, scratch: AttentionScratch, gated: bool, window: int | None,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the kernels would read wrongly."""
    check_input_dtype("projected", projected)
    w, dtype, (HKV, capacity, D), (splits, rows, HQ) = len(projected), projected.dtype, keys.shape, scratch.lse.shape
    if not 1 <= w <= MAX_TOKENS:
        raise ValueError(
            f"attention_verify takes 1 to {MAX_TOKENS} tokens, got {w}. Verify fewer, or use attention_verify_ref."
        )
    if not HKV or HQ % HKV:
        raise ValueError(
            f"attention_verify needs query heads that key heads share evenly, got {HQ} for {HKV}. Check keys."
        )
    if D > MAX_HEAD_DIM:
        raise ValueError(f"attention_verify takes heads of up to {MAX_HEAD_DIM}, got {D}. Use attention_verify_ref.")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees itself, so it must be at least 1, or None for all.")
    check_tensor("projected", projected, (w, HQ * D * (2 if gated else 1) + 2 * HKV * D))
    check_tensor("q_norm", q_norm, (D,), dtype)
    check_tensor("k_norm", k_norm, (D,), dtype)
    check_tables(cos, sin, capacity, D, dtype)
    check_count("length", length)
    check_tensor("keys", keys, (HKV, capacity, D), dtype)
    check_tensor("values", values, (HKV, capacity, D), dtype)
    check_tensor("out", out, (w, HQ * D), dtype)
    if rows < w or splits < 2:
        raise ValueError(
            f"scratch has room for {rows} tokens and {splits} splits, got {w} tokens. Allocate it for the longest "
            "block, with 2 splits or more: the block is one of them."
        )
    check_tensor("scratch.lse", scratch.lse, (splits, rows, HQ), torch.float32)
    check_tensor("scratch.partial", scratch.partial, (splits, rows, HQ, D), torch.float32)
