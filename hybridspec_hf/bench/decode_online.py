"""Traces that ship -> what an online rho gains in modelled throughput over the one that a request starts with."""

from dataclasses import replace

import numpy as np
import torch

from hybridspec_generation import CostTable
from hybridspec_generation.tables import PRIOR_TOKENS

from ..calibration.acceptance import predict_acceptance
from ..calibration.capture import CaptureRounds
from ..calibration.gains import request_rates
from ..calibration.tables import pooled_throughput
from .decode_traces import load_acceptance, load_trace

# milliseconds of a round of the 35B's shape on one H200, by length, in an earlier version: an example
ROUND_MS = {2: 3.5, 4: 4.3, 8: 5.25, 16: 6.35}


def online_gain(trace: str, wrong: float, new_tokens: int) -> float:
    """Modelled throughput with online rho over that without.

    Args:
        trace: a category. wrong: the first rho over the calibrated one. new_tokens: of each request.
    """
    played, acceptance, cost = load_trace(trace), load_acceptance(), example_cost()
    counts = torch.zeros(len(played.accepted), played.block, dtype=torch.int64)
    rounds = CaptureRounds(played.confidence, played.entropy, played.accepted, counts, counts)
    prefix = predict_acceptance(rounds, acceptance).cumprod(1)
    cost = replace(cost, throughput=wrong * pooled_throughput(acceptance, cost))
    kept, online = (request_rates(prefix, played.accepted, cost, new_tokens, prior) for prior in (None, PRIOR_TOKENS))
    return round(float((online[0] / online[1]) / (kept[0] / kept[1])), 5)


def example_cost() -> CostTable:
    """A quadratic through `ROUND_MS`."""
    lengths, times = zip(*ROUND_MS.items(), strict=True)
    fit = np.polyval(np.polyfit(lengths, times, 2), np.arange(max(lengths) + 1)) / 1e3
    return CostTable(
        target_cost=(0.0, 0.0, *(float(seconds - fit[2]) for seconds in fit[2:])), fixed_cost=float(fit[2]),
        stage0_token_cost=0.0, expert_cost=0.0, source="a quadratic through four lengths",
    )  # fmt: skip
