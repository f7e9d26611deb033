"""Throughput-aware length selection (Eq. 5), with the routing correction (Eq. 6) or without it (`nominal`)."""

from torch import Tensor

from hybridspec_kernels import (
    conditional_acceptance_ref,
    correct_length_ref,
    new_experts_ref,
    prefix_probabilities_ref,
    select_length_ref,
)

from ..config import SelectionTables
from ..state import RoundState


class NominalPolicy:
    """The draft-side selector alone: w = w0."""

    extra_tokens = 0

    def __init__(self, tables: SelectionTables) -> None:
        self.tables = tables

    def select(self, state: RoundState) -> None:
        """Write prefix probabilities and w0 (Eq. 5)."""
        t = self.tables
        cond_prob = conditional_acceptance_ref(
            state.confidence, state.entropy, t.confidence_knots, t.acceptance_knots, t.acceptance_weights
        )
        state.prefix_prob.copy_(prefix_probabilities_ref(cond_prob))
        state.nominal_length.copy_(select_length_ref(state.prefix_prob, t.target_cost, t.throughput))

    def correct(self, state: RoundState) -> Tensor:
        """Keep w0."""
        return state.nominal_length


class HybridSpecPolicy(NominalPolicy):
    """The selector, then the routing correction at the router boundary."""

    extra_tokens = 1

    def correct(self, state: RoundState) -> Tensor:
        """w0, or w0 + 1 (Eq. 6)."""
        t = self.tables
        state.new_experts.copy_(new_experts_ref(state.boundary.expert_ids))
        return correct_length_ref(
            state.nominal_length,
            state.stage0_length,
            state.prefix_prob,
            state.new_experts,
            t.target_cost,
            t.stage0_token_cost,
            t.expert_cost,
            t.mean_new_pairs,
            t.mean_new_pairs_given,
            t.throughput,
        )
