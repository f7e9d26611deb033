"""Joint q | k | v projection of w tokens -> normalised, rotated queries, and keys and values in their cache slots."""

import math

import torch
from torch import Tensor

from ..checks import check_count, check_input_dtype, check_tensor
from ..tiles import within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton


def attention_prepare_ref(
    projected: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    q: Tensor | None,
    keys: Tensor,
    values: Tensor,
    *,
    query_heads: int,
    gated: bool,
    zero_centered: bool,
    eps: float,
) -> None:
    """Normalise and rotate the heads' queries and keys; arguments as of `attention_prepare`, which describes them."""
    if keys.ndim == 4:
        options = {"query_heads": 0, "gated": gated, "zero_centered": zero_centered, "eps": eps}
        for part, norm, k, v in zip(projected.chunk(len(keys), dim=1), k_norm, keys, values, strict=True):
            attention_prepare_ref(part, None, norm, cos, sin, start, None, k, v, **options)  # type: ignore[arg-type]
        return
    w, (HKV, _, D) = len(projected), keys.shape
    width = D * (2 if gated else 1)
    q_part, k, v = projected.split([query_heads * width, HKV * D, HKV * D], dim=1)
    slots = start.long() + torch.arange(w, device=start.device)
    # [w, 1, R]
    angles = cos.index_select(0, slots)[:, None], sin.index_select(0, slots)[:, None]
    if q is not None and q_norm is not None:
        query = q_part.view(w, query_heads, width)[..., :D]
        q.copy_(rotate_ref(head_norm_ref(query, q_norm, zero_centered, eps), *angles))
    k = rotate_ref(head_norm_ref(k.view(w, HKV, D), k_norm, zero_centered, eps), *angles)
    keys.index_copy_(1, slots, k.transpose(0, 1).to(keys.dtype))
    values.index_copy_(1, slots, v.view(w, HKV, D).transpose(0, 1).to(values.dtype))


def head_norm_ref(x: Tensor, weight: Tensor, zero_centered: bool, eps: float) -> Tensor:
    """RMSNorm over the last dimension of `[..., D]`: Qwen3.5's if `zero_centered`, else Qwen3's. In x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1 + weight.to(wide.dtype))).to(x.dtype) if zero_centered else weight * wide.to(x.dtype)


def rotate_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R/2) of the first R channels of `[..., D]`, in the dtype of x times a table."""
    R = cos.shape[-1]
    first, second = x[..., :R].chunk(2, dim=-1)
    turned = x[..., :R] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), x[..., R:]), dim=-1)


