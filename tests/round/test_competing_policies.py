"""D-Cut, EVICT and DSpark-style: the lengths of plain loops over the rules, and plain generate's tokens."""

import json
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target

from hybridspec_generation import HybridSpecConfig, RoundState
from hybridspec_generation.config import ADAPTIVE_POLICIES
from hybridspec_generation.policies import DCutPolicy, DSparkPolicy, EvictPolicy
from hybridspec_generation.tables import CostTable, SelectionTables
from hybridspec_hf.calibration.tables import default_tables, fit_acceptance, fit_experts
from hybridspec_hf.lengths import ADAPTIVE

NAMES = ("dcut", "evict", "dspark")
CPU = torch.device("cpu")
# Triton's interpreter runs on the CPU
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAME = (np.array([0.0, 1.0]), np.array([0.0, 1.0]))


def tables_of(cost, fixed, knots=None, device=CPU):
    """Selection tables, fp64 on the CPU; knots: D pairs of confidences and calibrated values, or the shipped ones."""
    block = len(cost) - 1
    acceptance, experts = default_tables()
    tables = SelectionTables.build(
        fit_acceptance(acceptance, block),
        CostTable(target_cost=tuple(cost), fixed_cost=fixed, stage0_token_cost=0.0, expert_cost=0.0),
        fit_experts(experts, block, 3, 4), 1.0, device,
    )  # fmt: skip
    if knots is not None:
        x, y = (torch.tensor(np.stack(part)) for part in zip(*knots, strict=True))
        tables = tables._replace(confidence_knots=x, acceptance_knots=y)
    if device == CPU:
        tables = tables._replace(target_cost=torch.tensor(cost).double(), fixed_cost=torch.tensor([fixed]).double())
    return tables


def round_state(block, confidence, remaining, dtype=torch.float64, device=CPU):
    state = RoundState(block=block, hidden_size=8, top_k=4, feature_size=8, dtype=torch.float32, device=device)
    state.confidence = torch.tensor(confidence, dtype=dtype, device=device)
    state.prefix_prob = torch.zeros(block - 1, dtype=dtype, device=device)
    state.remaining.fill_(remaining)
    for length in (state.nominal_length, state.stage0_length, state.verify_length):
        length.fill_(-1)
    return state


def lengths(policy, state):
    policy.select(state)
    policy.correct(state)
    return int(state.nominal_length), int(state.stage0_length), int(state.verify_length)


def ratios(confidence, cost, fixed, anchor=1):
    """{length: tokens a second}, one product and one sum at a time."""
    scores, prefix, tokens = {}, 1.0, float(anchor)
    for w in range(2, len(cost)):
        prefix *= confidence[w - 2]
        tokens += prefix
        scores[w] = tokens / (fixed + cost[w])
    return scores


def best_of(scores, allowed):
    best = allowed[0]
    for w in allowed:
        if scores[w] > scores[best]:
            best = w
    return best


def dcut_by_loop(confidence, cost, fixed, knots, anchor=1):
    block = len(cost) - 1
    allowed = sorted({max(2, math.ceil(block * q / 4)) for q in (1, 2, 3, 4)})
    return best_of(ratios(confidence, cost, fixed, anchor), allowed)


def evict_by_loop(confidence, cost, fixed, knots):
    return best_of(ratios(confidence, cost, fixed), range(2, len(cost)))


def dspark_by_loop(confidence, cost, fixed, knots):
    calibrated = [float(np.interp(c, *row)) for c, row in zip(confidence, knots, strict=True)]
    scores, w = ratios(calibrated, cost, fixed), 2
    while w + 1 < len(cost) and scores[w + 1] > scores[w]:
        w += 1
    return w


RULES = {
    "dcut": (DCutPolicy, dcut_by_loop),
    "dcut without the anchor": (partial(DCutPolicy, anchor_tokens=0), partial(dcut_by_loop, anchor=0)),
    "evict": (EvictPolicy, evict_by_loop),
    "dspark": (DSparkPolicy, dspark_by_loop),
}


