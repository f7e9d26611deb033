"""Fits recover what synthetic rounds were drawn from; tables resize, round-trip and refuse nonsense."""

import json

import numpy as np
import pytest
import torch

from hybridspec_generation import AcceptanceTable, CostTable, ExpertTable, HybridSpecConfig
from hybridspec_generation.config import SelectionTables
from hybridspec_generation.throughput import solve_throughput
from hybridspec_hf.calibration.acceptance import acceptance_quality, fit_acceptance_table
from hybridspec_hf.calibration.capture import CaptureRounds
from hybridspec_hf.calibration.experts import fit_expert_table, routing_correlation
from hybridspec_hf.calibration.tables import default_tables, fit_acceptance, fit_experts

D, W = 15, 16
NAN = float("nan")


def synthetic_rounds(count, seed=0):
    """Rounds whose conditional acceptance is the square of the confidence, with correlated routing."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(count, D, generator=generator).pow(0.3)
    accepted = (torch.rand(count, D, generator=generator) < confidence.square()).int().cumprod(1).sum(1)
    entropy = (1 - confidence) * 3 + 0.01
    new0 = torch.randint(0, 5, (count, W), generator=generator)
    later = 2 * new0 + torch.randint(0, 3, (count, W), generator=generator)
    return CaptureRounds(confidence, entropy, accepted.long(), new0, later)


def test_acceptance_fit_halves_the_calibration_error_on_unseen_rounds():
    table = fit_acceptance_table(synthetic_rounds(4000), "synthetic")
    quality = acceptance_quality(synthetic_rounds(4000, seed=1), table)
    assert quality["ece_table"] < 0.5 * quality["ece_confidence"] and quality["ece_table"] < 0.04
    assert quality["auc_table"] > quality["auc_confidence"] - 0.01
    rows = np.diff(np.array(table.reference_rounds), axis=1)
    assert len(table.reference_rounds) == 256 and (rows <= 0).all()


def test_positions_nobody_reached_take_the_table_before_them():
    rounds = synthetic_rounds(200)
    rounds = rounds._replace(accepted=rounds.accepted.clamp_max(3))
    table = fit_acceptance_table(rounds, "synthetic")
    assert table.confidence_knots[4] == table.confidence_knots[14]
    with pytest.raises(ValueError, match="at least 30"):
        fit_acceptance_table(CaptureRounds(*(part[:20] for part in rounds)), "few")


def test_expert_fit_is_the_cell_mean_or_the_line():
    rounds = synthetic_rounds(3000)
    # n = 4 never occurs at position 3: the line must fill it
    rare = rounds.new_layer0[:, 3] == 4
    rounds = CaptureRounds(*(part[~rare] for part in rounds))
    table = fit_expert_table(rounds, top_k=4, num_moe_layers=8, source="synthetic")
    n = rounds.new_layer0[:, 5]
    for value in range(5):
        want = value + float(rounds.new_later[n == value, 5].float().mean())
        assert table.mean_new_pairs_given[5][value] == pytest.approx(want, abs=1e-3)
    assert table.mean_new_pairs_given[3][4] == pytest.approx(4 + 2 * 4 + 1, abs=0.3)
    assert table.mean_new_pairs[5] == pytest.approx(float((n + rounds.new_later[:, 5]).float().mean()), abs=1e-3)
    assert routing_correlation(rounds) > 0.9


def test_throughput_is_the_best_pooled_rate():
    torch.manual_seed(0)
    prefix = torch.rand(40, D, dtype=torch.float64).pow(0.2).cumprod(1)
    cost = torch.cat([torch.zeros(2), torch.linspace(1.0, 3.0, W - 1)]).double()
    rho = solve_throughput(prefix, cost, 0.5)
    gain = 1 + prefix.cumsum(1)
    for _ in range(300):
        choice = torch.randint(0, W - 1, (40,))
        rate = gain.gather(1, choice[:, None]).sum() / (cost[2:][choice] + 0.5).sum()
        assert rate <= rho + 1e-12
    fixed = max(float(gain[:, w].sum() / (40 * (cost[w + 2] + 0.5))) for w in range(W - 1))
    assert rho >= fixed


def test_config_round_trips_with_every_table(tmp_path):
    acceptance, experts = default_tables()
    cost = CostTable(target_cost=tuple(float(i) for i in range(W + 1)), fixed_cost=1.0, stage0_token_cost=0.1,
                     expert_cost=0.01)  # fmt: skip
    config = HybridSpecConfig(policy="nominal", acceptance=acceptance, experts=experts, cost=cost, throughput=3.5)
    config.save_pretrained(tmp_path)
    assert HybridSpecConfig.from_pretrained(tmp_path) == config
    assert HybridSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(FileNotFoundError, match="hybridspec_config.json"):
        HybridSpecConfig.from_pretrained(tmp_path / "elsewhere")


@pytest.mark.parametrize("values, message", [
    ({"policy": "static:0"}, "static:0"),
    ({"policy": "static:-3"}, "static:-3"),
    ({"policy": "static:four"}, "static:four"),
    ({"policy": ""}, "Unknown policy"),
    ({"throughput": 0.0}, "throughput"),
    ({"throughput": float("nan")}, "throughput"),
    ({"cost": {"target_cost": [0, 0, 1], "fixed_cost": -1, "stage0_token_cost": 0, "expert_cost": 0}}, "fixed_cost"),
    ({"cost": {"target": [1]}}, "unknown keys"),
    ({"cost": 3}, "CostTable"),
    ({"acceptance": {"confidence_knots": [[0, 1]], "acceptance_knots": [[0]], "weights": [0] * 6}}, "rows"),
    ({"experts": {"mean_new_pairs": [0], "mean_new_pairs_given": [[0, 1]], "num_moe_layers": 1, "top_k": 2}}, "top_k"),
    ({"cost": {"target_cost": [0, 0, 1], "fixed_cost": NAN, "stage0_token_cost": 0, "expert_cost": 0}}, "finite"),
    ({"tables": 1}, "unknown keys"),
])  # fmt: skip
def test_config_refuses_nonsense(values, message):
    with pytest.raises(ValueError, match=message):
        HybridSpecConfig.from_dict(values)


@pytest.mark.parametrize("block", [2, 8, 16, 20])
@pytest.mark.parametrize("top_k, layers", [(3, 4), (8, 40), (0, 0), (1, 2)])
def test_shipped_tables_fit_any_pair(block, top_k, layers):
    acceptance, experts = default_tables()
    acceptance, experts = fit_acceptance(acceptance, block), fit_experts(experts, block, top_k, layers)
    cost = CostTable(target_cost=(1.0,) * (block + 1), fixed_cost=1.0, stage0_token_cost=0.0, expert_cost=0.0)
    tables = SelectionTables.build(acceptance, cost, experts, 1.0, torch.device("cpu"))
    assert tables.confidence_knots.shape[0] == block - 1
    assert tables.mean_new_pairs_given.shape == (block + 1, top_k + 1)
    # more new experts never predict fewer pairs by much, and counts stay within the model
    assert (tables.mean_new_pairs <= top_k * layers + 1e-4).all()


def test_tables_of_different_blocks_are_refused():
    acceptance, experts = default_tables()
    cost = CostTable(target_cost=(1.0,) * 9, fixed_cost=1.0, stage0_token_cost=0.0, expert_cost=0.0)
    with pytest.raises(ValueError, match="disagree"):
        SelectionTables.build(acceptance, cost, experts, 1.0, torch.device("cpu"))
    assert isinstance(acceptance, AcceptanceTable) and isinstance(experts, ExpertTable)
