"""Prefix probabilities of many rounds + cost curve -> pooled throughput rho (Eq. 4, Dinkelbach's iteration)."""

from torch import Tensor


def solve_throughput(prefix_prob: Tensor, target_cost: Tensor, fixed_cost: float, *, iterations: int = 100) -> float:
    """The fixed point rho = sum of expected tokens / sum of cost when every round picks its length by Eq. 5 with rho.

    Args:
        prefix_prob: `[N, D]`, prefix probabilities of N rounds.
        target_cost: `[W+1]`, seconds by length. fixed_cost: seconds of a round that do not depend on its length.

    Returns:
        rho in tokens per second.
    """
    prefix_prob, target_cost = prefix_prob.double(), target_cost.double()
    gain = 1 + prefix_prob.cumsum(1)  # [N, W-1], lengths 2..W
    cost = target_cost[2:]
    rho = 0.0
    for _ in range(iterations):
        choice = (gain - rho * cost).argmax(1)
        tokens = gain.gather(1, choice[:, None]).sum()
        updated = float(tokens / (cost[choice] + fixed_cost).sum())
        if abs(updated - rho) <= 1e-12 * updated:
            return updated
        rho = updated
    return rho
