"""Traces that ship -> what an online rho gains in modelled throughput over the one that a request starts with."""

from dataclasses import replace

import torch

from hybridspec_generation.tables import PRIOR_TOKENS

from ..calibration.acceptance import predict_acceptance
from ..calibration.capture import CaptureRounds
from ..calibration.gains import request_rates
from ..calibration.tables import pooled_throughput
from .decode_traces import load_acceptance, load_trace
from .example_cost import example_cost


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
