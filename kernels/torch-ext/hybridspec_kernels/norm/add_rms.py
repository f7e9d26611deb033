"""Residual stream + a layer's output -> the new residual stream and its norm, the next layer's input."""

from functools import partial

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..dense.linear import MAX_PARTS
from ..gdn.gates import compute_dtype
from ..tiles import within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

# a row is held in registers
MAX_SIZE = 8192


def add_rms_norm_ref(
    residual: Tensor | None,
    delta: Tensor | None,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    zero_centered: bool,
    feature: Tensor | None = None,
) -> None:
    """Add to the residual stream, and norm the sum over its last dimension.

    Args:
        residual: `[w, H]`, model dtype; becomes `residual + delta`. None for 0: only the norm of delta is asked for.
        delta: `[w, H]`, model dtype; or `[P, w, H]`, parts whose sum is rounded to it; or None for 0.
        weight: `[H]`.
        out: `[w, H]`, model dtype, written.
        eps: added to the mean square.
        zero_centered: True for the norms of Qwen3.5 and Qwen3-Next: `1 + weight` in fp32, rounded once. False for a
            drafter's: rounded before the product with `weight` and after it.
        feature: `[w, H]`, model dtype, rows any distance apart; the new residual is copied there.
    """
    added = None if delta is None else (delta if delta.ndim == 2 else delta.sum(0)).to(out.dtype)
    if residual is None:
        assert added is not None
        residual = added
    elif added is not None:
        residual += added
    if feature is not None:
        feature.copy_(residual)
    wide = residual.to(compute_dtype(residual))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if zero_centered:
        out.copy_(normed * (1.0 + weight.to(wide.dtype)))
    else:
        out.copy_(weight * normed.to(residual.dtype))


@partial(jit, do_not_specialize=["W"])
def _add_rms_norm_kernel(
    residual, delta, weight, out, feature, feature_stride, eps, W,
    H: tl.constexpr, BH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PARTS: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    HAS_FEATURE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    i_t, o_h = tl.program_id(0), tl.arange(0, BH)
    m_h, o_row = within(o_h, H, BH), i_t * H + o_h
    b_w = tl.load(weight + o_h, mask=m_h, other=0.0)
    await_previous(USE_PDL)
    b_r = tl.zeros((BH,), out.dtype.element_ty)
    if HAS_RESIDUAL:
        b_r = tl.load(residual + o_row, mask=m_h, other=0.0)
    if PARTS > 0:
        b_d = tl.load(delta + o_row, mask=m_h, other=0.0).to(tl.float32)
        for i in tl.static_range(1, PARTS):
            b_d += tl.load(delta + i * W * H + o_row, mask=m_h, other=0.0)
        start_next(USE_PDL)
        b_r = (b_r.to(tl.float32) + b_d.to(b_r.dtype).to(tl.float32)).to(b_r.dtype)
        if HAS_RESIDUAL:
            tl.store(residual + o_row, b_r, mask=m_h)
    else:
        start_next(USE_PDL)
    if HAS_FEATURE:
        tl.store(feature + i_t * feature_stride + o_h, b_r, mask=m_h)
    tl.store(out + o_row, rms_norm(b_r, b_w, H, eps, ZERO_CENTERED), mask=m_h)


@jit
def rms_norm(row, weight, H: tl.constexpr, eps, ZERO_CENTERED: tl.constexpr):
    """The norm of a row of H columns, rounded to its dtype where each family rounds."""
    x = row.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    if ZERO_CENTERED:
        x *= 1.0 + weight.to(tl.float32)
    else:
        x = x.to(row.dtype).to(tl.float32) * weight.to(tl.float32)
    return x.to(row.dtype)


@launcher
def add_rms_norm(
    residual: Tensor | None,
    delta: Tensor | None,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    zero_centered: bool,
    feature: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """`add_rms_norm_ref` in one launch.

    Args:
        residual, delta, weight, out, eps, zero_centered: see `add_rms_norm_ref`; w <= 16, H <= 8192. Parts are
            fp32 and at most 4. `weight` has out's dtype unless it is zero-centred.
        feature: `[w, H]`, out's dtype, unit column stride and rows at least H apart; it must not overlap the
            others.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not write
            `weight`.

    Raises:
        ValueError: for more tokens or columns, what the kernel does not read, or a device without it.
    """
    check_add_rms_norm(residual, delta, weight, out, zero_centered, feature)
    w, H = out.shape
    parts = 0 if delta is None else 1 if delta.ndim == 2 else len(delta)
    block = triton.next_power_of_2(H)
    _add_rms_norm_kernel[(w,)](
        out if residual is None else residual, out if delta is None else delta, weight, out,
        out if feature is None else feature, H if feature is None else feature.stride(0), eps, w,
        H=H, BH=block, HAS_RESIDUAL=residual is not None, PARTS=parts, ZERO_CENTERED=zero_centered,
        HAS_FEATURE=feature is not None,
        num_warps=norm_warps(block), **launch_options(out.device, overlap),
    )  # fmt: skip


def norm_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` columns."""
    return 4 if block <= 1024 else 8


def check_add_rms_norm(
    residual: Tensor | None, delta: Tensor | None, weight: Tensor, out: Tensor, zero_centered: bool,
    feature: Tensor | None,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the norm would read wrongly."""
    if residual is None and delta is None:
        raise ValueError("add_rms_norm got neither residual nor delta. Pass what to norm.")
    if out.ndim != 2:
        raise ValueError(f"out is {list(out.shape)}; add_rms_norm takes [w, H], one sequence.")
    (w, H), dtype = out.shape, out.dtype
    if not (1 <= w <= MAX_TOKENS and 1 <= H <= MAX_SIZE):
        raise ValueError(
            f"add_rms_norm takes 1 to {MAX_TOKENS} tokens of 1 to {MAX_SIZE} columns, got {w} of {H}. "
            "Use add_rms_norm_ref for more."
        )
    check_input_dtype("out", out)
    check_tensor("out", out, (w, H))
    if residual is not None:
        check_tensor("residual", residual, (w, H), dtype)
    if delta is not None and delta.ndim == 3:
        check_tensor("delta", delta, (len(delta), w, H), torch.float32)
        if not 1 <= len(delta) <= MAX_PARTS:
            raise ValueError(f"delta has {len(delta)} parts; add_rms_norm adds 1 to {MAX_PARTS}. Add them up before.")
    elif delta is not None:
        check_tensor("delta", delta, (w, H), dtype)
    check_input_dtype("weight", weight)
    check_tensor("weight", weight, (H,), None if zero_centered else dtype)
    check_feature(feature, w, H, dtype)


def check_feature(feature: Tensor | None, w: int, H: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless the feature is a block of columns that a norm can write."""
    if feature is not None and (
        feature.shape != (w, H)
        or feature.dtype != dtype
        or (H > 1 and feature.stride(1) != 1)
        or (w > 1 and feature.stride(0) < H)
    ):
        raise ValueError(
            f"feature is {list(feature.shape)} {feature.dtype}, strides {feature.stride()}; the kernel writes "
            f"[{w}, {H}] {dtype} with unit column stride. Pass columns of a contiguous tensor."
        )
