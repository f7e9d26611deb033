"""Prefix probabilities + target cost curve -> nominal verification length (Eq. 5)."""

import torch
from torch import Tensor


def select_length_ref(prefix_prob: Tensor, target_cost: Tensor, throughput: Tensor) -> Tensor:
    """The length in 2..W with the best score `1 + sum_{i<w} p_i - rho * C_tgt(w)`; ties go to the shorter.

    Args:
        prefix_prob: `[D]`.
        target_cost: `[W+1]`, seconds at each length (index = length; 0 and 1 are not looked at), W = D+1.
        throughput: `[1]`, rho, tokens per second.

    Returns:
        `[1]`, int32, on the device of the inputs.
    """
    gain = 1 + prefix_prob.cumsum(0)
    score = gain - throughput * target_cost[2:]
    # argmax returns any maximum: the first one is the shorter length
    first = (score == score.max()).to(torch.int32).argmax(0, keepdim=True)
    return (first + 2).to(torch.int32)
