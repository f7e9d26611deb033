"""Drafter's confidences + latency of a whole round -> the length that the competing rules take."""

import math

import torch
from torch import Tensor

from ..checks import check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .acceptance import interpolate
from .limit import check_lengths, limit_length_ref, limited
from .select import MAX_BLOCK, SELECT_WARPS, interpolated


def select_ratio_ref(
    confidence: Tensor,
    remaining: Tensor,
    target_cost: Tensor,
    fixed_cost: Tensor,
    lengths: Tensor,
    prefix_prob: Tensor,
    nominal_length: Tensor,
    stage0_length: Tensor,
    *,
    calibration: tuple[Tensor, Tensor] | None,
    anchor_tokens: int,
    rising: bool,
) -> None:
    """The length with the best ratio `(anchor_tokens + sum_{i<w} p_i) / (fixed_cost + target_cost[w])`.

    Of equal ratios the first is the best. A ratio is NaN from the first acceptance that is NaN on, and worth nothing.

    Args:
        confidence: `[D]`, top-1 probability of each draft token. remaining: `[1]`, integer: the output budget.
        target_cost: `[W+1]`, seconds at each length (index = length; 0 and 1 are not looked at), W = D+1.
        fixed_cost: `[1]`, seconds of a round at any length.
        lengths: `[L]`, int32, ascending: which of 2..W the rule may take.
        prefix_prob: `[D]`, written: p_i, the product of the first i conditional acceptances.
        nominal_length, stage0_length: `[1]`, int32, written: w0 and u.
        calibration: `[D, N]` each, the isotonic table (knots, values) of each position whose values are the
            conditional acceptances; None: they are the confidences.
        anchor_tokens: what a round emits besides the accepted draft tokens.
        rising: take the length before the first whose ratio is not above that of the length before it, NaN included,
            instead of the best of all.
    """
    cond_prob = confidence if calibration is None else interpolate(confidence, *calibration)
    torch.cumprod(cond_prob, 0, out=prefix_prob)
    ratio = (anchor_tokens + prefix_prob.cumsum(0)) / (fixed_cost + target_cost[2:])
    ratio = ratio.index_select(0, lengths - 2)
    if rising:
        best = (ratio[1:] > ratio[:-1]).cumprod(0).sum(0, keepdim=True)
    else:
        best = ratio.nan_to_num(-math.inf, math.inf, -math.inf).argmax(0, keepdim=True)
    nominal_length.copy_(lengths.index_select(0, best))
    stage0_length.copy_(limit_length_ref(nominal_length, remaining, len(confidence) + 1))


