"""Costs of several contexts: interpolated between them, constant beyond; what that gains in modelled throughput."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridspec_generation import CostTable, HybridSpecConfig, cost_at
from hybridspec_hf.bench.decode_online import online_gain
from hybridspec_hf.bench.example_cost import example_cost
from hybridspec_hf.calibration.gains import config_gain, interpolation_gain, modelled_rate, request_rates
from hybridspec_hf.calibration.tables import default_tables, rho_of


def cost_of(context, scale=1.0, **changes):
    values = {"target_cost": (0.0, 0.0, *(scale * i for i in range(15))), "fixed_cost": 3 * scale,
              "stage0_token_cost": 0.1 * scale, "expert_cost": 0.01 * scale, "context": context, "device": "cpu",
              "throughput": 2 / scale, "measured": ((2.0, 3 * scale),), **changes}  # fmt: skip
    return CostTable(**values)


COSTS = (cost_of(100), cost_of(200, 2.0), cost_of(1000, 4.0))


@pytest.mark.parametrize("context, scale, rho", [
    (1, 1.0, 2.0), (100, 1.0, 2.0), (150, 1.5, 1.5), (200, 2.0, 1.0), (600, 3.0, 0.75), (1000, 4.0, 0.5),
    (10**6, 4.0, 0.5),
])  # fmt: skip
def test_costs_are_linear_between_contexts_and_constant_beyond(context, scale, rho):
    got, want = cost_at(COSTS, context), cost_of(0, scale)
    assert got.target_cost == pytest.approx(want.target_cost) and got.throughput == pytest.approx(rho)
    for name in ("fixed_cost", "stage0_token_cost", "expert_cost"):
        assert getattr(got, name) == pytest.approx(getattr(want, name))
    assert got.context == min(max(context, 100), 1000) and got.measured == ()


def test_a_single_curve_is_for_every_context():
    assert cost_at((COSTS[0],), 10**6) is COSTS[0]


def test_a_rho_that_is_not_known_stays_unknown():
    assert cost_at((replace(COSTS[0], throughput=0.0), COSTS[1]), 150).throughput == 0


def test_config_takes_one_curve_or_several(tmp_path):
    assert HybridSpecConfig().costs == () and HybridSpecConfig(cost=COSTS[0]).costs == COSTS[:1]
    config = HybridSpecConfig(cost=COSTS)
    assert config.costs == COSTS and HybridSpecConfig.from_dict(config.to_dict()) == config
    config.save_pretrained(tmp_path)
    assert HybridSpecConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize("costs, message", [
    ((), "at least one"),
    (COSTS[::-1], "ascending order, got .1000, 200, 100."),
    ((COSTS[0], COSTS[0]), "ascending"),
    ((cost_of(0), COSTS[0]), "known contexts"),
    ((COSTS[0], cost_of(200, device="NVIDIA Some GPU")), "differ in context only"),
    ((COSTS[0], cost_of(200, runtime="replay")), "differ in context only"),
    ((COSTS[0], cost_of(200, target_cost=(0.0,) * 9)), "differ in context only"),
    ((COSTS[0], 3), "CostTable"),
])  # fmt: skip
def test_config_refuses_curves_that_do_not_go_together(costs, message):
    with pytest.raises(ValueError, match=message):
        HybridSpecConfig(cost=costs)


def contexts_of(prefix):
    """A curve whose slope grows threefold from one context to the other."""
    short = example_cost()
    steep = replace(short, target_cost=tuple(3 * c for c in short.target_cost))
    return [replace(cost, context=context, throughput=rho_of(prefix, cost)) for cost, context in
            ((short, 1024), (steep, 32768))]  # fmt: skip


def test_the_curve_of_the_context_gains_where_another_is_wrong():
    acceptance, experts = default_tables()
    prefix = torch.tensor(acceptance.reference_rounds, dtype=torch.float64)
    short, steep = contexts_of(prefix)
    gains = interpolation_gain(prefix, [short, steep], short)
    assert gains["1024"] == 1 and gains["32768"] > 1.005
    # with its own curve a context reaches its rho, the best there is
    assert modelled_rate(prefix, steep, steep) == pytest.approx(steep.throughput)
    # saved without a rho, it is solved
    config = HybridSpecConfig(acceptance=acceptance, cost=(short, replace(steep, throughput=0.0)))
    assert config_gain(config) == gains
    with pytest.raises(ValueError, match="Calibrate first"):
        config_gain(HybridSpecConfig(cost=short))


def test_an_online_rho_recovers_from_a_wrong_one_and_changes_little_otherwise():
    assert online_gain("coding", 2.0, 256) > 1.01
    assert 0.995 < online_gain("coding", 1.0, 256) < 1.01


def test_request_rates_count_what_rounds_emit_and_cost():
    cost = replace(example_cost(), throughput=1e-9)
    prefix, accepted = torch.ones(4, 15), torch.tensor([15, 3, 0, 7])
    tokens, seconds = request_rates(prefix, accepted, cost, 1000, None)
    # without a price on time every round verifies the whole block
    assert tokens == 29 and float(seconds) == pytest.approx(4 * (cost.fixed_cost + cost.target_cost[16]))


def test_the_script_prints_both_gains(tmp_path, monkeypatch, capsys):
    acceptance, _ = default_tables()
    prefix = torch.tensor(acceptance.reference_rounds, dtype=torch.float64)
    HybridSpecConfig(acceptance=acceptance, cost=tuple(contexts_of(prefix))).save_pretrained(tmp_path)
    script = Path(__file__).resolve().parents[2] / "scripts" / "model_throughput.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--wrong", "1", "--new-tokens", "64", "--config", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["online"]["1.0"]) == 7 and result["contexts"]["32768"] > result["contexts"]["1024"] == 1
