"""Rounds of random inputs -> outputs, states and windows in float64, token by token (Eq. 1)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridspec_generation.gdn import GDNParams, GDNShape
from hybridspec_kernels import gdn_recurrent_ref

from .gdn_inputs import Round


class Exact(NamedTuple):
    """One round of L layers.

    Attributes:
        outputs: `[L, w, HV, V]`, fp64.
        states: `[L, w, HV, V, K]`, fp64, after each token.
        window: `[L, taps-1+w, C]`, the old window and the round's rows.
    """

    outputs: Tensor
    states: Tensor
    window: Tensor


def exact_round(
    shape: GDNShape,
    params: list[GDNParams],
    item: Round,
    state: Tensor,
    window: Tensor,
    scope: str,
    rounded: bool = True,
) -> Exact:
    """Run a round from a state `[L, HV, V, K]` and a window `[L, taps-1, C]`.

    Args:
        scope: "conv" convolves the rows first, "core" takes them as convolved.
        rounded: beta rounds to the model dtype, as in transformers and our kernels; else it does not, as in others.
    """
    window = torch.cat([window, item.rows], 1)
    x = convolve(window, torch.stack([p.conv_weight for p in params])) if scope == "conv" else item.rows
    q, k, v = split_heads(shape, x.double())
    # all layers in one recurrence: they are so many more heads
    A_log, dt_bias = (torch.cat([p[i] for p in params]).double() for i in (1, 2))
    a, b = (gate.transpose(0, 1).flatten(1) for gate in (item.a, item.b))
    b = b if rounded else b.double()
    outputs, states = gdn_recurrent_ref(q, k, v, a.double(), b, A_log, dt_bias, state.double().flatten(0, 1))
    heads = (shape.layers, shape.value_heads)
    return Exact(outputs.unflatten(1, heads).transpose(0, 1), states.unflatten(1, heads).transpose(0, 1), window)


def split_heads(shape: GDNShape, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[L, w, C]` -> q, k `[w, L*H, K]` and v `[w, L*HV, V]`."""
    s = shape
    width = s.key_heads * s.key_dim
    q, k, v = x.transpose(0, 1).split([width, width, s.value_heads * s.value_dim], dim=-1)
    heads = (s.key_heads, s.key_dim)
    parts = q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, (s.value_heads, s.value_dim))
    return parts[0].flatten(1, 2), parts[1].flatten(1, 2), parts[2].flatten(1, 2)


def convolve(rows: Tensor, weights: Tensor) -> Tensor:
    """Causal convolution in fp64 with transformers' two roundings to the model dtype: its sum, then its SiLU.

    Args:
        rows: `[L, taps-1+w, C]`, model dtype. weights: `[L, taps, C]`.

    Returns:
        `[L, w, C]` in rows' dtype.
    """
    taps = weights.shape[1]
    w = rows.shape[1] - taps + 1
    total = sum(rows[:, j : j + w].double() * weights[:, j : j + 1].double() for j in range(taps))
    assert isinstance(total, Tensor)
    return F.silu(total.to(rows.dtype).double()).to(rows.dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; inf if anything is not finite."""
    error = float((got.double() - want).norm() / want.norm())
    return error if error == error else float("inf")
