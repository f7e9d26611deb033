"""After every round each cache equals the one a fresh prefill of the committed tokens gives."""

import pytest
import torch
from support.harness import CAPACITY, filled_cache, make_round, plain_text, real_drafter
from support.policies import RandomLengths
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target

from hybridspec_generation import decode
from hybridspec_generation.round import run_round
from hybridspec_hf.drafters.block import BlockDrafter, DraftContext
from hybridspec_hf.models import split_target

TOLERANCE = 1e-5


def relative(got, want):
    return float((got - want).norm() / want.norm().clamp_min(1e-12))


def assert_equals_fresh_prefill(r, model, drafter, committed):
    """K/V, convolution windows, states and drafter context against a prefill of `committed`."""
    n = len(committed)
    assert int(r.cache.length) == n
    context = DraftContext.allocate(drafter, CAPACITY)
    fresh_drafter = BlockDrafter(drafter, r.target.embed_tokens, r.target.lm_head, context)
    fresh, anchor = filled_cache(model, r.target, torch.tensor([committed]), fresh_drafter, r.state.block)
    kept = real_drafter(r)
    pairs = {
        "keys": (r.cache.keys[:, :, :n], fresh.keys[:, :, :n]),
        "values": (r.cache.values[:, :, :n], fresh.values[:, :, :n]),
        "states": (r.cache.gdn.states(), fresh.gdn.states()),
        "conv": (r.cache.gdn.windows(), fresh.gdn.windows()),
        "draft keys": (kept.keys[:, :, :, :n], fresh_drafter.keys[:, :, :, :n]),
        "draft values": (kept.values[:, :, :, :n], fresh_drafter.values[:, :, :, :n]),
    }
    for name, (got, want) in pairs.items():
        for layer in range(len(got)):
            assert relative(got[layer], want[layer]) <= TOLERANCE, (name, layer, relative(got[layer], want[layer]))
    assert int(anchor) == int(r.state.anchor)


# narrow weights and heads of 32: nothing amplifies rounding from layer to layer, so the bound speaks of the commit
CALM = {"gain": 0.5, "hidden_size": 64, "linear_key_head_dim": 32}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt_length", [1, 2, 3, 7])
def test_caches_equal_fresh_prefill_for_every_accept_count(family, prompt_length):
    model = tiny_target(family, **CALM)
    drafter = tiny_drafter(model, gain=0.5)
    prompt = torch.randint(1, 90, (1, prompt_length))
    text = plain_text(model, prompt, 180)
    counts = torch.randperm(16).tolist()
    r = make_round(model, drafter, prompt, budget=150, script=(text, counts))
    with torch.no_grad():
        for round_index, accepted in enumerate(counts[:15]):
            before, start = r.cache.gdn.conv.clone(), int(r.cache.length)
            run_round(r)
            assert int(r.state.num_accepted) == accepted, round_index
            assert_equals_fresh_prefill(r, model, drafter, text[: start + accepted + 1])
            taps = r.cache.gdn.shape.taps
            # bytes: the window is the last rows of (old window, committed inputs), moved and never recomputed
            rows = torch.cat([before[:, : taps - 1], r.cache.gdn.conv[:, taps - 1 :]], dim=1)
            assert torch.equal(r.cache.gdn.windows(), rows[:, accepted + 1 : accepted + taps])


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_stay_equal_over_random_lengths(family):
    model = tiny_target(family, **CALM)
    drafter = tiny_drafter(model, gain=0.5)
    prompt = torch.randint(1, 90, (1, 5))
    text = plain_text(model, prompt, 240)
    counts = torch.randint(0, 7, (60,)).tolist()
    r = make_round(model, drafter, prompt, budget=200, script=(text, counts), policy=RandomLengths(3))
    with torch.no_grad():
        for i, readout in enumerate(decode(r)):
            assert readout.num_accepted == min(counts[i], readout.verify_length - 1)
            if i % 6 == 5:
                assert_equals_fresh_prefill(r, model, drafter, text[: int(r.cache.length)])


def test_no_state_is_stored_per_token():
    model = tiny_target()
    r = make_round(model, tiny_drafter(model), torch.tensor([[3, 4, 5]]), budget=8)
    gdn = r.cache.gdn
    assert gdn.verification_bytes() < 4 * gdn.state.nbytes
    before = gdn.state.clone()
    with torch.no_grad():
        r.target.stage0(r.state.target_input, r.cache, r.state.boundary)
        r.target.stage1(16, r.cache, r.state.boundary, None)
    assert torch.equal(gdn.state, before), "verification must not touch the states"


@pytest.mark.parametrize("committed", [1, 3, 16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_of_a_rejected_token_stays_visible(committed, bad):
    model = tiny_target()
    target = split_target(model)
    cache, _ = filled_cache(model, target, torch.randint(1, 90, (1, 5)), None)
    kept = cache.keys[:, :, :5].clone()
    for buffer in (cache.keys, cache.values):
        buffer[:, :, 5 : 5 + committed] = 1.0
        buffer[:, :, 5 + committed : 5 + cache.block] = bad
    for rows in (cache.gdn.conv[:, cache.gdn.shape.taps - 1 :], *cache.gdn.factors):
        rows[:, committed:] = bad
    cache.commit(torch.tensor([committed]))
    assert torch.equal(cache.keys[:, :, :5], kept) and bool((cache.values[:, :, 5 : 5 + committed] == 1.0).all())
    kept_parts = (cache.keys, cache.values, cache.gdn.states(), cache.gdn.windows())
    assert all(bool(torch.isfinite(part).all()) for part in kept_parts)
    cache.reset()
    gdn = (cache.gdn.conv, cache.gdn.state, *cache.gdn.factors)
    buffers = (cache.keys, cache.values, *gdn, cache.length, cache.position_offset)
    assert not any(bool(buffer.any()) for buffer in buffers)
