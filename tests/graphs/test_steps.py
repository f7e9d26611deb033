"""The pieces of a round that graphs are made of, run one by one on the CPU."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.harness import make_round, plain_text
from support.policies import RandomLengths
from support.tiny_models import tiny_drafter, tiny_target

from hybridspec_generation import CostTable
from hybridspec_generation.policies import FixedLength, HybridSpecPolicy
from hybridspec_generation.round import run_round
from hybridspec_generation.tables import SelectionTables
from hybridspec_hf.calibration.tables import default_tables, fit_experts
from hybridspec_hf.graphs.rounds import GraphedRounds, Piece, Step, emit_nothing, round_steps


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
    # split, Stage 0 runs on other numbers of rows, which a matrix product on a CPU rounds otherwise
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if split else {"rtol": 0, "atol": 0}
    for x, y in zip(committed(a), committed(b), strict=True):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), **tolerance)


def test_the_correction_reads_only_the_rows_it_asked_for():
    """Stage 0 of the pieces routes more rows than u, which must not change w."""
    model, (acceptance, experts) = tiny_target(), default_tables()
    cost = CostTable(target_cost=(0.0, 0.0, *(3e-4 * i for i in range(15))), fixed_cost=3e-3, stage0_token_cost=1e-5,
                     expert_cost=6e-5)  # fmt: skip
    tables = SelectionTables.build(acceptance, cost, fit_experts(experts, 16, 3, 4), 400.0, torch.device("cpu"))
    generator, drafter, extended = torch.Generator().manual_seed(1), tiny_drafter(model), 0
    for trial in range(6):
        prompt = torch.randint(1, 90, (1, 4), generator=generator)
        text = plain_text(model, prompt, 70)
        counts = torch.randint(0, 16, (40,), generator=generator).tolist()
        signals = [torch.rand(15, generator=generator) for _ in range(7)]
        a, b = (
            make_round(model, drafter, prompt, budget=40, policy=HybridSpecPolicy(tables), script=(text, counts),
                       confidence=signals)
            for _ in range(2)
        )  # fmt: skip
        with torch.no_grad():
            while not bool(a.state.finished):
                run_round(a)
                run_steps(b, range(2, 17), True)
                assert torch.equal(a.state.readout, b.state.readout), trial
                extended += int(a.state.verify_length > a.state.nominal_length)
    assert extended > 3


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


@pytest.mark.parametrize("w", [1, 6])
def test_a_length_without_a_graph_is_refused(w):
    """By the host, which reads every round's length; a SWITCH would run the nearest."""
    graphs = GraphedRounds.__new__(GraphedRounds)
    graphs.lengths = [2, 3, 4, 5]
    graphs._check_length(2)
    graphs._check_length(5)
    with pytest.raises(RuntimeError, match=f"verify {w} tokens, and there are graphs for 2 to 5"):
        graphs._check_length(w)
    ran = []
    graphs.steps = [Step([Piece(str(each), None) for each in graphs.lengths], torch.tensor([w], dtype=torch.int32))]
    graphs.graphs = [[SimpleNamespace(replay=partial(ran.append, each)) for each in graphs.lengths]]
    with pytest.raises(RuntimeError, match="there are graphs for 2 to 5"):
        graphs._replay()
    graphs.steps[0].length.fill_(3)
    graphs._replay()
    assert ran == [3]
