"""Captured rounds -> the lengths that a policy would choose: the policy's own code, without a model or a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec_generation import HybridSpecConfig, RoundState
from hybridspec_generation.policies import FixedLength, LengthPolicy
from hybridspec_generation.tables import SelectionTables

from ..calibration.capture import CaptureRounds
from ..lengths import ADAPTIVE


class Lengths(NamedTuple):
    """Of N rounds, `[N]` each, int64: u, the tokens that Stage 0 runs on, and w, the verification length."""

    stage0: Tensor
    verify: Tensor


def choose_lengths(config: HybridSpecConfig, rounds: CaptureRounds) -> Lengths:
    """Run the policy of a config on every round, without an output budget.

    Args:
        config: with all tables and the throughput, if its policy is adaptive. rounds: N rounds at full length.
    """
    return lengths_of(policy_of(config, rounds.new_layer0.shape[1], top_k_of(rounds)), rounds)


def top_k_of(rounds: CaptureRounds) -> int:
    """Experts of a token in a layer: all those of the anchor are new. 0 without routers or rounds."""
    return int(rounds.new_layer0[:, 0].max()) if len(rounds.accepted) else 0


def lengths_of(policy: LengthPolicy, rounds: CaptureRounds) -> Lengths:
    """Run a policy object on every round, without an output budget."""
    (count, block), top_k = rounds.new_layer0.shape, top_k_of(rounds)
    state = RoundState(
        block=block, hidden_size=0, top_k=top_k, feature_size=0, dtype=torch.float32, device=torch.device("cpu")
    )
    # the reference arithmetic, also where kernels could run
    state.kernels = False
    state.remaining.fill_(2 * block)
    chosen = torch.empty(count, 2, dtype=torch.int64)
    for i in range(count):
        state.confidence.copy_(rounds.confidence[i])
        state.entropy.copy_(rounds.entropy[i])
        policy.select(state)
        if policy.corrects:
            state.boundary.expert_ids.copy_(experts_like(rounds.new_layer0[i], top_k))
        policy.correct(state)
        chosen[i, 0], chosen[i, 1] = state.stage0_length[0], state.verify_length[0]
    return Lengths(chosen[:, 0], chosen[:, 1])


def policy_of(config: HybridSpecConfig, block: int, top_k: int) -> LengthPolicy:
    """The policy object of a config; without routers there is nothing to correct by.

    Raises:
        ValueError: if an adaptive policy lacks a table.
    """
    if not config.is_adaptive:
        return FixedLength(config.fixed_length(block))
    acceptance, experts, throughput = config.acceptance, config.experts, config.throughput
    if acceptance is None or experts is None or throughput is None or len(config.costs) != 1:
        raise ValueError(
            f"policy={config.policy!r} needs acceptance, experts, one cost table and the throughput: calibrate first."
        )
    kind = ADAPTIVE["nominal" if config.policy == "hybridspec" and not top_k else config.policy]
    return kind(SelectionTables.build(acceptance, config.costs[0], experts, throughput, torch.device("cpu")))


def experts_like(new: Tensor, top_k: int) -> Tensor:
    """Expert ids `[W, topk]`, int64, of which token i chooses `new[i]` that no token before it chose.

    A capture keeps the counts only, and the counts are all that the correction reads of the ids.
    """
    known = new.cumsum(0) - new
    slots = torch.arange(top_k)
    # the first slots are new experts, the others the oldest known ones
    return torch.where(slots < new[:, None], known[:, None] + slots, slots - new[:, None])
