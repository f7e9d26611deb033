"""The pieces of a round that graphs are made of, run one by one on the CPU."""

import pytest
import torch
from support.harness import make_round
from support.policies import RandomLengths
from support.tiny_models import tiny_drafter, tiny_target

from hybridspec_generation.policies import FixedLength
from hybridspec_generation.round import run_round
from hybridspec_hf.graphs.rounds import emit_nothing, round_steps


def rounds(policy, budget=40):
    model = tiny_target()
    return make_round(model, tiny_drafter(model), torch.tensor([[3, 4, 5]]), budget=budget, policy=policy)


def committed(r):
    """Copies of everything that a request has committed."""
    n, c = int(r.cache.length), r.cache
    parts = (c.keys[:, :, :n], c.values[:, :, :n], c.gdn.states(), c.gdn.windows(), r.drafter.keys[..., :n, :])
    return [n, *(part.clone() for part in parts)]


def run_steps(r, lengths, split):
    for step in round_steps(r, lengths, split):
        (step.pieces[0] if step.length is None else step.pieces[int(step.length) - lengths[0]]).run()


@pytest.mark.parametrize(
    "policy, longest, split",
    [(FixedLength, 5, False), (FixedLength, 5, True), (FixedLength, 2, False), (RandomLengths, 16, True)],
)
def test_steps_are_the_round(policy, longest, split):
    a, b = rounds(policy(longest)), rounds(policy(longest))
    with torch.no_grad():
        for _ in range(6):
            run_round(a)
            run_steps(b, range(2, longest + 1), split)
            assert torch.equal(a.state.readout, b.state.readout)
    # Stage 0 runs on other numbers of rows, which a matrix product on a CPU rounds otherwise
    for x, y in zip(committed(a), committed(b), strict=True):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", [FixedLength(5), RandomLengths(seed=1)])
def test_warming_pieces_commits_nothing(policy):
    r = rounds(policy)
    with torch.no_grad():
        for _ in range(3):
            run_round(r)
        before = committed(r)
        assert int(r.state.num_committed) > 0
        emit_nothing(r)
        pieces = [piece for step in round_steps(r, range(2, 17), True) for piece in step.pieces]
        # without its acceptance, as when only kernels are compiled
        r.cache.commit(r.state.num_committed)
        for piece in pieces:
            piece.run()
    for x, y in zip(before, committed(r), strict=True):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=0, atol=0)
