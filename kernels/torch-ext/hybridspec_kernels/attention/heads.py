"""RMSNorm and rotation of attention heads, rounded as transformers rounds them: references, and pieces of kernels."""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..tiles import within
from ..triton_support import jit, tl, triton


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


def part_width(rotated: int) -> int:
    """BC: a head's channels come in tiles this wide, so that both of a pair lie at one place, in two tiles."""
    return max(16, triton.next_power_of_2(rotated // 2))


@jit
def channels(i: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """Part i of a head, its channels and their mask `[BC]`: halves of the first R first, then BC others at a time."""
    o_c = tl.arange(0, BC)
    if i < 2:
        return i * (R // 2) + o_c, within(o_c, R // 2, BC)
    else:
        o_c += (i - 2) * BC
        return R + o_c, within(o_c, D - R, BC)


@jit
def load_parts(p, mask, D: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):
    """The D channels behind every pointer `[n]`, as a tuple of tiles `[n, BC]`."""
    PARTS: tl.constexpr = 2 + (D - R + BC - 1) // BC
    parts = ()
    for i in tl.static_range(PARTS):
        o_c, m_c = channels(i, D, R, BC)
        part = tl.load(p[:, None] + o_c[None, :], mask=mask[:, None] & m_c[None, :], other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]
    return parts


@jit
def load_weights(norm, D: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """RMSNorm's factors in fp32, as a tuple of tiles `[1, BC]`."""
    PARTS: tl.constexpr = 2 + (D - R + BC - 1) // BC
    parts = ()
    for i in tl.static_range(PARTS):
        o_c, m_c = channels(i, D, R, BC)
        part = tl.load(norm + o_c, mask=m_c, other=0.0)[None, :].to(tl.float32)
        if ZERO_CENTERED:
            part += 1.0
        parts = parts + (part,)  # type: ignore[assignment]
    return parts


@jit
def norm_and_turn(
    parts, weights, cos, sin, mask,
    D: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, ZERO_CENTERED: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Heads in parts -> the same normalised, and rotated by the table rows that `cos` and `sin` `[n]` point to."""
    PARTS: tl.constexpr = 2 + (D - R + BC - 1) // BC
    cosines, sines = load_parts(cos, mask, R, R, BC), load_parts(sin, mask, R, R, BC)
    squares = parts[0].to(tl.float32) * parts[0].to(tl.float32)
    for i in tl.static_range(1, PARTS):
        squares += parts[i].to(tl.float32) * parts[i].to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, 1) / D + EPS)[:, None]
    first = weigh(parts[0].to(tl.float32) * scale, weights[0], parts[0].dtype, ZERO_CENTERED).to(tl.float32)
    second = weigh(parts[1].to(tl.float32) * scale, weights[1], parts[1].dtype, ZERO_CENTERED).to(tl.float32)
    turned = (
        turn(first, -second, cosines[0], sines[0]).to(parts[0].dtype),
        turn(second, first, cosines[1], sines[1]).to(parts[1].dtype),
    )
    for i in tl.static_range(2, PARTS):
        passed = weigh(parts[i].to(tl.float32) * scale, weights[i], parts[i].dtype, ZERO_CENTERED)
        turned = turned + (passed,)  # type: ignore[assignment]
    return turned


@jit
def weigh(unit, weight, DTYPE: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """RMSNorm's factors on fp32 of unit mean square, rounded to DTYPE where each family rounds."""
    if ZERO_CENTERED:
        return (unit * weight).to(DTYPE)
    else:
        return (unit.to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@jit
def turn(x, other, cos, sin):
    """`x * cos + other * sin` for fp32 x and other, each product and the sum rounded to the tables' dtype."""
    direct = (x * cos.to(tl.float32)).to(cos.dtype)
    crossed = (other * sin.to(tl.float32)).to(cos.dtype)
    return (direct.to(tl.float32) + crossed.to(tl.float32)).to(cos.dtype)


def check_tables(cos: Tensor, sin: Tensor, capacity: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError for rotary tables that the kernels would read wrongly."""
    R = cos.shape[-1]
    if cos.dtype not in (dtype, torch.float32) or not 0 < R <= head_dim or R % 2 or len(cos) < capacity:
        raise ValueError(
            f"cos is {list(cos.shape)} {cos.dtype}; it must have {capacity} rows or more of an even number of "
            f"channels up to {head_dim}, in {dtype} or torch.float32."
        )
    check_tensor("cos", cos, (len(cos), R))
    check_tensor("sin", sin, (len(cos), R), cos.dtype)
