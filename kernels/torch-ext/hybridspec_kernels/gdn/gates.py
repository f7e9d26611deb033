"""Raw gate projections and q/k rows -> decay, writing strength and unit vectors (the inputs of Eq. 1)."""

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 as soon as one input is fp64 (tests), else fp32: gates, norms and states are never computed lower."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def gdn_gates_ref(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log decay and writing strength of every token and value head.

    Args:
        a, b: `[W, HV]`, the raw gate projections.
        A_log, dt_bias: `[HV]`, the layer's decay parameters.
        dtype: fp32 or fp64, the dtype of the result.

    Returns:
        `log_decay` `[W, HV]` (log alpha, <= 0) and `beta` `[W, HV]` in (0, 1).
    """
    log_decay = -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))
    # beta rounds to the projection's dtype first, as transformers does: in bf16 the two would drift apart otherwise
    return log_decay, b.sigmoid().to(dtype)


def unit_length_ref(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`1 / sqrt(sum x^2 + eps)` over the last dimension, kept, in `dtype` (the eps is inside the root, as in fla)."""
    x = x.to(dtype)
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def to_value_heads(x: Tensor, num_value_heads: int) -> Tensor:
    """`[..., H, K]` -> `[..., HV, K]`: each key head serves `HV // H` consecutive value heads."""
    return x.repeat_interleave(num_value_heads // x.shape[-2], dim=-2)
