"""Queries of w tokens over a static key/value cache -> attention outputs, gated: flash-decoding in two launches."""

from functools import partial
from math import e, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_count, check_input_dtype, check_tensor
from ..tiles import dot_precision, input_dot, within
from ..triton_support import await_previous, jit, launch_options, launcher, loop_bound, start_next, tl, triton

# fewest slots of a split, and most splits: the combination holds a row of each
MIN_SLOTS, MAX_SPLITS = 32, 64
MAX_HEAD_DIM = 256
# channels per program of the combination
BLOCK_D = 64


class AttentionScratch(NamedTuple):
    """What the parts of a split cache leave for their combination.

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
        """Scratch for up to `w_max` tokens; `attention_splits` proposes the splits."""
        shape = (splits, w_max, query_heads)
        return cls(
            torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def attention_splits(capacity: int, kv_heads: int, device: torch.device) -> int:
    """Parts of a cache of `capacity` slots that keep the device busy: a power of two, known without the length."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
    most = min(processors // kv_heads, -(-capacity // MIN_SLOTS), MAX_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


def attention_verify_ref(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    out: Tensor,
    *,
    scale: float,
    gate: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    window_from_block: bool = False,
) -> None:
    """Attend over the visible slots; arguments as of `attention_verify`, which describes them."""
    (w, HQ, D), (HKV, capacity, _) = q.shape, keys.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    slots = torch.arange(capacity, device=q.device)
    position = length.long() + torch.arange(w, device=q.device)
    seen = visible_ref(position, slots, length, causal, window, window_from_block)
    # where, not a product: unused slots may hold anything
    used = seen.any(0)[:, None]
    keys, values = (torch.where(used, x, 0.0).to(dtype).repeat_interleave(HQ // HKV, 0) for x in (keys, values))
    scores = torch.einsum("whd,hsd->hws", q.to(dtype), keys) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    result = torch.einsum("hws,hsd->whd", weights, values).to(q.dtype)
    if gate is not None:
        result = result * torch.sigmoid(gate[:, : 2 * HQ * D].view(w, HQ, 2 * D)[..., D:])
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
    q, keys, values, length, part, lse, scale, capacity, W,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, REACH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BM rows of a key head (row t * G + g is its query head g at token t) over a split's consecutive slots.

    `scale` contains log2(e). Slots before length - REACH are invisible (REACH < 0: none); WINDOW counts from the
    query (0: all). A split has at least SHARE blocks: with fewer, a program would write more than it reads.
    """
    i_s, i_kv = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = HQ // HKV
    o_r, o_n, o_d = tl.program_id(2) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    o_t, m_r, m_d = o_r // G, o_r < W * G, within(o_d, D, BD)
    o_h = o_t * HQ + i_kv * G + o_r % G
    p_k, p_v = keys + i_kv.to(tl.int64) * capacity * D, values + i_kv.to(tl.int64) * capacity * D
    await_previous(USE_PDL)
    a = tl.load(length).to(tl.int32)
    b_q = tl.load(q + o_h[:, None] * D + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
    start_next(USE_PDL)

    first = 0
    if REACH >= 0:
        first = tl.maximum(a - REACH, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(a + W - first, BN), SPLITS), SHARE) * BN
    begin = first + i_s * share
    end = tl.minimum(begin + share, a + W)
    b_m, b_l = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    for i_n in range(0, loop_bound(end - begin), BN):
        o_s = begin + i_n + o_n
        m_s = o_s < end
        o_x, m_x = o_s[:, None] * D + o_d[None, :], m_s[:, None] & m_d[None, :]
        b_k = tl.load(p_k + o_x, mask=m_x, other=0.0)
        # not left to weights of zero: an unused slot may hold NaN
        b_v = tl.load(p_v + o_x, mask=m_x, other=0.0)
        lag = (a + o_t)[:, None] - o_s[None, :]
        seen = m_s[None, :]
        if CAUSAL:
            seen &= lag >= 0
        if WINDOW > 0:
            seen &= lag < WINDOW
            if not CAUSAL:
                seen &= -lag < WINDOW
        b_s = tl.where(seen, input_dot(b_q, tl.trans(b_k), PRECISION) * scale, float("-inf"))
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
def _attention_combine_kernel(
    part, lse, gate, out,
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
        b_g = tl.load(gate + i_t * N + (2 * i_h + 1) * D + o_d, mask=m_d, other=0.0)
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
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    *,
    scale: float,
    gate: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    window_from_block: bool = False,
    overlap: bool = False,
) -> None:
    """Attention of a block's w <= 16 tokens over the cache that holds their keys and values, visible slots only.

    Query t stands at position length + t, which is also its key's slot. It sees the slots of the block and before it:
    only those up to its own if `causal`, and with a window only those less than `window` positions away (in both
    directions), or with `window_from_block` the block's and the `window` slots before the block.

    Args:
        q: `[w, HQ, D]`, normalised and rotated.
        keys, values: `[HKV, capacity, D]`, q's dtype; other slots may hold anything.
        length: `[1]`, int32 or int64: tokens in front of the block; length + w <= capacity.
        out: `[w, HQ*D]`, q's dtype, written.
        scratch: for w tokens or more; overwritten. The number of its splits decides how many programs share a head.
        scale: of the scores.
        gate: `[w, N]`, q's dtype, the projection whose first columns are `[HQ, 2*D]`, query and gate of every head;
            the output is multiplied by the sigmoid of the gate.
        causal, window, window_from_block: what a query sees, see above.
        overlap: let the launches overlap with the kernels in front of them in the stream (SM90 on).

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_verify(q, keys, values, length, out, scratch, gate, window)
    (w, HQ, D), (HKV, capacity, _), (splits, rows, _) = q.shape, keys.shape, scratch.lse.shape
    block_m, block_n, warps, stages = tile_shape(w * HQ // HKV, D, q.dtype)
    options = launch_options(q.device, overlap)
    _attention_partial_kernel[(splits, HKV, triton.cdiv(w * HQ // HKV, block_m))](
        q, keys, values, length, *scratch, scale * log2(e), capacity, w,
        HQ=HQ, HKV=HKV, D=D, T=rows, SPLITS=splits, SHARE=triton.cdiv(block_m, block_n), CAUSAL=causal,
        WINDOW=0 if window is None or window_from_block else window,
        REACH=-1 if window is None else window if window_from_block else window - 1,
        BM=block_m, BN=block_n, BD=max(16, triton.next_power_of_2(D)), PRECISION=dot_precision(q.dtype),
        num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    block_d = min(BLOCK_D, triton.next_power_of_2(D))
    _attention_combine_kernel[(w, HQ, triton.cdiv(D, block_d))](
        *scratch, out if gate is None else gate, out,
        HQ=HQ, D=D, T=rows, SPLITS=splits, N=0 if gate is None else gate.shape[1], GATED=gate is not None,
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
    q: Tensor, keys: Tensor, values: Tensor, length: Tensor, out: Tensor, scratch: AttentionScratch,
    gate: Tensor | None, window: int | None,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the kernels would read wrongly."""
    check_input_dtype("q", q)
    (w, HQ, D), (HKV, capacity, _) = q.shape, keys.shape
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
    check_tensor("q", q, (w, HQ, D))
    check_tensor("keys", keys, (HKV, capacity, D), q.dtype)
    check_tensor("values", values, (HKV, capacity, D), q.dtype)
    check_count("length", length)
    check_tensor("out", out, (w, HQ * D), q.dtype)
    splits, rows = scratch.lse.shape[:2]
    if rows < w:
        raise ValueError(f"scratch has room for {rows} tokens, got {w}. Allocate it for the longest block.")
    check_tensor("scratch.lse", scratch.lse, (splits, rows, HQ), torch.float32)
    check_tensor("scratch.partial", scratch.partial, (splits, rows, HQ, D), torch.float32)
    if gate is not None:
        check_tensor("gate", gate, (w, max(gate.shape[-1], 2 * HQ * D)), q.dtype)
