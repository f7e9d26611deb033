"""Joint k | v projection of w tokens, of L layers -> their keys, normalised and rotated, and values in the caches."""

from functools import partial

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_count, check_input_dtype, check_tensor
from ..tiles import within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .heads import (
    channels,
    check_tables,
    head_norm_ref,
    load_parts,
    load_weights,
    norm_and_turn,
    part_width,
    rotate_ref,
)


def attention_store_ref(
    projected: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    eps: float,
) -> None:
    """Fill the slots from `start` on; arguments as of `attention_store`, which describes them."""
    w, (L, HKV, _, D) = len(projected), keys.shape
    slots = start.long() + torch.arange(w, device=start.device)
    # [L, HKV, w, D] each
    k, v = projected.view(w, L, 2, HKV, D).permute(2, 1, 3, 0, 4)
    k = head_norm_ref(k, k_norm[:, None, None], False, eps)
    k = rotate_ref(k, cos.index_select(0, slots), sin.index_select(0, slots))
    keys.index_copy_(2, slots, k.to(keys.dtype))
    values.index_copy_(2, slots, v.to(values.dtype))


@partial(jit, do_not_specialize=["W"])
def _attention_store_kernel(
    projected, k_norm, cos, sin, start, keys, values, capacity, W,
    HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One key head of one layer."""
    i_h, i_l = tl.program_id(0), tl.program_id(1)
    slots = (i_l * HKV + i_h).to(tl.int64) * capacity * D
    weights = load_weights(k_norm + i_l * D, D, R, BC, False)
    await_previous(USE_PDL)
    store_slots(
        projected + (2 * i_l * HKV + i_h) * D, weights, cos, sin, tl.load(start).to(tl.int32), keys + slots,
        values + slots, W, W, tl.num_programs(1) * 2 * HKV * D, HKV * D, D, R, BC, BT, BD, False, EPS,
    )  # fmt: skip
    start_next(USE_PDL)


@jit
def store_slots(
    key, weights, cos, sin, start, keys, values, W, stored, N,
    V: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A head's keys, in parts, and values `[BT, BD]` of a block's W tokens; the first `stored` also go to the cache.

    `key` points to the head's first key, the next token's is N elements behind it, and a key's value V behind the key;
    `keys` and `values` point to the head's slot 0.
    """
    PARTS: tl.constexpr = 2 + (D - R + BC - 1) // BC
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    m_t, m_s, m_d = o_t < W, o_t < stored, within(o_d, D, BD)
    parts = load_parts(key + o_t * N, m_t, D, R, BC)
    b_v = tl.load((key + V + o_t * N)[:, None] + o_d[None, :], mask=m_t[:, None] & m_d[None, :], other=0.0)
    row = (start + o_t).to(tl.int64) * R
    b_k = norm_and_turn(parts, weights, cos + row, sin + row, m_t, D, R, BC, ZERO_CENTERED, EPS)
    slot = (start + o_t)[:, None] * D
    for i in tl.static_range(PARTS):
        o_c, m_c = channels(i, D, R, BC)
        tl.store(keys + slot + o_c[None, :], b_k[i], mask=m_s[:, None] & m_c[None, :])
    tl.store(values + slot + o_d[None, :], b_v, mask=m_s[:, None] & m_d[None, :])
    return b_k, b_v


@launcher
def attention_store(
    projected: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    eps: float,
    overlap: bool = False,
) -> None:
    """Keys and values of w <= 16 tokens that nothing attends from yet, of L layers in one launch.

    Args:
        projected: `[w, L*2*HKV*D]`, columns k | v of every layer, each `[HKV, D]`.
        k_norm: `[L, D]`, projected's dtype, weights of the keys' RMSNorm, which rounds before them (Qwen3).
        cos, sin: `[>=capacity, R]`, a row per position, see `attention_verify`.
        start: `[1]`, int32 or int64: the slot, and the position, of the first token; start + w <= capacity.
        keys, values: `[L, HKV, capacity, D]`, projected's dtype; written at slots start to start+w-1.
        eps: of the norm.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not be one
            that writes `k_norm`.

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_store(projected, k_norm, cos, sin, start, keys, values)
    (L, HKV, capacity, D), R = keys.shape, cos.shape[1]
    _attention_store_kernel[(HKV, L)](
        projected, k_norm, cos, sin, start, keys, values, capacity, len(projected),
        HKV=HKV, D=D, R=R, EPS=eps, BT=MAX_TOKENS, BD=triton.next_power_of_2(D), BC=part_width(R), num_warps=4,
        # a product and a sum that are each rounded must not become one operation
        enable_fp_fusion=False, **launch_options(projected.device, overlap),
    )  # fmt: skip


def check_store(
    projected: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, start: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("projected", projected)
    w, dtype, (L, HKV, capacity, D) = len(projected), projected.dtype, keys.shape
    if not 1 <= w <= MAX_TOKENS:
        raise ValueError(
            f"attention_store takes 1 to {MAX_TOKENS} tokens, got {w}. Store fewer, or use attention_store_ref."
        )
    check_tensor("projected", projected, (w, L * 2 * HKV * D))
    check_tensor("k_norm", k_norm, (L, D), dtype)
    check_tensor("keys", keys, (L, HKV, capacity, D), dtype)
    check_tensor("values", values, (L, HKV, capacity, D), dtype)
    check_tables(cos, sin, capacity, D, dtype)
    check_count("start", start)