@jit
def _attention_prepare_kernel(
    projected, q_norm, k_norm, cos, sin, start, q, keys, values, capacity,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, EPS: tl.constexpr, BD: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token of one layer: query heads first, then key heads, whose programs copy the values too."""
    i_t, i_h, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    WIDTH: tl.constexpr = 2 * D if GATED else D
    N: tl.constexpr = HQ * WIDTH + 2 * HKV * D
    is_query = i_h < HQ
    i_kv = i_h - HQ
    o_d = tl.arange(0, BD)
    m_d, rotates = within(o_d, D, BD), o_d < R
    # the other channel of the pair
    o_p = tl.where(o_d < R // 2, o_d + R // 2, o_d - R // 2)
    norm = k_norm + i_l * D
    row = projected + (i_t * tl.num_programs(2) + i_l) * N
    x = row + HQ * WIDTH + i_kv * D
    if is_query:
        norm = q_norm
        x = row + i_h * WIDTH
    b_w, w_pair = tl.load(norm + o_d, mask=m_d, other=0.0), tl.load(norm + o_p, mask=rotates, other=0.0)
    await_previous(USE_PDL)

    slot = tl.load(start).to(tl.int64) + i_t
    b_x, x_pair = tl.load(x + o_d, mask=m_d, other=0.0), tl.load(x + o_p, mask=rotates, other=0.0)
    # of a vector: Triton's interpreters differ in how a number joins a mask
    b_v = tl.load(x + HKV * D + o_d, mask=m_d & (i_h + 0 * o_d >= HQ))
    b_cos = tl.load(cos + slot * R + o_d, mask=rotates, other=0.0)
    b_sin = tl.load(sin + slot * R + o_d, mask=rotates, other=0.0)
    start_next(USE_PDL)

    x32 = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, 0) / D + EPS)
    b_y = weigh(x32 * scale, b_w, b_x.dtype, ZERO_CENTERED)
    pair = weigh(x_pair.to(tl.float32) * scale, w_pair, b_x.dtype, ZERO_CENTERED).to(tl.float32)
    # each product and the sum rounded to the tables' dtype
    pair = tl.where(o_d < R // 2, -pair, pair)
    direct = (b_y.to(tl.float32) * b_cos.to(tl.float32)).to(b_cos.dtype).to(tl.float32)
    crossed = (pair * b_sin.to(tl.float32)).to(b_cos.dtype).to(tl.float32)
    b_y = tl.where(rotates, (direct + crossed).to(b_cos.dtype).to(b_x.dtype), b_y)
    if is_query:
        tl.store(q + (i_t * HQ + i_h) * D + o_d, b_y, mask=m_d)
    else:
        o_kv = ((i_l * HKV + i_kv).to(tl.int64) * capacity + slot) * D + o_d
        tl.store(keys + o_kv, b_y, mask=m_d)
        tl.store(values + o_kv, b_v, mask=m_d)


@jit
def weigh(unit, weight, dtype: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """RMSNorm's weight on an fp32 vector of unit mean square, rounded to dtype where each family rounds."""
    if ZERO_CENTERED:
        return (unit * (1.0 + weight.to(tl.float32))).to(dtype)
    else:
        return (unit.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@launcher
def attention_prepare(
    projected: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    q: Tensor | None,
    keys: Tensor,
    values: Tensor,
    *,
    query_heads: int,
    gated: bool,
    zero_centered: bool,
    eps: float,
    overlap: bool = False,
) -> None:
    """RMSNorm and rotation of the heads' queries and keys, and the cache's new slots, in one launch.

    Args:
        projected: `[w, N]`, columns q | k | v: q is `[HQ, D]`, or `[HQ, 2*D]` with a head's gate behind its query if
            `gated`; k and v are `[HKV, D]`. Without query heads also `[w, L*N]`: k | v of L layers.
        q_norm, k_norm: `[D]` (k_norm of L layers: `[L, D]`), projected's dtype. q_norm and q are None
            without query heads.
        cos, sin: `[>=capacity, R]`, a row per position, R <= D even: the pairs (i, i + R/2) of the first R channels
            turn, the rest passes. In projected's dtype (products and sum are rounded to it, as transformers rounds
            them) or fp32 (the result is rounded once).
        start: `[1]`, int32 or int64: the slot, and the position, of the first token; start + w <= capacity.
        q: `[w, HQ, D]`, written.
        keys, values: `[HKV, capacity, D]`, or of L layers `[L, HKV, capacity, D]`; written at slots start to
            start+w-1.
        query_heads: HQ; 0 for tokens that only become keys.
        zero_centered: the weight is 1 + k_norm, and the norm is rounded after it (Qwen3.5) instead of before (Qwen3).
        eps: of the norm.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not be one
            that writes `q_norm` or `k_norm`.

    Raises:
        ValueError: for a layout or dtype that the kernel does not read, or a device without it.
    """
    check_prepare(projected, q_norm, k_norm, cos, sin, start, q, keys, values, query_heads, gated)
    w, (HKV, capacity, D), layers = len(projected), keys.shape[-3:], len(keys) if keys.ndim == 4 else 1
    _attention_prepare_kernel[(w, query_heads + HKV, layers)](
        projected, k_norm if q_norm is None else q_norm, k_norm, cos, sin, start, projected if q is None else q,
        keys, values, capacity,
        HQ=query_heads, HKV=HKV, D=D, R=cos.shape[1], GATED=gated, ZERO_CENTERED=zero_centered, EPS=eps,
        BD=triton.next_power_of_2(D), num_warps=1,
        # a product and a sum that are each rounded must not become one operation
        enable_fp_fusion=False, **launch_options(projected.device, overlap),
    )  # fmt: skip


def check_prepare(
    projected: Tensor, q_norm: Tensor | None, k_norm: Tensor, cos: Tensor, sin: Tensor, start: Tensor,
    q: Tensor | None, keys: Tensor, values: Tensor, query_heads: int, gated: bool,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("projected", projected)
    w, dtype, (HKV, capacity, D) = len(projected), projected.dtype, keys.shape[-3:]
    layers = keys.shape[:-3]
    if layers and query_heads:
        raise ValueError(f"keys is {list(keys.shape)}: several layers take no query heads. Pass query_heads=0.")
    columns = query_heads * D * (2 if gated else 1) + 2 * HKV * D
    check_tensor("projected", projected, (w, math.prod(layers) * columns))
    check_tensor("keys", keys, (*layers, HKV, capacity, D), dtype)
    check_tensor("values", values, (*layers, HKV, capacity, D), dtype)
    check_tensor("k_norm", k_norm, (*layers, D), dtype)
    if (q is None or q_norm is None) != (query_heads == 0):
        raise ValueError(f"q and q_norm must be given for {query_heads} query heads. Pass both, or query_heads=0.")
    if q is not None and q_norm is not None:
        check_tensor("q", q, (w, query_heads, D), dtype)
        check_tensor("q_norm", q_norm, (D,), dtype)
    R = cos.shape[-1]
    if cos.dtype not in (dtype, torch.float32) or not 0 < R <= D or R % 2 or len(cos) < capacity:
        raise ValueError(
            f"cos is {list(cos.shape)} {cos.dtype}; it must have {capacity} rows or more of an even number of "
            f"channels up to {D}, in {dtype} or torch.float32."
        )
    check_tensor("cos", cos, (len(cos), R))
    check_tensor("sin", sin, (len(cos), R), cos.dtype)
    check_count("start", start)
