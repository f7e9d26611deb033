"""The top invariant: greedy HybridSpec equals plain generate, token for token, in fp32."""

import pytest
import torch
from support.harness import make_round, plain_text
from support.policies import RandomLengths
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target

from hybridspec_generation import decode
from hybridspec_hf import HybridSpecConfig

POLICIES = ["ar", "full", "nominal", "hybridspec", *(f"static:{n}" for n in range(2, 17))]


def generate(model, drafter, ids, policy, **kwargs):
    options = {"input_ids": ids, "do_sample": False, "generation_mode": "hybridspec", **kwargs}
    if policy != "ar":
        options |= {"assistant_model": drafter, "hybridspec_config": HybridSpecConfig(policy=policy)}
    return model.generate(**options)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    model = tiny_target(request.param)
    return model, tiny_drafter(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_equal_plain_generate(pair, policy):
    model, drafter = pair
    ids = torch.randint(1, 90, (1, 13))
    plain = model.generate(input_ids=ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(generate(model, drafter, ids, policy, max_new_tokens=40), plain)


def test_prompt_lengths_and_budgets(pair):
    model, drafter = pair
    for length in range(1, 41):
        ids = torch.randint(1, 90, (1, length))
        budget = 1 + (length * 7) % 20
        plain = model.generate(input_ids=ids, max_new_tokens=budget, do_sample=False)
        policy = POLICIES[length % len(POLICIES)]
        got = generate(model, drafter, ids, policy, max_new_tokens=budget)
        assert torch.equal(got, plain), (length, budget, policy)


@pytest.mark.parametrize("budget", range(1, 21))
def test_budgets_cut_a_fully_accepted_block(pair, budget):
    model, drafter = pair
    ids = torch.randint(1, 90, (1, 6))
    text = plain_text(model, ids, 60)
    # the prefill emits the first token; rounds get the rest
    r = make_round(model, drafter, ids, budget=budget, script=(text, [15]))
    with torch.no_grad():
        tokens = [t for readout in decode(r) for t in readout.tokens]
    assert tokens == text[7 : 7 + budget]
    assert int(r.state.remaining) == 0 and int(r.cache.length) == 6 + budget


@pytest.mark.parametrize("offset", range(0, 18))
def test_eos_at_every_offset_of_a_block(pair, offset):
    model, drafter = pair
    ids = torch.randint(1, 90, (1, 6))
    text = plain_text(model, ids, 60)
    at = 7 + offset
    eos = text[at]
    first = 7 + text[7:].index(eos)
    never = min(set(range(90)) - set(text))
    r = make_round(model, drafter, ids, budget=50, script=(text, [15]), eos=(never, eos))
    with torch.no_grad():
        readouts = list(decode(r))
    assert [t for readout in readouts for t in readout.tokens] == text[7 : first + 1]
    assert readouts[-1].finished and int(r.cache.length) == first, "state must stop at the token before EOS"


def test_eos_through_generate(pair):
    model, drafter = pair
    ids = torch.randint(1, 90, (1, 6))
    text = plain_text(model, ids, 30)
    for eos in (text[6], text[7], text[15], [text[20], text[25]]):
        plain = model.generate(input_ids=ids, max_new_tokens=30, do_sample=False, eos_token_id=eos)
        for policy in ("ar", "full", "hybridspec", "static:3"):
            got = generate(model, drafter, ids, policy, max_new_tokens=30, eos_token_id=eos)
            assert torch.equal(got, plain), (eos, policy)


def test_second_call_shorter_and_longer(pair):
    model, drafter = pair
    for length, budget in ((35, 60), (3, 9), (21, 30), (1, 2), (40, 200)):
        ids = torch.randint(1, 90, (1, length))
        plain = model.generate(input_ids=ids, max_new_tokens=budget, do_sample=False)
        assert torch.equal(generate(model, drafter, ids, "hybridspec", max_new_tokens=budget), plain)


def test_five_hundred_rounds_of_random_length(pair):
    model, drafter = pair
    rounds = 0
    for seed in range(20):
        ids = torch.randint(1, 90, (1, 1 + seed))
        text = plain_text(model, ids, 130)
        counts = torch.randint(0, 9, (130,)).tolist()
        policy = RandomLengths(seed)
        r = make_round(model, drafter, ids, budget=110, script=(text, counts), policy=policy)
        with torch.no_grad():
            readouts = list(decode(r))
        assert [t for readout in readouts for t in readout.tokens] == text[seed + 2 : seed + 112]
        rounds += len(readouts)
    assert rounds >= 500


@pytest.mark.parametrize("changes", [
    {"block_size": 8},
    {"block_size": 2},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    {"target_layer_ids": [3]},
])  # fmt: skip
def test_other_drafters(pair, changes):
    model, _ = pair
    drafter = tiny_drafter(model, **changes)
    ids = torch.randint(1, 90, (1, 9))
    plain = model.generate(input_ids=ids, max_new_tokens=30, do_sample=False)
    for policy in ("full", "hybridspec", "nominal"):
        assert torch.equal(generate(model, drafter, ids, policy, max_new_tokens=30), plain)
