"""An online rho: the ratio that the rounds so far say, begun anew by every request; the tokens stay the same."""

import pytest
import torch
from support.tiny_models import tiny_drafter, tiny_target

import hybridspec_hf
from hybridspec_generation import CostTable, HybridSpecConfig, RoundState
from hybridspec_generation.policies import HybridSpecPolicy, NominalPolicy
from hybridspec_generation.tables import PRIOR_TOKENS, SelectionTables
from hybridspec_hf.calibration.tables import default_tables, fit_experts
from hybridspec_hf.engine import get_engine

W, RHO = 16, 500.0
COST = CostTable(target_cost=(0.0, 0.0, *(1e-4 * i * i for i in range(15))), fixed_cost=3e-3, stage0_token_cost=0.0,
                 expert_cost=0.0)  # fmt: skip


def make_state():
    state = RoundState(block=W, hidden_size=4, top_k=2, feature_size=4, dtype=torch.float32,
                       device=torch.device("cpu"))  # fmt: skip
    state.start(torch.tensor([1]), [], 1000)
    return state


def make_tables():
    acceptance, experts = default_tables()
    return SelectionTables.build(acceptance, COST, fit_experts(experts, W, 2, 3), RHO, torch.device("cpu"))


@pytest.mark.parametrize("kind", [NominalPolicy, HybridSpecPolicy])
def test_rho_is_what_the_rounds_and_the_prior_say(kind):
    state, tables = make_state(), make_tables()
    policy = kind(tables, online=True)
    policy.select(state)
    assert float(tables.throughput) == pytest.approx(RHO), "nothing is known before the first round"
    tokens, seconds = PRIOR_TOKENS, PRIOR_TOKENS / RHO
    for length, emitted in ((4, 3), (16, 16), (2, 1), (7, 7)):
        state.verify_length.fill_(length)
        state.num_committed.fill_(emitted)
        policy.select(state)
        tokens, seconds = tokens + emitted, seconds + COST.fixed_cost + COST.target_cost[length]
        assert float(tables.throughput) == pytest.approx(tokens / seconds, rel=1e-5)


def test_rho_stays_where_it_is_not_asked_for():
    state, tables = make_state(), make_tables()
    state.verify_length.fill_(4)
    state.num_committed.fill_(3)
    NominalPolicy(tables).select(state)
    assert float(tables.throughput) == RHO


def test_a_round_that_emits_nothing_says_nothing():
    # what the capture of a graph runs
    state, tables = make_state(), make_tables()
    state.verify_length.fill_(9)
    NominalPolicy(tables, online=True).select(state)
    assert tables.observed.tolist() == pytest.approx([PRIOR_TOKENS, PRIOR_TOKENS / RHO])


def test_a_new_request_forgets_the_rounds_of_the_last():
    state = make_state()
    state.num_committed.fill_(5)
    state.start(torch.tensor([1]), [], 10)
    assert int(state.num_committed) == 0


@pytest.mark.parametrize("policy", ["hybridspec", "nominal", "dcut", "full"])
def test_tokens_are_those_of_plain_generate(policy):
    model = tiny_target()
    drafter = tiny_drafter(model)
    ids = torch.randint(1, 90, (1, 9))
    plain = model.generate(input_ids=ids, do_sample=False, max_new_tokens=40)
    rates = []
    for online in (False, True, True):
        config = HybridSpecConfig(policy=policy, cost=COST, throughput=RHO, online_throughput=online)
        out = model.generate(
            input_ids=ids, assistant_model=drafter, generation_mode="hybridspec", do_sample=False,
            max_new_tokens=40, hybridspec_config=config, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, plain)
        policies = get_engine(model, drafter)._idle.policies
        if policy in ("hybridspec", "nominal"):
            kind = "HybridSpecPolicy" if policy == "hybridspec" else "NominalPolicy"
            rates.append(float(policies[kind + " online" * online].tables.throughput))
    noted = any("online_throughput has no effect on" in note for note in out.report.notes)
    assert noted == (not rates)
    if rates:
        # a random drafter is slower than RHO says; the second request begins where the first did
        assert rates[0] == RHO and rates[1] < 0.9 * RHO and rates[1] == rates[2]
    hybridspec_hf.release(model)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["hybridspec", "nominal"])
def test_graphs_choose_the_lengths_of_single_launches(policy):
    model = tiny_target(gain=1.0).to("cuda")
    drafter = tiny_drafter(model, gain=1.0).to("cuda")
    ids = torch.randint(1, 90, (1, 9), device="cuda")
    plain = model.generate(input_ids=ids, do_sample=False, max_new_tokens=60)
    chosen = []
    # the second request of a graph begins where the first did
    for graphs, at_once in (("off", 1), ("per-length", 1), ("parent", 1), ("parent", 4), ("parent", 4)):
        config = HybridSpecConfig(policy=policy, cost=COST, throughput=50 * RHO, online_throughput=True,
                                  graphs=graphs, rounds_per_launch=at_once)  # fmt: skip
        out = model.generate(
            input_ids=ids, assistant_model=drafter, generation_mode="hybridspec", do_sample=False,
            max_new_tokens=60, hybridspec_config=config, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, plain), out.report.launches
        chosen.append(out.report.verify_lengths)
    assert all(lengths == chosen[0] for lengths in chosen)
