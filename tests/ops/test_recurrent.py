"""The verifier that stores the state after every token, and its commit, against the recurrence in float64."""

import pytest
import torch
from gdn_blocks import (
    DEVICE,
    LARGE,
    SIZES,
    captured,
    error,
    forbid_host_reads,
    on_device,
    poisoned,
    random_block,
    random_state,
    recurrence,
    with_gate,
)

from hybridspec_kernels.gdn.recurrent_commit import gdn_recurrent_commit, gdn_recurrent_commit_ref
from hybridspec_kernels.gdn.recurrent_verify import gdn_recurrent_verify, gdn_recurrent_verify_ref

pytest.importorskip("triton")

OUTPUT_ERROR, STATE_ERROR = 1e-5, 1e-6


def verify(block, state, sizes, run=gdn_recurrent_verify):
    """Outputs and the states after every token, from poisoned buffers."""
    W, (H, HV, K, V) = len(block.x), sizes
    out, token_states = poisoned(W, HV, V, dtype=block.x.dtype), poisoned(W, HV, V, K, dtype=state.dtype)
    run(*block, state, token_states, out, key_heads=H)
    return out, token_states


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("W", [1, 2, 5, 16])
def test_verify_matches_recurrence(W, sizes):
    block, state = random_block(W, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    before = state.clone()
    out, token_states = verify(block, state, sizes)
    outputs, states = recurrence(block, state, sizes.H)
    assert error(out, outputs) <= OUTPUT_ERROR
    assert max(error(token_states[i], states[i]) for i in range(W)) <= STATE_ERROR
    assert torch.equal(state, before)


def test_verify_ref_is_the_recurrence():
    sizes = SIZES[0]
    block, state = random_block(5, sizes, torch.float64), random_state(sizes.HV, sizes.V, sizes.K).double()
    for got, truth in zip(
        verify(block, state, sizes, gdn_recurrent_verify_ref), recurrence(block, state, sizes.H), strict=True
    ):
        assert torch.equal(got, truth)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("gate", [-30.0, -1e4])
@pytest.mark.parametrize("write", [-1e4, 1e4])
def test_verify_survives_extreme_gates(gate, write):
    sizes = SIZES[0]
    block, state = with_gate(random_block(7, sizes), 4, gate), random_state(sizes.HV, sizes.V, sizes.K)
    block.b.fill_(write)
    out, token_states = verify(block, state, sizes)
    outputs, states = recurrence(block, state, sizes.H)
    assert error(out, outputs) <= OUTPUT_ERROR
    assert max(error(token_states[i], states[i]) for i in range(7)) <= STATE_ERROR


@pytest.mark.parametrize("commit", [gdn_recurrent_commit_ref, gdn_recurrent_commit])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_commit_copies_the_state_of_token_m(m, commit, monkeypatch):
    # 3 * 20 * 20 numbers a layer: more than one program and no multiple of one
    states = random_state(2, 5, 3, 20, 20)
    token_states = poisoned(*states.shape)
    token_states[:, m - 1] = states[:, m - 1]
    state = poisoned(2, 3, 20, 20)
    num_committed = on_device(m)
    with monkeypatch.context() as patch:
        forbid_host_reads(patch)
        commit(state, token_states, num_committed)
    assert torch.equal(state, states[:, m - 1])


@pytest.mark.parametrize("lengths", [(5, 2), (2, 5)])
def test_two_rounds_in_both_orders(lengths):
    sizes, W = SIZES[0], sum(lengths)
    block, state = random_block(W, sizes), random_state(1, sizes.HV, sizes.V, sizes.K)
    outputs, states = recurrence(block, state[0], sizes.H)
    num_committed, start = on_device(0), 0
    for m in lengths:
        # one token more than is accepted, where there is one
        rows = slice(start, start + m + 1)
        out, token_states = verify(block.rows(start, start + m + 1), state[0], sizes)
        num_committed.fill_(m)
        gdn_recurrent_commit(state, token_states[None], num_committed)
        assert error(out, outputs[rows]) <= OUTPUT_ERROR
        start += m
        assert error(state[0], states[start - 1]) <= STATE_ERROR


def test_verify_refuses_what_it_would_read_wrongly():
    sizes = SIZES[0]
    block, state = random_block(2, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    with pytest.raises(ValueError, match="6 value heads do not divide among 4 key heads"):
        verify(block, state, sizes._replace(H=4))
    with pytest.raises(ValueError, match="state is .* torch.float64"):
        verify(block, state.double(), sizes)
    with pytest.raises(ValueError, match="x is .*strides"):
        verify(block._replace(x=block.x.t().contiguous().t()), state, sizes)
    with pytest.raises(ValueError, match=r"num_committed is \[1\] torch.int64"):
        gdn_recurrent_commit(state[None], state[None, None], torch.ones(1, dtype=torch.int64, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("W", [1, 2, 5, 16])
def test_bf16_error_is_that_of_rounded_outputs(W):
    sizes = LARGE
    block, state = random_block(W, sizes, torch.bfloat16), random_state(1, sizes.HV, sizes.V, sizes.K)
    outputs, states = recurrence(block, state[0], sizes.H)
    out, token_states = verify(block, state[0], sizes)
    gdn_recurrent_commit(state, token_states[None], on_device(W))
    # rounding exact outputs to bf16 alone is 1.67e-3
    assert error(out, outputs) <= 1.8e-3
    assert error(state[0], states[-1]) <= 1e-6


@pytest.mark.gpu
def test_one_graph_uneven_commits_m():
    token_states, state, num_committed = random_state(2, 5, 3, 20, 20), random_state(2, 3, 20, 20), on_device(1)
    graph = captured(lambda: gdn_recurrent_commit(state, token_states, num_committed))
    for m in (1, 5, 2, 4, 3):
        num_committed.fill_(m)
        graph.replay()
        assert torch.equal(state, token_states[:, m - 1])
