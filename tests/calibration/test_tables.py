"""Fits recover what synthetic rounds were drawn from; tables resize, round-trip and refuse nonsense."""

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hybridspec_generation import CalibratedFor, CostTable, HybridSpecConfig
from hybridspec_generation.tables import SelectionTables
from hybridspec_generation.throughput import solve_throughput
from hybridspec_hf.calibration.acceptance import acceptance_quality, fit_acceptance_table
from hybridspec_hf.calibration.capture import CaptureRounds
from hybridspec_hf.calibration.experts import fit_expert_table, routing_correlation
from hybridspec_hf.calibration.tables import choose_tables, default_tables, fit_acceptance, fit_experts
from hybridspec_hf.identity import PairIdentity

D, W = 15, 16
NAN = float("nan")
TEXTS = ("source", "device", "runtime")
OPTIONAL = ("reference_rounds", "context", "throughput", "measured")


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
    *(({"policy": policy}, "Unknown policy") for policy in (
        "", "static:", "static:1", "static:02", "static:16 ", " static:4", "STATIC:4", "static:4.0", "static:4:5",
        "static:²", "static:٤", "static:+4", "static:1_0", "static:4\n", "Full", "ar", "hybridspec ", None, 4, True,
        ["full"],
    )),
    ({"online_throughput": 1}, "online_throughput must be True or False"),
    ({"calibrated_for": {"target": "a"}}, "CalibratedFor .*misses .*drafter"),
    ({"calibrated_for": 3}, "CalibratedFor"),
    *(({"throughput": rho}, "throughput") for rho in (-1, "5", True, math.inf, [3.0])),
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
@pytest.mark.parametrize("top_k, layers", [(3, 4), (8, 40), (0, 0), (0, 3), (1, 2)])
def test_shipped_tables_fit_any_pair(block, top_k, layers):
    acceptance, experts = default_tables()
    acceptance, experts = fit_acceptance(acceptance, block), fit_experts(experts, block, top_k, layers)
    cost = CostTable(target_cost=(1.0,) * (block + 1), fixed_cost=1.0, stage0_token_cost=0.0, expert_cost=0.0)
    tables = SelectionTables.build(acceptance, cost, experts, 1.0, torch.device("cpu"))
    assert tables.confidence_knots.shape[0] == block - 1
    assert tables.mean_new_pairs_given.shape == (block + 1, top_k + 1)
    # more new experts never predict fewer pairs by much, and counts stay within the model
    assert (tables.mean_new_pairs <= top_k * layers + 1e-4).all()


PAIR = SimpleNamespace(top_k=3, num_moe_layers=4)


def tables_for(block, top_k=3, layers=4):
    acceptance, experts = default_tables()
    cost = CostTable(target_cost=(1.0,) * (block + 1), fixed_cost=1.0, stage0_token_cost=0.0, expert_cost=0.0,
                     measured=((2.0, 1.0),))  # fmt: skip
    return {
        "acceptance": fit_acceptance(acceptance, block),
        "experts": fit_experts(experts, block, top_k, layers),
        "cost": cost,
    }


@pytest.mark.parametrize("wrong, message", [
    ({"acceptance": tables_for(8)["acceptance"]}, "acceptance table .* block of 8"),
    ({"experts": tables_for(8)["experts"]}, "experts table .* block of 8"),
    ({"cost": tables_for(8)["cost"]}, "cost table .* block of 8"),
    (tables_for(20), "block of 20"),
    ({"experts": tables_for(W, top_k=5)["experts"]}, "top_k=5"),
    ({"experts": tables_for(W, layers=99)["experts"]}, "99 MoE layers"),
    ({"acceptance": replace(tables_for(W)["acceptance"], reference_rounds=())}, "reference_rounds"),
])  # fmt: skip
def test_tables_of_another_pair_are_refused(wrong, message):
    good = tables_for(W)
    assert choose_tables(HybridSpecConfig(**good), PAIR, W).notes == []
    with pytest.raises(ValueError, match=message):
        choose_tables(HybridSpecConfig(**{**good, **wrong}), PAIR, W)


