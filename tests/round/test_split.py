"""Splitting at the router boundary changes nothing: tokens, acceptance, rounds; late rows are never read."""

import pytest
import torch
from support.harness import make_round, plain_text
from support.policies import RandomLengths
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target
from support.unsplit import CountingGate, unsplit

from hybridspec_generation import decode
from hybridspec_generation.round import run_round
from hybridspec_generation.round.acceptance import accept
from hybridspec_generation.round.commit import commit
from hybridspec_generation.round.correction import correct
from hybridspec_generation.round.proposal import propose
from hybridspec_generation.round.selector import select
from hybridspec_generation.round.stage0 import stage0
from hybridspec_generation.round.stage1 import stage1
from hybridspec_hf.models import split_target

MOE_FAMILIES = [family for family in FAMILIES if family != "qwen3_5"]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_split_equals_unsplit(family):
    model = tiny_target(family)
    drafter = tiny_drafter(model)
    prompt = torch.randint(1, 90, (1, 11))
    text = plain_text(model, prompt, 220)
    counts = torch.randint(0, 9, (80,)).tolist()
    runs = []
    for form in (lambda target: target, unsplit):
        target = form(split_target(model, tuple(drafter.config.target_layer_ids)))
        script, policy = (text, counts), RandomLengths(7)
        r = make_round(model, drafter, prompt, budget=200, script=script, policy=policy, target=target)
        with torch.no_grad():
            runs.append(list(decode(r)))
    assert runs[0] == runs[1]
    assert [t for readout in runs[0] for t in readout.tokens] == text[12:212]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_rows_beyond_the_selected_length_are_never_read(family):
    model = tiny_target(family)
    drafter = tiny_drafter(model)
    prompt = torch.randint(1, 90, (1, 6))
    text = plain_text(model, prompt, 140)
    readouts = []
    for poison in (False, True):
        r = make_round(model, drafter, prompt, budget=100, script=(text, [3, 0, 7, 2]), policy=RandomLengths(11))
        with torch.no_grad():
            while not bool(r.state.finished):
                poisoned_round(r) if poison else run_round(r)
                readouts.append((poison, r.state.readout.tolist()[:6], r.cache.gdn.states().clone()))
    clean = [(head, state) for poison, head, state in readouts if not poison]
    dirty = [(head, state) for poison, head, state in readouts if poison]
    assert len(clean) == len(dirty)
    for (head, state), (other_head, other_state) in zip(clean, dirty, strict=True):
        assert head == other_head and torch.equal(state, other_state)


def poisoned_round(r):
    """`run_round` with everything that Stage 0 kept for tokens beyond w overwritten before Stage 1."""
    propose(r)
    select(r)
    stage0(r, int(r.state.stage0_length))
    correct(r)
    w = int(r.state.verify_length)
    boundary, factors = r.state.boundary, r.cache.gdn.factors
    for tensor in (boundary.hidden, boundary.residual, boundary.expert_weights):
        tensor[w:] = float("nan")
    boundary.expert_ids[w:] = 10**6
    for factor in factors:
        factor[0, w:] = float("nan")
    r.cache.gdn.conv[0, r.cache.gdn.shape.taps - 1 + w :] = float("nan")
    stage1(r, w)
    accept(r, w)
    commit(r, w)
    # what a round leaves behind w is stale in any case; finite again for the rest of the test
    for tensor in (boundary.hidden, boundary.residual, boundary.expert_weights, *factors, r.cache.gdn.conv):
        tensor.nan_to_num_()
    boundary.expert_ids[w:] = 0


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_layer0_router_runs_once_per_stage0_token(family):
    model = tiny_target(family)
    drafter = tiny_drafter(model)
    prompt = torch.randint(1, 90, (1, 6))
    r = make_round(model, drafter, prompt, budget=60, policy=RandomLengths(5))
    block = r.target.layers[0].mlp
    gate = block.gate
    block.gate = counter = CountingGate(gate)
    try:
        with torch.no_grad():
            readouts = list(decode(r))
    finally:
        block.gate = gate
    assert counter.calls == len(readouts)
    assert counter.tokens == sum(readout.stage0_length for readout in readouts)


def test_dense_target_has_no_extra_token():
    model = tiny_target("qwen3_5")
    target = split_target(model, (0,))
    assert target.top_k == 0 and target.num_moe_layers == 0
