"""Tables and recorded rounds -> what a refinement of the length policy gains in modelled throughput (Eq. 4)."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridspec_generation import CostTable, HybridSpecConfig, cost_at
from hybridspec_generation.tables import PRIOR_TOKENS

from .tables import pooled_throughput


def interpolation_gain(prefix_prob: Tensor, costs: Sequence[CostTable], single: CostTable) -> dict[str, float]:
    """By context: modelled throughput with the curve of that context, over that with a single curve everywhere.

    Both choose lengths by Eq. 5, each with its own rho, and pay what the context costs.

    Args:
        prefix_prob: `[N, D]`, of calibration rounds. costs: whose `throughput` is known. single: the one curve.
    """
    own = {str(cost.context): modelled_rate(prefix_prob, cost, cost) for cost in costs}
    return {
        str(cost.context): round(own[str(cost.context)] / modelled_rate(prefix_prob, single, cost), 5)
        for cost in costs
    }


def modelled_rate(prefix_prob: Tensor, assumed: CostTable, paid: CostTable) -> float:
    """Expected tokens over seconds of rounds `[N, D]` whose lengths are chosen by one cost and paid by another."""
    gain = 1 + prefix_prob.double().cumsum(1)
    choice = (gain - assumed.throughput * curve(assumed)).argmax(1)
    return float(gain.gather(1, choice[:, None]).sum() / (curve(paid)[choice] + paid.fixed_cost).sum())


def curve(cost: CostTable) -> Tensor:
    """`[W-1]`, fp64, seconds at the lengths 2..W without the fixed cost."""
    return torch.tensor(cost.target_cost[2:], dtype=torch.float64)


def request_rates(
    prefix_prob: Tensor, accepted: Tensor, cost: CostTable, new_tokens: int, prior: float | None = PRIOR_TOKENS
) -> Tensor:
    """`[2]`, fp64: tokens and modelled seconds of requests that play recorded rounds one after the other.

    Every request decodes `new_tokens` tokens and begins with rho = `cost.throughput`, which the online estimate of
    `hybridspec_generation.policies.online` follows up if there is a prior.

    Args:
        prefix_prob: `[N, D]`, accepted: `[N]`, of rounds in their order; the last request may be shorter.
        prior: tokens that the first rho counts for; None keeps it.
    """
    gain, seconds = 1 + prefix_prob.double().cumsum(1), curve(cost)
    pooled = torch.zeros(2, dtype=torch.float64)
    begin = torch.tensor([prior or 1.0, (prior or 1.0) / cost.throughput], dtype=torch.float64)
    request = torch.zeros(2, dtype=torch.float64)
    for row, right in zip(gain, accepted, strict=True):
        rho = cost.throughput if prior is None else ((begin + request)[0] / (begin + request)[1])
        choice = (row - rho * seconds).argmax()
        request += torch.stack([right.clamp_max(choice + 1) + 1.0, seconds[choice] + cost.fixed_cost])
        if request[0] >= new_tokens:
            pooled += request
            request = torch.zeros_like(request)
    return pooled + request


def config_gain(config: HybridSpecConfig, context: int | None = None) -> dict[str, float]:
    """`interpolation_gain` of saved tables, over the curve at `context` (None: the shortest) for every context."""
    if config.acceptance is None or not config.acceptance.reference_rounds or not config.costs:
        raise ValueError("The config has no acceptance table with reference_rounds, or no cost. Calibrate first.")
    prefix = torch.tensor(config.acceptance.reference_rounds, dtype=torch.float64)
    costs = [
        cost if cost.throughput else replace(cost, throughput=pooled_throughput(config.acceptance, cost))
        for cost in config.costs
    ]
    return interpolation_gain(prefix, costs, cost_at(costs, context or costs[0].context))
