"""Top-1 confidence and entropy of the proposal -> acceptance probabilities (paper, Appendix A.2)."""

import torch
from torch import Tensor

ENTROPY_FLOOR = 1e-6


def conditional_acceptance_ref(
    confidence: Tensor, entropy: Tensor, knots: Tensor, values: Tensor, weights: Tensor
) -> Tensor:
    """Probability that each draft token is accepted given that all before it are.

    An isotonic table per position calibrates the confidence; a logistic model then combines it with the position,
    their interaction, log(1 + h) and the entropy change log(h_i / hbar_{i-1}).

    Args:
        confidence, entropy: `[D]`, top-1 probability and entropy (nats) of each draft token.
        knots, values: `[D, N]`, the isotonic table of each position: ascending confidences, calibrated values.
        weights: `[6]`, intercept, confidence, position, confidence x position, log(1+h), entropy change.

    Returns:
        `cond_prob` `[D]` in the dtype of `values` (fp32; fp64 in tests).
    """
    return torch.sigmoid(acceptance_features_ref(confidence, entropy, knots, values) @ weights)


def acceptance_features_ref(confidence: Tensor, entropy: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """The logistic model's inputs `[D, 6]`, in the order of its weights; arguments as above."""
    dtype = values.dtype
    h = entropy.to(dtype).clamp_min(ENTROPY_FLOOR)
    c = interpolate(confidence.to(dtype), knots, values)
    position = torch.arange(1, len(h) + 1, device=h.device, dtype=dtype) / len(h)
    change = torch.log(h / trailing_mean(h))
    return torch.stack([torch.ones_like(c), c, position, c * position, torch.log1p(h), change], dim=1)


def interpolate(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """Row i of the table at x_i: linear between knots, constant outside them; equal knots make a step."""
    right = torch.searchsorted(knots, x[:, None].contiguous()).clamp(1, knots.shape[1] - 1)
    x0, x1 = knots.gather(1, right - 1), knots.gather(1, right)
    y0, y1 = values.gather(1, right - 1), values.gather(1, right)
    share = ((x[:, None] - x0) / (x1 - x0).clamp_min(torch.finfo(values.dtype).tiny)).clamp(0, 1)
    return (y0 + share * (y1 - y0))[:, 0]


def trailing_mean(h: Tensor) -> Tensor:
    """hbar_{i-1} for i = 1..D, with hbar_0 = h_1 and hbar_i = (h_i + hbar_{i-1}) / 2."""
    means = [h[0]]
    for i in range(len(h) - 1):
        means.append((h[i] + means[-1]) / 2)
    return torch.stack(means)


def prefix_probabilities_ref(cond_prob: Tensor) -> Tensor:
    """`[D]` conditional -> `[D]` prefix probabilities: p_i is the product of the first i."""
    return cond_prob.cumprod(0)
