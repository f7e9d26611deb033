"""Drafter signals + target cost curve -> prefix probabilities and nominal verification length (Eq. 5)."""

import math

import torch
from torch import Tensor

from ..checks import check_tensor
from ..tiles import load_taps
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .acceptance import ENTROPY_FLOOR
from .limit import check_lengths, limited

# W, the longest block of the kernels of this folder
MAX_BLOCK = 64
# a row of the table each, for up to 16 draft tokens
SELECT_WARPS = 16


def select_length_ref(prefix_prob: Tensor, target_cost: Tensor, throughput: Tensor) -> Tensor:
    """The length in 2..W with the best score `1 + sum_{i<w} p_i - rho * C_tgt(w)`; ties go to the shorter.

    Args:
        prefix_prob: `[D]`; a token whose probability is NaN is not worth its cost, nor are those behind it.
        target_cost: `[W+1]`, seconds at each length (index = length; 0 and 1 are not looked at), W = D+1.
        throughput: `[1]`, rho, tokens per second.

    Returns:
        `[1]`, int32, on the device of the inputs.
    """
    gain = 1 + prefix_prob.cumsum(0)
    score = gain - throughput * target_cost[2:]
    score = score.masked_fill(score.isnan(), -math.inf)
    # argmax returns any maximum: the first one is the shorter length
    first = (score == score.max()).to(torch.int32).argmax(0, keepdim=True)
    return (first + 2).to(torch.int32)


