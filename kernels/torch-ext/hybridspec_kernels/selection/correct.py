"""Router boundary -> corrected verification length: the routing correction (Eq. 6)."""

import torch
from torch import Tensor


def new_experts_ref(expert_ids: Tensor) -> Tensor:
    """How many experts each token adds to those of the tokens before it: U_0(i+1) - U_0(i).

    Args:
        expert_ids: `[W, topk]`, integer, distinct within a row.

    Returns:
        `[W]`, int32.
    """
    same = expert_ids[:, :, None, None] == expert_ids[None, None, :, :]
    earlier = torch.ones(len(expert_ids), len(expert_ids), dtype=torch.bool, device=expert_ids.device).tril(-1)
    seen = (same & earlier[:, None, :, None]).flatten(2).any(-1)
    return (~seen).sum(1, dtype=torch.int32)


def correct_length_ref(
    nominal_length: Tensor,
    stage0_length: Tensor,
    prefix_prob: Tensor,
    new_experts: Tensor,
    target_cost: Tensor,
    stage0_token_cost: Tensor,
    expert_cost: Tensor,
    mean_new_pairs: Tensor,
    mean_new_pairs_given: Tensor,
    throughput: Tensor,
) -> Tensor:
    """Keep the extra Stage-0 token iff `p_{w0} > rho * dL_c` (Eq. 6).

    Args:
        nominal_length, stage0_length: `[1]`, integer: w0 and u. Without u = w0 + 1 there is no extra token.
        prefix_prob: `[D]`. new_experts: `[W]`, integer; rows from u on are ignored.
        target_cost: `[W+1]`, seconds. stage0_token_cost, expert_cost: `[1]`, seconds (s and eta).
        mean_new_pairs: `[W+1]`; mean_new_pairs_given: `[W+1, topk+1]` (nbar_all(w0), nbar_all(w0 | n)), index = w0.
        throughput: `[1]`, rho, tokens per second.

    Returns:
        w_c, `[1]`, int32.
    """
    w0 = nominal_length.long()
    longest = len(target_cost) - 1
    extra_row = w0.clamp_max(longest - 1)
    new = new_experts.index_select(0, extra_row).long().clamp(0, mean_new_pairs_given.shape[1] - 1)
    pairs = mean_new_pairs_given.index_select(0, w0).gather(1, new[:, None])[:, 0] - mean_new_pairs[w0]
    step = target_cost[(w0 + 1).clamp_max(longest)] - target_cost[w0]
    extra_latency = step - stage0_token_cost + expert_cost * pairs
    worth = prefix_prob.index_select(0, (w0 - 1).clamp_max(len(prefix_prob) - 1)) > throughput * extra_latency
    covered = stage0_length == nominal_length + 1
    return nominal_length + (worth & covered).to(torch.int32)