MADE_FOR = CalibratedFor(target="a", drafter="b", prompts="c", target_weights="d", drafter_weights="e", hardware="f",
                         versions="g", date="h")  # fmt: skip


@pytest.mark.parametrize("top_k, layers", [(3, 4), (5, 9), (0, 4)])
def test_experts_of_another_pair_are_scaled_to_this_target(top_k, layers):
    given = HybridSpecConfig(**tables_for(W, top_k, layers), calibrated_for=MADE_FOR)
    target = SimpleNamespace(**vars(PAIR), cache_shape=SimpleNamespace(device=torch.device("cpu")))
    tables = choose_tables(given, target, W, PairIdentity("d", "other"))
    assert (tables.experts.top_k, tables.experts.num_moe_layers) == (3, 4) and tables.acceptance == given.acceptance
    assert tables.costs == () and "another pair" in tables.notes[0]
    if top_k:
        assert tables.experts == fit_experts(given.experts, W, 3, 4) and len(tables.notes) == 1
    else:
        # dense: nothing was counted
        assert tables.notes[1].startswith("experts: shipped default")
    same = HybridSpecConfig(**tables_for(W), calibrated_for=MADE_FOR)
    assert choose_tables(same, target, W, PairIdentity("d", "e")).notes == []


@pytest.mark.parametrize("top_k, told", [(3, True), (0, False)])
def test_only_a_target_with_experts_is_told_whose_table_it_takes(top_k, told):
    target = SimpleNamespace(top_k=top_k, num_moe_layers=4 if top_k else 0)
    notes = choose_tables(HybridSpecConfig(), target, W).notes
    assert any(note.startswith("experts: shipped default") for note in notes) is told


def test_rho_of_costs_that_are_measured_again_is_kept_where_none_can_be_solved():
    given = tables_for(W)
    acceptance = replace(given["acceptance"], reference_rounds=())
    cost = replace(given["cost"], device="NVIDIA Some GPU", throughput=7.0)
    target = SimpleNamespace(**vars(PAIR), cache_shape=SimpleNamespace(device=torch.device("cpu")))
    for config, rho in (
        (HybridSpecConfig(acceptance=acceptance, cost=cost), 7.0),
        (HybridSpecConfig(acceptance=acceptance, cost=cost, throughput=5.0), 5.0),
        (HybridSpecConfig(cost=cost, throughput=5.0), None),
    ):
        tables = choose_tables(config, target, W)
        assert (tables.costs, tables.throughput) == ((), rho)


def test_notes_name_the_shipped_tables_only():
    notes = {name: choose_tables(HybridSpecConfig(**{name: t}), PAIR, W).notes for name, t in tables_for(W).items()}
    assert [note.partition(":")[0] for note in notes["cost"]] == ["acceptance", "experts"]
    assert notes["acceptance"] == notes["cost"][1:] and notes["experts"] == notes["cost"][:1]


def numbers_of(table):
    """Field names of a table and its values as JSON gives them."""
    return json.loads(json.dumps(asdict(table)))


def with_leaf(value, leaf):
    """`value` with the last number inside replaced."""
    return [*value[:-1], with_leaf(value[-1], leaf)] if isinstance(value, list) else leaf


@pytest.mark.parametrize("kind", ["acceptance", "experts", "cost"])
def test_every_number_of_a_table_must_be_there_and_finite(kind):
    good = numbers_of(tables_for(W)[kind])
    assert HybridSpecConfig(**{kind: good}) == HybridSpecConfig(**{kind: tables_for(W)[kind]})
    for name, value in good.items():
        bad = (
            [None, {}, b"1"]
            if name in TEXTS
            else [with_leaf(value, x) for x in (None, "1", True, NAN, math.inf, -(10**400))]
        )
        for broken in bad:
            with pytest.raises(ValueError, match=f"{name} must"):
                HybridSpecConfig(**{kind: {**good, name: broken}})
        if name not in (*TEXTS, *OPTIONAL):
            with pytest.raises(ValueError, match=f"misses .*{name}"):
                HybridSpecConfig(**{kind: {k: v for k, v in good.items() if k != name}})


