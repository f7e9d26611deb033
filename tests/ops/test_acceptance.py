"""Acceptance in one launch against its reference, and that against a loop over tokens."""

import pytest
import torch
from gdn_blocks import DEVICE
from support.kernels import needs_triton

from hybridspec_kernels.acceptance.greedy import Emission, accept_greedy, accept_greedy_ref


def by_hand(tokens, chosen, eos, budget):
    """Emitted tokens, A, budget left and whether the request is over, token by token."""
    accepted = 0
    while accepted < len(chosen) - 1 and tokens[accepted + 1] == chosen[accepted]:
        accepted += 1
    emitted, over = [], budget == 0
    for token in chosen[: accepted + 1]:
        if over:
            break
        emitted.append(token)
        budget -= 1
        over = token in eos or budget == 0
        # whatever follows emits nothing
        budget = 0 if over else budget
    return emitted, accepted, budget, over


def random_case(w, W):
    """Inputs whose drafts are right for a random number of tokens, few token ids, so that EOS is met."""
    chosen = torch.randint(0, 12, (w,))
    tokens = torch.randint(0, 12, (W,))
    right = int(torch.randint(0, w, ()))
    tokens[1 : 1 + right] = chosen[:right]
    return tokens, chosen, torch.tensor([3, 7, -1, -1]), int(torch.randint(0, 20, ()))


def emission(W, budget):
    def ints(n, dtype):
        return torch.full((n,), 99, dtype=dtype, device=DEVICE)

    remaining = torch.tensor([budget], device=DEVICE)
    return Emission(ints(1, torch.int32), ints(1, torch.int32), ints(W, torch.int64), remaining, ints(1, torch.int32))


@needs_triton
@pytest.mark.parametrize("accept", [accept_greedy_ref, accept_greedy])
@pytest.mark.parametrize("w, W", [(1, 1), (1, 16), (2, 16), (5, 8), (16, 16)])
def test_acceptance(w, W, accept):
    for _ in range(40):
        tokens, chosen, eos, budget = random_case(w, W)
        want, accepted, left, over = by_hand(tokens.tolist(), chosen.tolist(), eos.tolist(), budget)
        inputs, out = tokens.to(DEVICE), emission(W, budget)
        accept(inputs, chosen.to(DEVICE), eos.to(DEVICE), out)
        m = int(out.num_committed)
        assert out.emitted[:m].tolist() == want
        assert (int(out.num_accepted), int(out.remaining)) == (accepted, left)
        # without a budget the round runs behind the end of its request
        assert budget == 0 or bool(out.finished) == over
        assert inputs[1:].tolist() == tokens[1:].tolist() and int(inputs[0]) == (want or chosen.tolist()[:1])[-1]


@needs_triton
def test_refusals():
    out = emission(16, 4)
    tokens, chosen, eos = (torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (16, 17, 2))
    with pytest.raises(ValueError, match="chosen has 17 tokens"):
        accept_greedy(tokens, chosen, eos, out)
    with pytest.raises(ValueError, match="emission.finished is .*int64"):
        accept_greedy(tokens, chosen[:3], eos, out._replace(finished=out.remaining))