@jit
def _select_length_kernel(
    confidence, entropy, remaining, knots, values, weights, target_cost, throughput, prefix_prob, nominal_length,
    stage0_length, D: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr, FLOOR: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    o_d, o_n = tl.arange(0, BD), tl.arange(0, BN)
    m_d = o_d < D
    o_t, m_t = o_d[:, None] * N + o_n[None, :], m_d[:, None] & (o_n < N)[None, :]
    start_next(USE_PDL)
    # [D, N]
    b_k = tl.load(knots + o_t, mask=m_t, other=float("inf"))
    b_v = tl.load(values + o_t, mask=m_t, other=0.0)
    b_c = tl.load(target_cost + 2 + o_d, mask=m_d, other=0.0)
    rho, taps = tl.load(throughput), load_taps(weights, True, 1, 6)
    await_previous(USE_PDL)
    x = tl.load(confidence + o_d, mask=m_d, other=0.0)
    h = floored(tl.load(entropy + o_d, mask=m_d, other=0.0), FLOOR)
    budget = tl.load(remaining)

    c, position = interpolated(x, b_k, b_v, o_n, N), (o_d + 1).to(tl.float32) / D
    change = tl.log(h / trailing_means(h, o_d, BD))
    logit = taps[0] + taps[1] * c + taps[2] * position + taps[3] * c * position
    b_p = tl.cumprod(tl.sigmoid(logit + taps[4] * tl.log(1.0 + h) + taps[5] * change), 0)
    tl.store(prefix_prob + o_d, b_p, mask=m_d)

    score = 1.0 + tl.cumsum(b_p, 0) - rho * b_c
    # NaN equals nothing; of equal scores the first
    w0 = 2 + tl.argmax(tl.where(m_d & (score == score), score, float("-inf")), 0)
    tl.store(nominal_length, w0)
    tl.store(stage0_length, limited(w0 + EXTRA, budget, D + 1))


@jit
def floored(h, FLOOR: tl.constexpr):
    """`max(h, FLOOR)`, NaN where h is."""
    return tl.where(h < FLOOR, FLOOR, h)


@jit
def interpolated(x, b_k, b_v, o_n, N: tl.constexpr):
    """`interpolate` of x `[D]` in the table's tiles `[D, N]`: knots, infinite behind the last one, and values."""
    right = tl.sum((b_k < x[:, None]).to(tl.int32), 1)
    right = tl.minimum(tl.maximum(right, 1), N - 1)
    is_right, is_left = o_n[None, :] == right[:, None], o_n[None, :] == right[:, None] - 1
    x0, x1 = tl.sum(tl.where(is_left, b_k, 0.0), 1), tl.sum(tl.where(is_right, b_k, 0.0), 1)
    y0, y1 = tl.sum(tl.where(is_left, b_v, 0.0), 1), tl.sum(tl.where(is_right, b_v, 0.0), 1)
    # fp32's smallest normal number: equal knots make a step
    share = (x - x0) / tl.maximum(x1 - x0, 1.1754943508222875e-38)
    # not minimum and maximum, which lose a NaN
    share = tl.where(share < 0.0, 0.0, tl.where(share > 1.0, 1.0, share))
    return y0 + share * (y1 - y0)


@jit
def trailing_means(h, o_d, BD: tl.constexpr):
    """`trailing_mean` of h `[D]` as sums of weights: 2^-(i-j) for the entropies j < i, the first one's twice that."""
    i, j = tl.maximum(o_d, 1)[:, None], o_d[None, :]
    weight = tl.exp2((tl.maximum(j, 1) - i).to(tl.float32))
    # what lies behind counts for nothing, even if it is NaN
    return tl.sum(tl.where(j < i, weight * h[None, :], 0.0), 1)


@launcher
def select_length(
    confidence: Tensor,
    entropy: Tensor,
    remaining: Tensor,
    knots: Tensor,
    values: Tensor,
    weights: Tensor,
    target_cost: Tensor,
    throughput: Tensor,
    prefix_prob: Tensor,
    nominal_length: Tensor,
    stage0_length: Tensor,
    *,
    extra_tokens: int,
    overlap: bool = False,
) -> None:
    """Acceptance model, prefix probabilities, Eq. 5 and the output budget in one launch of one program.

    It computes `conditional_acceptance_ref`, `prefix_probabilities_ref`, `select_length_ref` and, of w0 and the extra
    tokens, `limit_length_ref`. Whatever the signals are, NaN included, the lengths are within their bounds.

    Args:
        confidence, entropy: `[D]`, fp32, 1 <= D < 64. remaining: `[1]`, int64: the output budget.
        knots, values: `[D, N]`, N >= 2, weights: `[6]`, fp32, see `conditional_acceptance_ref`.
        target_cost: `[D+2]`, throughput: `[1]`, fp32, see `select_length_ref`.
        prefix_prob: `[D]`, fp32, written. nominal_length, stage0_length: `[1]`, int32, written: w0 and u.
        extra_tokens: that Stage 0 processes beyond w0.
        overlap: start before the previous kernel ends, which must not be one that writes a table.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    check_select(
        confidence, entropy, remaining, knots, values, weights, target_cost, throughput, prefix_prob, nominal_length,
        stage0_length,
    )  # fmt: skip
    D, N = knots.shape
    BD, BN = max(16, triton.next_power_of_2(D)), triton.next_power_of_2(N)
    _select_length_kernel[(1,)](
        confidence, entropy, remaining, knots, values, weights, target_cost, throughput, prefix_prob, nominal_length,
        stage0_length, D=D, N=N, EXTRA=extra_tokens, FLOOR=ENTROPY_FLOOR, BD=BD, BN=BN,
        num_warps=SELECT_WARPS, **launch_options(knots.device, overlap),
    )  # fmt: skip


def check_select(
    confidence: Tensor, entropy: Tensor, remaining: Tensor, knots: Tensor, values: Tensor, weights: Tensor,
    target_cost: Tensor, throughput: Tensor, prefix_prob: Tensor, nominal_length: Tensor, stage0_length: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the selector would read wrongly."""
    if knots.ndim != 2 or not 1 <= knots.shape[0] < MAX_BLOCK or knots.shape[1] < 2:
        raise ValueError(
            f"knots is {list(knots.shape)}; select_length takes [D, N] with D < {MAX_BLOCK} draft tokens and N >= 2 "
            "knots. Use select_length_ref for longer blocks."
        )
    D, N = knots.shape
    sizes = {"confidence": (confidence, (D,)), "entropy": (entropy, (D,)), "knots": (knots, (D, N)),
             "values": (values, (D, N)), "weights": (weights, (6,)), "target_cost": (target_cost, (D + 2,)),
             "throughput": (throughput, (1,)), "prefix_prob": (prefix_prob, (D,))}  # fmt: skip
    for name, (tensor, shape) in sizes.items():
        check_tensor(name, tensor, shape, torch.float32)
    check_lengths(remaining, nominal_length, stage0_length)
