"""A round learns no length on the host except through its switch, so that graphs can take the switch's place."""

import sys

import pytest
import torch
from support.harness import make_round
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target
from torch import Tensor

from hybridspec_generation.policies import HybridSpecPolicy
from hybridspec_generation.round import run_round
from hybridspec_generation.tables import CostTable, SelectionTables
from hybridspec_hf.calibration.tables import default_tables, fit_experts

READS = ("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__", "cpu")
OURS = ("hybridspec_generation", "hybridspec_kernels", "hybridspec_hf")


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_switch_reads_a_length(family, monkeypatch):
    model = tiny_target(family)
    acceptance, experts = default_tables()
    experts = fit_experts(experts, 16, 3, 4)
    cost = CostTable(target_cost=tuple(0.1 * i for i in range(17)), fixed_cost=1.0, stage0_token_cost=0.05,
                     expert_cost=0.001)  # fmt: skip
    policy = HybridSpecPolicy(SelectionTables.build(acceptance, cost, experts, 1.0, torch.device("cpu")))
    r = make_round(model, tiny_drafter(model), torch.tensor([[3, 4, 5]]), budget=40, policy=policy)
    reads: list[str] = []
    for name in READS:
        monkeypatch.setattr(Tensor, name, recording(name, getattr(Tensor, name), reads))
    with torch.no_grad():
        for _ in range(4):
            run_round(r)
    # one read for Stage 0's length, one for the verification length
    assert reads == ["hybridspec_generation.round.context.__int__"] * 8


def recording(name, original, reads):
    def read(self, *args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] in OURS:
            reads.append(f"{caller}.{name}")
        return original(self, *args, **kwargs)

    return read
