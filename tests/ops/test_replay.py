"""ReplaySSM's verifier and commit, whose state is a checkpoint and a ring, against the recurrence in float64."""

import pytest
import torch
from gdn_blocks import (
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

from hybridspec_kernels.gdn.replay_commit import gdn_replay_commit, gdn_replay_commit_ref
from hybridspec_kernels.gdn.replay_verify import gdn_replay_verify, gdn_replay_verify_ref, replay_ref, ring_capacity
from hybridspec_kernels.gdn.verify import CompactFactors

pytest.importorskip("triton")

OUTPUT_ERROR, STATE_ERROR = 1e-5, 1e-6
REFERENCE, KERNELS = (gdn_replay_verify_ref, gdn_replay_commit_ref), (gdn_replay_verify, gdn_replay_commit)


class Replay:
    """Checkpoints and ring of L layers that verify the same kind of block, and every layer's truth."""

    def __init__(self, block, sizes, longest, ops=KERNELS, layers=1):
        H, HV, K, V = sizes
        R = ring_capacity(longest)
        self.ops, self.H, self.longest = ops, H, longest
        self.blocks = [block] + [random_block(len(block.x), sizes, block.x.dtype) for _ in range(layers - 1)]
        self.state = random_state(layers, HV, V, K)
        truth = [recurrence(block, state, H) for block, state in zip(self.blocks, self.state, strict=True)]
        self.outputs, self.states = (torch.stack(parts) for parts in zip(*truth, strict=True))
        z, g = poisoned(layers, R, HV, V), poisoned(layers, R, HV)
        self.ring = CompactFactors(z, poisoned(layers, R, H, K, dtype=block.x.dtype), g)
        self.count, self.num_committed, self.start = on_device(0), on_device(0), 0

    def verify(self, w):
        """The next w tokens of every layer; the outputs' worst error."""
        verify, errors = self.ops[0], []
        for i, block in enumerate(self.blocks):
            out = poisoned(*self.outputs[i, :w].shape, dtype=block.x.dtype)
            layer = CompactFactors(*(factor[i] for factor in self.ring))
            rows = block.rows(self.start, self.start + w)
            verify(*rows, self.state[i], layer, self.count, out, key_heads=self.H)
            errors.append(error(out, self.outputs[i, self.start : self.start + w]))
        return max(errors)

    def commit(self, m):
        """m of them; the worst error of a state that checkpoint and ring stand for."""
        self.num_committed.fill_(m)
        self.ops[1](self.state, self.ring, self.count, self.num_committed, max_length=self.longest)
        self.start += m
        before = replay_ref(self.state.double(), self.ring, self.count)
        return max(error(before[i], self.states[i, self.start - 1]) for i in range(len(before)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("W", [1, 2, 5, 16])
def test_verify_matches_recurrence(W, sizes):
    # 3 entries in the ring, and none
    replay = Replay(random_block(3 + W, sizes), sizes, max(W, 3))
    assert replay.verify(3) <= OUTPUT_ERROR
    assert replay.commit(3) <= STATE_ERROR
    checkpoint, entries = replay.state.clone(), [factor[:, :3].clone() for factor in replay.ring]
    assert replay.verify(W) <= OUTPUT_ERROR
    assert torch.equal(replay.state, checkpoint)
    for factor, old in zip(replay.ring, entries, strict=True):
        assert torch.equal(factor[:, :3], old)
        assert factor[:, : 3 + W].isfinite().all() and factor[:, 3 + W :].isnan().all()
    assert replay.commit(W) <= STATE_ERROR


@pytest.mark.parametrize("ops", [REFERENCE, KERNELS], ids=["reference", "kernels"])
@pytest.mark.parametrize("W, rounds", [(2, 22), (5, 10), (16, 7)])
def test_rounds_that_cross_the_capacity(W, rounds, ops):
    accepted = torch.randint(1, W + 1, (rounds,)).tolist()
    replay = Replay(random_block(sum(accepted) + W, SIZES[1]), SIZES[1], W, ops, layers=2)
    folds = 0
    for m in accepted:
        assert replay.verify(W) <= OUTPUT_ERROR
        assert replay.commit(m) <= STATE_ERROR
        folds += int(replay.count) == 0
    assert 2 <= folds < rounds


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("first", [1, 2])
def test_commit_of_every_m_after_every_count(first, m):
    sizes = SIZES[1]
    replay = Replay(random_block(4, sizes), sizes, 2)
    replay.verify(2)
    replay.commit(first)
    assert replay.verify(2) <= OUTPUT_ERROR
    # rejected entries count for nothing, whatever they hold
    for factor in replay.ring:
        factor[:, first + m :] = float("nan")
    assert replay.commit(m) <= STATE_ERROR
    assert replay.count.tolist() == [first + m]


@pytest.mark.parametrize("first, second, folds", [(8, 8, False), (8, 9, True), (16, 1, True), (16, 16, True)])
def test_commit_folds_only_a_ring_without_room(first, second, folds):
    # 32 entries, of which the next block takes 16
    replay = Replay(random_block(32, SIZES[1]), SIZES[1], 16)
    checkpoint = replay.state.clone()
    for m in (first, second):
        replay.verify(16)
        assert torch.equal(replay.state, checkpoint)
        assert replay.commit(m) <= STATE_ERROR
    assert torch.equal(replay.state, checkpoint) is not folds
    assert replay.count.tolist() == [0 if folds else first + second]


@pytest.mark.parametrize("ops", [REFERENCE, KERNELS], ids=["reference", "kernels"])
def test_a_round_reads_nothing_on_the_host(ops, monkeypatch):
    replay = Replay(random_block(2, SIZES[1]), SIZES[1], 2, ops)
    forbid_host_reads(monkeypatch)
    replay.verify(2)
    assert replay.commit(1) <= STATE_ERROR


@pytest.mark.parametrize("lengths", [(16, 7), (7, 16)])
def test_two_rounds_in_both_orders(lengths):
    replay = Replay(random_block(23, SIZES[0]), SIZES[0], 16)
    for m in lengths:
        assert replay.verify(m) <= OUTPUT_ERROR
        assert replay.commit(m) <= STATE_ERROR


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("gate, tolerance", [(-30.0, OUTPUT_ERROR), (-1e4, 1e-3)])
@pytest.mark.parametrize("write", [-1e4, 1e4])
def test_rounds_survive_extreme_gates(gate, tolerance, write):
    # differences of cumulative log decays near 1e4 carry 1e4 * eps(fp32) = 6e-4
    block = with_gate(random_block(20, SIZES[0]), 5, gate)
    block.b.fill_(write)
    replay = Replay(block, SIZES[0], 8)
    for w, m in ((8, 8), (8, 3), (8, 1), (8, 8)):
        assert replay.verify(w) <= tolerance
        assert replay.commit(m) <= tolerance


def test_repeated_keys_keep_their_digits():
    # one key that is written over and over: powers of the whole system would reach thousands and cancel
    sizes = SIZES[0]
    block = with_gate(random_block(16, sizes), 0, -1e-3)
    keys = slice(sizes.H * sizes.K, 2 * sizes.H * sizes.K)
    block.x[:, keys] = block.x[0, keys]
    block.a.fill_(-10.0)
    block.b.fill_(10.0)
    replay = Replay(block, sizes, 16)
    assert replay.verify(16) <= OUTPUT_ERROR
    assert replay.commit(16) <= STATE_ERROR


def test_ring_capacity_is_a_power_of_two_that_holds_two_blocks():
    assert [ring_capacity(block) for block in (1, 2, 8, 9, 16)] == [16, 16, 16, 32, 32]


def test_launchers_refuse_what_they_would_read_wrongly():
    sizes = SIZES[0]
    replay = Replay(random_block(17, sizes), sizes, 16)
    with pytest.raises(ValueError, match="up to 16 tokens, got 17"):
        replay.verify(17)
    with pytest.raises(ValueError, match=r"ring.k is .*float64.*contiguous \[32, 3, 16\] torch.float32"):
        replay.ring = replay.ring._replace(k=replay.ring.k.double())
        replay.verify(2)
    replay.longest = 17
    with pytest.raises(ValueError, match="power of two from 64 on"):
        replay.commit(1)


@pytest.mark.gpu
@pytest.mark.parametrize("W", [1, 2, 5, 16])
def test_bf16_error_is_that_of_rounded_outputs(W):
    replay = Replay(random_block(6 * W, LARGE, torch.bfloat16), LARGE, W, layers=2)
    for _ in range(6):
        # rounding exact outputs to bf16 alone is 1.67e-3
        assert replay.verify(W) <= 1.8e-3
        assert replay.commit(W) <= 1e-4


@pytest.mark.gpu
def test_one_graph_uneven_commits_m():
    replay = Replay(random_block(12, SIZES[0]), SIZES[0], 6)
    replay.verify(6)
    replay.commit(6)
    replay.verify(6)
    checkpoint, state, ring, count, m = (
        replay.state.clone(),
        replay.state,
        replay.ring,
        replay.count,
        replay.num_committed,
    )
    graph = captured(lambda: gdn_replay_commit(state, ring, count, m, max_length=6))
    # 16 entries of which 6 are taken and 6 must stay free: 5 and 6 fold
    for number in (1, 6, 4, 5):
        state.copy_(checkpoint)
        count.fill_(6)
        m.fill_(number)
        graph.replay()
        assert int(count) == (0 if number > 4 else 6 + number)
        assert error(replay_ref(state.double(), ring, count), replay.states[:, 5 + number]) <= STATE_ERROR
