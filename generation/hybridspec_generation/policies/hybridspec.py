"""Throughput-aware length selection (Eq. 5), with the routing correction (Eq. 6) or without it (`nominal`)."""

import torch

from hybridspec_kernels import (
    conditional_acceptance_ref,
    correct_length,
    correct_length_ref,
    limit_length_ref,
    new_experts_ref,
    prefix_probabilities_ref,
    select_length,
    select_length_ref,
)

from ..state import RoundState
from ..tables import SelectionTables
from .base import Uncorrected
from .online import observe_round


class NominalPolicy(Uncorrected):
    """The draft-side selector alone: w = w0.

    Args:
        online: re-estimate rho before each round, from those before it.

    Attributes:
        extra_tokens: tokens beyond w0 that Stage 0 processes: 1 with the routing correction, else 0.
    """

    extra_tokens = 0

    def __init__(self, tables: SelectionTables, online: bool = False) -> None:
        self.tables, self.online = tables, online

    def select(self, state: RoundState) -> None:
        """Write prefix probabilities, w0 (Eq. 5) and u."""
        t = self.tables
        if self.online:
            observe_round(t, state)
        acceptance = (t.confidence_knots, t.acceptance_knots, t.acceptance_weights)
        if state.kernels:
            select_length(
                state.confidence, state.entropy, state.remaining, *acceptance, t.target_cost, t.throughput,
                state.prefix_prob, state.nominal_length, state.stage0_length, extra_tokens=self.extra_tokens,
            )  # fmt: skip
            return
        cond_prob = conditional_acceptance_ref(state.confidence, state.entropy, *acceptance)
        state.prefix_prob.copy_(prefix_probabilities_ref(cond_prob))
        state.nominal_length.copy_(select_length_ref(state.prefix_prob, t.target_cost, t.throughput))
        wanted = state.nominal_length + self.extra_tokens
        state.stage0_length.copy_(limit_length_ref(wanted, state.remaining, state.block))


class HybridSpecPolicy(NominalPolicy):
    """The selector, then the routing correction at the router boundary."""

    extra_tokens = 1
    corrects = True

    def correct(self, state: RoundState) -> None:
        """w0, or w0 + 1 (Eq. 6), within the budget."""
        t = self.tables
        signals = (state.nominal_length, state.stage0_length, state.prefix_prob)
        costs = (
            t.target_cost, t.stage0_token_cost, t.expert_cost, t.mean_new_pairs, t.mean_new_pairs_given, t.throughput,
        )  # fmt: skip
        if state.kernels:
            correct_length(*signals, state.boundary.expert_ids, *costs, state.verify_length)
            return
        corrected = correct_length_ref(*signals, new_experts_ref(state.boundary.expert_ids), *costs)
        torch.minimum(corrected, state.stage0_length, out=state.verify_length)
