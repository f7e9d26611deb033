"""A GDN layer's outputs and output gate -> the input of its output projection: norm of every head, times SiLU."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..gdn.gates import compute_dtype
from ..tiles import silu, within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, *, eps: float) -> None:
    """Norm every head, rounded as transformers rounds it: after the norm, after the weight and after the gate.

    Args:
        x: `[w, HV, V]`. gate: `[w, HV*V]`, x's dtype.
        weight: `[V]`, x's dtype or fp32, in which the product with the weight is not rounded.
        out: `[w, HV*V]`, x's dtype, written.
        eps: added to the mean square.
    """
    wide = x.to(compute_dtype(x))
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    out.copy_((weight * normed * F.silu(gate.to(wide.dtype)).view_as(x)).to(x.dtype).view_as(out))


@jit
def _gated_rms_norm_kernel(x, gate, weight, out, eps, V: tl.constexpr, BV: tl.constexpr, USE_PDL: tl.constexpr):
    """One head of one token."""
    i_head, o_v = tl.program_id(0), tl.arange(0, BV)
    m_v, o_x = within(o_v, V, BV), i_head * V + o_v
    b_w = tl.load(weight + o_v, mask=m_v, other=0.0)
    await_previous(USE_PDL)
    b_x = tl.load(x + o_x, mask=m_v, other=0.0)
    b_g = tl.load(gate + o_x, mask=m_v, other=0.0)
    start_next(USE_PDL)
    y = b_x.to(tl.float32)
    y = (y * tl.rsqrt(tl.sum(y * y, 0) / V + eps)).to(b_x.dtype).to(tl.float32)
    y = (y * b_w.to(tl.float32)).to(b_w.dtype).to(tl.float32)
    tl.store(out + o_x, (y * silu(b_g.to(tl.float32))).to(b_x.dtype), mask=m_v)


@launcher
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, *, eps: float, overlap: bool = False) -> None:
    """`gated_rms_norm_ref` in one launch.

    Args:
        x, gate, weight, out, eps: see `gated_rms_norm_ref`; w <= 16.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not write
            `weight`.

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_gated_rms_norm(x, gate, weight, out)
    w, HV, V = x.shape
    # a head fits a warp: no barrier, and enough programs for one token
    _gated_rms_norm_kernel[(w * HV,)](
        x, gate, weight, out, eps, V=V, BV=triton.next_power_of_2(V), num_warps=1, **launch_options(x.device, overlap)
    )


def check_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raise ValueError for inputs that the norm would read wrongly."""
    if x.ndim != 3:
        raise ValueError(f"x is {list(x.shape)}; gated_rms_norm takes [w, HV, V], one sequence.")
    w, HV, V = x.shape
    if not 1 <= w <= MAX_TOKENS:
        raise ValueError(f"gated_rms_norm takes 1 to {MAX_TOKENS} tokens, got {w}. Use gated_rms_norm_ref for more.")
    check_input_dtype("x", x)
    check_tensor("x", x, (w, HV, V))
    check_tensor("gate", gate, (w, HV * V), x.dtype)
    check_tensor("weight", weight, (V,), torch.float32 if weight.dtype == torch.float32 else x.dtype)
    check_tensor("out", out, (w, HV * V), x.dtype)