def random_case(rng, case):
    """Confidences, costs, fixed cost and calibration; every other case is exact in binary and full of ties."""
    block = (16, 16, 16, 8, 5, 2, 20, 3)[case // 2 % 8]
    if case % 2:
        # equal ratios: as many tokens as time, a step that gains nothing and costs nothing
        confidence = [rng.choice((1.0, 1.0, 1.0, 0.5, 0.0)) for _ in range(block - 1)]
        cost = [0.0, 0.0, *sorted(rng.choice((0.0, 0.5, 1.0)) * w for w in range(block - 1))]
        return confidence, cost, rng.choice((1.0, 2.0)), [SAME] * (block - 1)
    sharp = rng.choice((0.05, 0.2, 1.0))
    confidence = [rng.random() ** sharp for _ in range(block - 1)]
    slope = rng.choice((0.03, 0.1, 0.3))
    cost = [0.0, 0.0, *np.cumsum([slope * rng.random() for _ in range(block - 1)]).tolist()]
    knots = [(np.sort([rng.random() for _ in range(6)]), np.sort([rng.random() ** sharp for _ in range(6)]))
             for _ in range(block - 1)]  # fmt: skip
    return confidence, cost, rng.random() + 0.1, knots


@pytest.mark.parametrize("name", RULES)
def test_lengths_are_those_of_a_loop(name):
    (kind, loop), rng, seen, cut = RULES[name], random.Random(0), set(), 0
    for case in range(400):
        confidence, cost, fixed, knots = random_case(rng, case)
        policy, block = kind(tables_of(cost, fixed, knots)), len(cost) - 1
        want = loop(confidence, cost, fixed, knots)
        remaining = rng.choice((0, 1, 2, 3, 5, 9, 15, 16, 17, 1000))
        limited = min(want, max(2, min(remaining, block)))
        assert lengths(policy, round_state(block, confidence, remaining)) == (want, limited, limited), case
        seen.add((block, want))
        cut += limited < want
    assert {w for block, w in seen if block == 16} >= ({4, 8, 12, 16} if "dcut" in name else {2, 3, 5, 16})
    assert cut > 20
    if "dcut" in name:
        assert {w for block, w in seen if block == 16} == {4, 8, 12, 16}
        assert {w for block, w in seen if block == 5} <= {2, 3, 4, 5}


def test_the_rules_differ_where_they_should():
    # ratios 1, 0.9, 1.2: early stop sees the dip only; D-Cut may not take 3; the anchor favours short inputs
    confidence = [1.0] * 15
    cost = [0.0, 0.0, 0.0, 1.4, *(0.1 * w for w in range(13, 26))]
    tables = tables_of(cost, 2.0, [SAME] * 15)
    state = round_state(16, confidence, 100)
    assert lengths(DSparkPolicy(tables), state)[0] == 2
    assert lengths(EvictPolicy(tables), state)[0] == lengths(DCutPolicy(tables), state)[0] == 16
    confidence = [0.5] * 15
    state = round_state(16, confidence, 100)
    tables = tables_of([0.0, 0.0, *(0.09 * w for w in range(15))], 1.0)
    assert lengths(DCutPolicy(tables), state)[0] == 4
    tables = tables_of([0.0, 0.0, *(0.017 * w for w in range(15))], 1.0)
    assert lengths(DCutPolicy(tables, anchor_tokens=0), state)[0] > lengths(DCutPolicy(tables), state)[0]


@pytest.mark.parametrize("name", RULES)
def test_kernels_write_the_lengths_of_pytorch(name, monkeypatch):
    pytest.importorskip("triton")
    rng, cut = random.Random(0), 0
    for case in range(40):
        confidence, cost, fixed, knots = random_case(rng, case)
        tables = SelectionTables(*(t.float().to(DEVICE) for t in tables_of(cost, fixed, knots)))
        policy, remaining = RULES[name][0](tables), rng.choice((0, 3, 9, 1000))
        state = round_state(len(confidence) + 1, confidence, remaining, torch.float32, DEVICE)
        state.kernels = False
        want, want_prefix = lengths(policy, state), state.prefix_prob.clone()
        state.prefix_prob.fill_(math.nan)
        state.kernels = True
        with monkeypatch.context() as patch:
            patch.delattr("hybridspec_generation.policies.ratio.select_ratio_ref")
            assert lengths(policy, state) == want
        torch.testing.assert_close(state.prefix_prob, want_prefix, rtol=0, atol=1e-6)
        cut += want[1] < want[0]
    assert cut


@pytest.mark.parametrize("name", NAMES)
def test_estimates_are_written(name):
    confidence = [0.9, 0.8, 0.3]
    knots = [(np.array([0.0, 1.0]), np.array([0.0, 0.5]))] * 3
    state = round_state(4, confidence, 100)
    lengths(ADAPTIVE[name](tables_of([0.0, 0.0, 0.1, 0.2, 0.3], 1.0, knots)), state)
    want = torch.tensor(confidence).double() * (0.5 if name == "dspark" else 1.0)
    torch.testing.assert_close(state.prefix_prob, want.cumprod(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_confidences_give_a_valid_length(name, bad):
    cost = [0.0, 0.0, *(0.01 * w for w in range(15))]
    policy = ADAPTIVE[name](tables_of(cost, 1.0))
    for at in range(15):
        for last in (at + 1, 15):
            confidence = [1.0] * at + [bad] * (last - at) + [0.9] * (15 - last)
            for remaining in (0, 7, 100):
                w0, u, w = lengths(policy, round_state(16, confidence, remaining, torch.float32))
                assert 2 <= w0 <= 16 and 2 <= w == u == min(w0, max(2, remaining))
                if math.isnan(bad):
                    # a token whose confidence is NaN is not verified, beyond the shortest length
                    assert w0 <= max(4 if name == "dcut" else 2, at + 1)


@pytest.mark.parametrize("name", NAMES)
def test_free_lengths_are_no_error(name):
    """Costs of zero make ratios infinite and equal."""
    policy = ADAPTIVE[name](tables_of([0.0] * 17, 0.0))
    assert lengths(policy, round_state(16, [0.9] * 15, 100))[0] == (4 if name == "dcut" else 2)


@pytest.mark.parametrize("block", [2, 16])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_on_the_host(name, block):
    """Meta tensors have no values: whatever needs one, for a decision or a shape, fails."""
    meta = torch.device("meta")
    policy = ADAPTIVE[name](tables_of([0.0, 0.0, *(0.1 * w for w in range(block - 1))], 1.0, device=meta))
    state = RoundState(block=block, hidden_size=8, top_k=4, feature_size=8, dtype=torch.float32, device=meta)
    policy.select(state)
    policy.correct(state)
    assert not policy.corrects


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    model = tiny_target(request.param)
    return model, tiny_drafter(model)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_plain_generate(pair, name):
    model, drafter = pair
    cost = {"target_cost": [0.0, 0.0, *(0.001 * w for w in range(15))], "fixed_cost": 1.0, "stage0_token_cost": 0.0,
            "expert_cost": 0.0}  # fmt: skip
    # a measured cost, and one that makes long inputs worth their time
    for config in (HybridSpecConfig(policy=name), HybridSpecConfig(policy=name, cost=cost)):
        for length, budget in ((13, 40), (3, 9), (1, 2)):
            ids = torch.randint(1, 90, (1, length))
            plain = model.generate(input_ids=ids, max_new_tokens=budget, do_sample=False)
            out = model.generate(
                input_ids=ids, max_new_tokens=budget, do_sample=False, generation_mode="hybridspec",
                assistant_model=drafter, hybridspec_config=config, return_dict_in_generate=True,
            )  # fmt: skip
            assert torch.equal(out.sequences, plain)
            report = out.report
            assert report.policy == name and report.verify_lengths == report.stage0_lengths
            assert name != "dcut" or set(report.nominal_lengths) <= {4, 8, 12, 16}


@pytest.mark.parametrize("name", NAMES)
def test_config_round_trips(name, tmp_path):
    config = HybridSpecConfig(policy=name, gdn_backend="replay")
    assert config.is_adaptive
    config.save_pretrained(tmp_path)
    assert HybridSpecConfig.from_pretrained(tmp_path) == config
    assert HybridSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", ["Dcut", "d-cut", "evict ", "dspark:2", "sequoia"])
def test_unknown_names_are_refused_with_the_full_list(name):
    with pytest.raises(ValueError, match="Unknown policy") as error:
        HybridSpecConfig(policy=name)
    for known in (*ADAPTIVE_POLICIES, "full", "static:N"):
        assert f'"{known}"' in str(error.value)


def test_every_adaptive_name_has_a_class():
    assert set(ADAPTIVE) == set(ADAPTIVE_POLICIES)
