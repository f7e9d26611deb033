"""Length policies: the lengths that their kernels write are those of PyTorch, and within the output budget."""

import pytest
import torch

from hybridspec_generation import RoundState
from hybridspec_generation.policies import FixedLength, HybridSpecPolicy, NominalPolicy
from hybridspec_generation.tables import CostTable, SelectionTables
from hybridspec_hf.calibration.tables import default_tables, fit_experts

BLOCK, TOP_K = 16, 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def adaptive(kind):
    acceptance, experts = default_tables()
    cost = CostTable(target_cost=tuple(0.4 * i for i in range(BLOCK + 1)), fixed_cost=1.0, stage0_token_cost=0.05,
                     expert_cost=0.02)  # fmt: skip
    return kind(SelectionTables.build(acceptance, cost, fit_experts(experts, BLOCK, TOP_K, 3), 1.0, DEVICE))


def lengths(policy, state, kernels):
    state.kernels = kernels
    for buffer in (state.nominal_length, state.stage0_length, state.verify_length):
        buffer.fill_(-1)
    policy.select(state)
    policy.correct(state)
    return int(state.nominal_length), int(state.stage0_length), int(state.verify_length), state.prefix_prob.clone()


@pytest.mark.parametrize("name", ["hybridspec", "nominal", "static:5", "full"])
def test_kernels_write_the_lengths_of_pytorch(name):
    pytest.importorskip("triton")
    policy = {"hybridspec": lambda: adaptive(HybridSpecPolicy), "nominal": lambda: adaptive(NominalPolicy),
              "static:5": lambda: FixedLength(5), "full": lambda: FixedLength(BLOCK)}[name]()  # fmt: skip
    state = RoundState(block=BLOCK, hidden_size=8, top_k=TOP_K, feature_size=8, dtype=torch.float32, device=DEVICE)
    seen = set()
    for case in range(40):
        state.remaining.fill_(case if case < 20 else 100)
        state.confidence.copy_(torch.rand(BLOCK - 1).pow(0.1))
        state.entropy.copy_(torch.rand(BLOCK - 1) * 2)
        state.boundary.expert_ids.copy_(torch.stack([torch.randperm(12)[:TOP_K] for _ in range(BLOCK)]))
        *want, want_prefix = lengths(policy, state, kernels=False)
        *got, prefix = lengths(policy, state, kernels=True)
        assert got == want
        torch.testing.assert_close(prefix, want_prefix, rtol=0, atol=1e-6)
        w0, u, w = got
        assert 2 <= w <= u <= max(2, min(int(state.remaining), BLOCK)) and w in (min(w0, u), w0 + 1)
        seen.add((u - w0, w - w0))
    assert len(seen) > (2 if name == "hybridspec" else 1)