@jit
def _select_ratio_kernel(
    confidence, remaining, target_cost, fixed_cost, lengths, knots, values, prefix_prob, nominal_length, stage0_length,
    D: tl.constexpr, N: tl.constexpr, L: tl.constexpr, ANCHOR: tl.constexpr, RISING: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr, BL: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """N is 0 where there is no table."""
    o_d, o_n, o_l = tl.arange(0, BD), tl.arange(0, BN), tl.arange(0, BL)
    m_d, m_l = o_d < D, o_l < L
    start_next(USE_PDL)
    b_w = tl.load(lengths + o_l, mask=m_l, other=0)
    seconds = tl.load(fixed_cost) + tl.load(target_cost + b_w, mask=m_l, other=0.0)
    if N > 0:
        o_t, m_t = o_d[:, None] * N + o_n[None, :], m_d[:, None] & (o_n < N)[None, :]
        # [D, N]
        b_k = tl.load(knots + o_t, mask=m_t, other=float("inf"))
        b_v = tl.load(values + o_t, mask=m_t, other=0.0)
    await_previous(USE_PDL)
    b_p = tl.load(confidence + o_d, mask=m_d, other=0.0)
    budget = tl.load(remaining)

    if N > 0:
        b_p = interpolated(b_p, b_k, b_v, o_n, N)
    b_p = tl.cumprod(b_p, 0)
    tl.store(prefix_prob + o_d, b_p, mask=m_d)

    # [L, D]: the same order of additions for every length, so that a token that adds nothing leaves the sum as it is
    tokens = ANCHOR + tl.sum(tl.where(o_d[None, :] + 1 < b_w[:, None], b_p[None, :], 0.0), 1)
    # rounded as PyTorch divides, or equal ratios would not be equal
    ratio = tl.div_rn(tokens, seconds)
    if RISING:
        before = tl.sum(tl.where(o_l[None, :] + 1 == o_l[:, None], ratio[None, :], 0.0), 1)
        best = tl.min(tl.where((o_l == 0) | (ratio > before), L, o_l), 0) - 1
    else:
        # NaN equals nothing; of equal ratios the first
        best = tl.argmax(tl.where(m_l & (ratio == ratio), ratio, float("-inf")), 0)
    w0 = tl.sum(tl.where(o_l == best, b_w, 0), 0)
    tl.store(nominal_length, w0)
    tl.store(stage0_length, limited(w0, budget, D + 1))


@launcher
def select_ratio(
    confidence: Tensor,
    remaining: Tensor,
    target_cost: Tensor,
    fixed_cost: Tensor,
    lengths: Tensor,
    prefix_prob: Tensor,
    nominal_length: Tensor,
    stage0_length: Tensor,
    *,
    calibration: tuple[Tensor, Tensor] | None,
    anchor_tokens: int,
    rising: bool,
    overlap: bool = False,
) -> None:
    """`select_ratio_ref` in one launch of one program.

    Whatever the confidences and costs are, NaN included, w0 is one of `lengths` and u within its bounds.

    Args:
        confidence, prefix_prob: `[D]`, fp32, 1 <= D < 64. remaining: `[1]`, int64.
        target_cost: `[D+2]`, fixed_cost: `[1]`, fp32.
        lengths, nominal_length, stage0_length, anchor_tokens, rising: see `select_ratio_ref`.
        calibration: `[D, N]` each, fp32, N >= 2, or None.
        overlap: start before the previous kernel ends, which must not be one that writes a table.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    check_ratio(
        confidence,
        remaining,
        target_cost,
        fixed_cost,
        lengths,
        prefix_prob,
        nominal_length,
        stage0_length,
        calibration,
    )
    D, L = len(confidence), len(lengths)
    knots, values = calibration or (None, None)
    N = 0 if knots is None else knots.shape[1]
    BD, BN, BL = max(16, triton.next_power_of_2(D)), triton.next_power_of_2(max(N, 1)), triton.next_power_of_2(L)
    _select_ratio_kernel[(1,)](
        confidence, remaining, target_cost, fixed_cost, lengths, knots, values, prefix_prob, nominal_length,
        stage0_length, D=D, N=N, L=L, ANCHOR=anchor_tokens, RISING=rising, BD=BD, BN=BN, BL=BL,
        num_warps=SELECT_WARPS if N else 1, **launch_options(confidence.device, overlap),
    )  # fmt: skip


def check_ratio(
    confidence: Tensor, remaining: Tensor, target_cost: Tensor, fixed_cost: Tensor, lengths: Tensor,
    prefix_prob: Tensor, nominal_length: Tensor, stage0_length: Tensor, calibration: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the rules would read wrongly."""
    if confidence.ndim != 1 or not 1 <= len(confidence) < MAX_BLOCK:
        raise ValueError(
            f"confidence is {list(confidence.shape)}; select_ratio takes [D] with 1 <= D < {MAX_BLOCK} draft tokens. "
            "Use select_ratio_ref for longer blocks."
        )
    D = len(confidence)
    if lengths.ndim != 1 or not 1 <= len(lengths) <= D:
        raise ValueError(
            f"lengths is {list(lengths.shape)}; select_ratio takes [L] with 1 to D = {D} of the lengths 2 to {D + 1}. "
            "Pass every length once."
        )
    check_tensor("lengths", lengths, (len(lengths),), torch.int32)
    sizes = [("confidence", confidence, D), ("target_cost", target_cost, D + 2), ("fixed_cost", fixed_cost, 1),
             ("prefix_prob", prefix_prob, D)]  # fmt: skip
    for name, tensor, size in sizes:
        check_tensor(name, tensor, (size,), torch.float32)
    if calibration is not None:
        knots, values = calibration
        if knots.ndim != 2 or knots.shape[1] < 2:
            raise ValueError(
                f"knots of the calibration is {list(knots.shape)}; select_ratio takes [D, N] with N >= 2 knots. "
                "Repeat a knot where there is one."
            )
        for name, tensor in (("knots", knots), ("values", values)):
            check_tensor(name, tensor, (D, knots.shape[1]), torch.float32)
    check_lengths(remaining, nominal_length, stage0_length)
