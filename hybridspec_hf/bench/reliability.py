"""Predicted acceptance against what was accepted: expected calibration error, by position and by bin."""

from typing import NamedTuple

from torch import Tensor

from ..calibration.acceptance import calibration_error, error_by_position

BINS = 10


class Reliability(NamedTuple):
    """How far predictions can be taken at their word.

    Attributes:
        error: expected calibration error over 10 equal bins, over all reached draft tokens.
        by_position: the same of each draft position; None where no round reached it.
        predicted, accepted: means of each bin that holds predictions. counts: draft tokens in it.
    """

    error: float
    by_position: list[float | None]
    predicted: list[float]
    accepted: list[float]
    counts: list[int]


def reliability(scores: Tensor, labels: Tensor, reached: Tensor) -> Reliability:
    """Judge acceptance probabilities.

    Args:
        scores: `[N, D]`, fp64, conditional acceptance probabilities. labels, reached: `[N, D]`, bool, what
            `reached_positions` returns.
    """
    truth = labels.double()
    seen, right = scores[reached], truth[reached]
    index = (seen * BINS).long().clamp(0, BINS - 1)
    held = [index == b for b in range(BINS) if (index == b).any()]
    return Reliability(
        error=calibration_error(seen, right),
        by_position=error_by_position(scores, labels, reached),
        predicted=[float(seen[b].mean()) for b in held],
        accepted=[float(right[b].mean()) for b in held],
        counts=[int(b.sum()) for b in held],
    )