@pytest.mark.parametrize("kind, changes, message", [
    ("cost", {"stage0_token_cost": -1e-9}, ">= 0"),
    ("cost", {"expert_cost": -1.0}, ">= 0"),
    ("cost", {"context": -1}, "context must be a whole number"),
    ("cost", {"context": 1.5}, "context must be a whole number"),
    ("cost", {"throughput": -1.0}, "throughput must be .* >= 0"),
    ("cost", {"target_cost": (0.0, -1.0) + (1.0,) * D}, ">= 0"),
    *(("cost", {"measured": ((2.0, 1.0), row)}, "measured needs pairs")
      for row in ((), (2.0,), (2.0, 1.0, 1.0), (0.0, 1.0), (W + 0.1, 1.0), (2.0, -1.0))),
    ("acceptance", {"confidence_knots": ((1.0, 0.0),) * D, "acceptance_knots": ((0.0, 1.0),) * D}, "ascend"),
    ("acceptance", {"confidence_knots": ((0.0, 1.0),) * D, "acceptance_knots": ((0.0, 50.0),) * D}, "in \\[0, 1\\]"),
    ("acceptance", {"confidence_knots": ((0.0, 1.0),) * D, "acceptance_knots": ((-0.1, 1.0),) * D}, "in \\[0, 1\\]"),
    ("acceptance", {"confidence_knots": (), "acceptance_knots": ()}, "rows"),
    ("acceptance", {"reference_rounds": ((0.5,) * D, (0.5,) * 3)}, "reference_rounds"),
    ("acceptance", {"weights": (0.0,) * 5}, "6 numbers"),
    *(("acceptance", {"reference_rounds": ((0.5,) * (D - 1) + (value,),)}, "reference_rounds .*in \\[0, 1\\]")
      for value in (-0.1, 1.1)),
    *(("experts", {name: value}, f"{name} must be a whole number")
      for name in ("num_moe_layers", "top_k") for value in (-1, 1.5, 3.0, True, (3,))),
])  # fmt: skip
def test_tables_refuse_numbers_without_meaning(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(tables_for(W)[kind], **changes)


@pytest.mark.parametrize("hashes", [(-1,), (2**48,), (1, 2.5), (NAN,), ("a",), 3, ((1,),)])
def test_hashes_of_prompts_are_whole_numbers(hashes):
    with pytest.raises(ValueError, match="prompt_hashes must"):
        replace(MADE_FOR, prompt_hashes=hashes)


def nested(depth):
    """A list in a list in a list, ..."""
    value: object = 1.0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("kind, name, depth", [
    ("acceptance", "confidence_knots", 2), ("acceptance", "acceptance_knots", 2), ("acceptance", "weights", 1),
    ("acceptance", "reference_rounds", 2), ("cost", "target_cost", 1), ("cost", "fixed_cost", 0),
    ("cost", "throughput", 0), ("cost", "context", 0), ("cost", "measured", 2), ("experts", "mean_new_pairs", 1),
    ("experts", "mean_new_pairs_given", 2), ("experts", "num_moe_layers", 0),
])  # fmt: skip
def test_tables_of_another_depth_are_refused(kind, name, depth):
    good = numbers_of(tables_for(W)[kind])
    for other in {0, 1, 2, 3, 100_000} - {depth}:
        with pytest.raises(ValueError, match=f"{name} must"):
            HybridSpecConfig(**{kind: {**good, name: nested(other)}})


def test_a_second_wrong_pair_is_told_too():
    given = HybridSpecConfig(**tables_for(W), calibrated_for=replace(MADE_FOR, target="told"))
    target = SimpleNamespace(**vars(PAIR), cache_shape=SimpleNamespace(device=torch.device("cpu")))
    for pair in (PairIdentity("first", "e"), PairIdentity("second", "e")):
        with pytest.warns(
            UserWarning, match=f"target told .*another pair, or another dtype of it .target {pair.target}, drafter e"
        ):
            choose_tables(given, target, W, pair)
