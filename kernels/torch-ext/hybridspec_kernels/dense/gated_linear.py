"""A GDN layer's outputs and output gate -> its output projection: norm of every head, SiLU, matrix product."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..gdn.gates import compute_dtype
from ..tiles import dot_precision, input_dot, silu, within
from ..triton_support import await_previous, jit, launch_options, launcher, loop_bound, start_next, tl, triton
from .linear import tile_shape

# a wider tile of weights, gates and heads would not fit the smaller GPUs' shared memory
MOST_COLUMNS = 128


def gated_linear_ref(
    x: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
) -> None:
    """`gated_rms_norm_ref` of every head, then a linear layer.

    Args:
        x: `[w, HV, V]`. gate: `[w, HV*V]`, x's dtype.
        norm_weight: `[V]`, x's dtype or fp32. weight: `[N, HV*V]`, x's dtype.
        out: `[w, N]`, written; or `[P, w, N]`: part p of the sum over heads, of HV heads in P runs of equal length.
        eps: added to the mean square.
    """
    normed = gated_rms_norm_ref(x, gate, norm_weight, eps)
    if out.ndim == 2:
        out.copy_(F.linear(normed, weight))
        return
    run = part_heads(x.shape[1], len(out)) * x.shape[2]
    for i, part in enumerate(out):
        columns = slice(i * run, (i + 1) * run)
        part.copy_(F.linear(normed[:, columns], weight[:, columns]))


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`[w, HV*V]`: every head's norm, rounded as transformers rounds it: then, after the weight and after the gate.

    Args:
        x, gate, eps: see `gated_linear_ref`.
        weight: `[V]`, x's dtype or fp32, in which the product with the weight is not rounded.
    """
    wide = x.to(compute_dtype(x))
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * F.silu(gate.to(wide.dtype)).view_as(x)).to(x.dtype).view_as(gate)


def part_heads(heads: int, parts: int) -> int:
    """Heads of a part; the last parts may be short or empty."""
    return -(-heads // parts)


@partial(jit, do_not_specialize=["W"])
def _gated_linear_kernel(
    x, gate, norm_weight, weight, out, eps, W,
    HV: tl.constexpr, V: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs, summed over a run of RUN heads."""
    D: tl.constexpr = HV * V
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_n, o_t, o_v = i_n * BN + tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BV)
    m_n, m_t, m_v = o_n < N, o_t < W, within(o_v, V, BV)
    first = i_p * RUN
    p_w = weight + o_n.to(tl.int64)[:, None] * D + (first * V + o_v)[None, :]
    o_x = o_t[:, None] * D + (first * V + o_v)[None, :]
    b_v = tl.load(norm_weight + o_v, mask=m_v, other=0.0)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    acc = tl.zeros((16, BN), tl.float32)
    for i_h in range(0, loop_bound(tl.minimum(HV - first, RUN))):
        b_w = tl.load(p_w + i_h * V, mask=m_n[:, None] & m_v[None, :], other=0.0)
        b_x = tl.load(x + o_x + i_h * V, mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_g = tl.load(gate + o_x + i_h * V, mask=m_t[:, None] & m_v[None, :], other=0.0)
        acc += input_dot(gated_norm(b_x, b_g, b_v, V, eps), tl.trans(b_w), PRECISION)
    o_o = (i_p * W + o_t)[:, None] * N + o_n[None, :]
    tl.store(out + o_o, acc.to(out.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])


@jit
def gated_norm(x, gate, weight, V: tl.constexpr, eps):
    """The norm of rows of V columns times SiLU of their gates, rounded as `gated_rms_norm_ref` rounds."""
    y = x.to(tl.float32)
    y = (y * tl.rsqrt(tl.sum(y * y, 1) / V + eps)[:, None]).to(x.dtype).to(tl.float32)
    y = (y * weight.to(tl.float32)[None, :]).to(weight.dtype).to(tl.float32)
    return (y * silu(gate.to(tl.float32))).to(x.dtype)


@launcher
def gated_linear(
    x: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    overlap: bool = False,
) -> None:
    """`gated_linear_ref` in one launch.

    Args:
        x, gate, norm_weight, weight, eps: see `gated_linear_ref`; w <= 16.
        out: `[w, N]`, x's dtype, or `[P, w, N]`, fp32, parts that the consumer adds up (see `linear_parts`); written.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not write
            a weight.

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_gated_linear(x, gate, norm_weight, weight, out)
    (w, HV, V), N = x.shape, len(weight)
    parts = len(out) if out.ndim == 3 else 1
    block_v = max(16, triton.next_power_of_2(V))
    block_n, warps, stages = head_tile_shape(N * parts, block_v, x.dtype)
    _gated_linear_kernel[(triton.cdiv(N, block_n), parts)](
        x, gate, norm_weight, weight, out, eps, w, HV=HV, V=V, N=N, RUN=part_heads(HV, parts), BN=block_n, BV=block_v,
        PRECISION=dot_precision(x.dtype), num_warps=warps, num_stages=stages, **launch_options(x.device, overlap),
    )  # fmt: skip


def head_tile_shape(outputs: int, columns: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Outputs of a program, its warps and the heads in flight, for heads of `columns`; `outputs` of all parts."""
    block_n, _, warps, stages = tile_shape(outputs, dtype)
    if columns > MOST_COLUMNS:
        return min(block_n, max(16, 64 * MOST_COLUMNS // columns)), warps, 2
    return block_n, warps, stages


def check_gated_linear(x: Tensor, gate: Tensor, norm_weight: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("x", x)
    if x.ndim != 3 or not 1 <= len(x) <= MAX_TOKENS:
        raise ValueError(f"x is {list(x.shape)}; the kernel takes [w, HV, V] with 1 to {MAX_TOKENS} tokens.")
    (w, HV, V), N = x.shape, len(weight)
    check_tensor("x", x, (w, HV, V))
    check_tensor("gate", gate, (w, HV * V), x.dtype)
    check_tensor("norm_weight", norm_weight, (V,), None if norm_weight.dtype == torch.float32 else x.dtype)
    check_tensor("weight", weight, (N, HV * V), x.dtype)
    if out.ndim == 3:
        check_tensor("out", out, (len(out), w, N), torch.float32)
    else:
        check_tensor("out", out, (w, N), x.dtype)
