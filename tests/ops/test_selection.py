"""Selector and routing correction against plain Python evaluations of Eq. 5 and 6 in float64."""

import math

import pytest
import torch

from hybridspec_kernels import (
    conditional_acceptance_ref,
    correct_length_ref,
    new_experts_ref,
    prefix_probabilities_ref,
    select_length_ref,
)

D, W = 15, 16


def eq5(prefix, cost, rho):
    scores = {w: 1 + sum(prefix[: w - 1]) - rho * cost[w] for w in range(2, len(prefix) + 2)}
    best = max(scores.values())
    return min(w for w, score in scores.items() if score == best)


def eq6(w0, u, prefix, new, cost, s, eta, mean, given, rho):
    if u != w0 + 1:
        return w0
    extra = cost[w0 + 1] - cost[w0] - s + eta * (given[w0][new[w0]] - mean[w0])
    return w0 + (1 if prefix[w0 - 1] > rho * extra else 0)


def random_tables(seed):
    torch.manual_seed(seed)
    prefix = torch.rand(D, dtype=torch.float64).pow(0.2).cumprod(0)
    cost = torch.cat([torch.zeros(2, dtype=torch.float64), torch.rand(W - 1, dtype=torch.float64).cumsum(0)])
    return prefix, cost, torch.rand(1, dtype=torch.float64) * 2


@pytest.mark.parametrize("seed", range(200))
def test_selector_equals_eq5(seed):
    prefix, cost, rho = random_tables(seed)
    chosen = select_length_ref(prefix, cost, rho)
    assert chosen.dtype == torch.int32 and chosen.shape == (1,)
    assert int(chosen) == eq5(prefix.tolist(), cost.tolist(), float(rho))


def test_selector_ties_go_to_the_shorter():
    flat = torch.zeros(W + 1)
    assert int(select_length_ref(torch.zeros(D), flat, torch.ones(1))) == 2
    # dyadic numbers: p and cost cancel exactly from 5 on
    prefix = torch.tensor([0.5] * 4 + [0.25] * 11)
    cost = torch.tensor([0.0] * 5 + [0.0] + [0.25 * i for i in range(1, 12)])
    assert int(select_length_ref(prefix, cost, torch.ones(1))) == 5


@pytest.mark.parametrize("seed", range(200))
def test_correction_equals_eq6(seed):
    prefix, cost, rho = random_tables(seed)
    topk = 4
    s, eta = torch.rand(1, dtype=torch.float64), torch.rand(1, dtype=torch.float64) * 0.1
    mean, given = torch.rand(W + 1, dtype=torch.float64) * 8, torch.rand(W + 1, topk + 1, dtype=torch.float64) * 8
    w0 = torch.randint(2, W + 1, (1,), dtype=torch.int32)
    limit = torch.randint(2, W + 1, (1,), dtype=torch.int32)
    u = torch.minimum(w0 + 1, limit)
    new = torch.randint(0, topk + 1, (W,), dtype=torch.int32)
    got = correct_length_ref(w0, u, prefix, new, cost, s, eta, mean, given, rho)
    want = eq6(int(w0), int(u), prefix.tolist(), new.tolist(), cost.tolist(), float(s), float(eta), mean.tolist(),
               given.tolist(), float(rho))  # fmt: skip
    assert got.dtype == torch.int32 and int(got) == want


def test_correction_needs_the_extra_token():
    prefix, cost, rho = torch.ones(D), torch.zeros(W + 1), torch.ones(1)
    rest = (cost, torch.ones(1), torch.zeros(1), torch.zeros(W + 1), torch.zeros(W + 1, 5), rho)
    new = torch.zeros(W, dtype=torch.int32)
    for w0, u, want in ((4, 5, 5), (4, 4, 4), (4, 3, 4), (W, W, W)):
        lengths = torch.tensor([w0], dtype=torch.int32), torch.tensor([u], dtype=torch.int32)
        assert int(correct_length_ref(*lengths, prefix, new, *rest)) == want


@pytest.mark.parametrize("seed", range(20))
def test_new_experts_counts_the_union(seed):
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(32)[:4] for _ in range(W)])
    seen, want = set(), []
    for row in ids.tolist():
        want.append(len(set(row) - seen))
        seen |= set(row)
    assert new_experts_ref(ids).tolist() == want


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_equals_python(seed):
    torch.manual_seed(seed)
    confidence, entropy = torch.rand(D, dtype=torch.float64), torch.rand(D, dtype=torch.float64) * 3
    entropy[3] = 0.0
    knots = torch.rand(D, 7, dtype=torch.float64).sort(1).values
    values = torch.rand(D, 7, dtype=torch.float64).sort(1).values
    weights = torch.randn(6, dtype=torch.float64)
    got = conditional_acceptance_ref(confidence, entropy, knots, values, weights)
    mean = max(float(entropy[0]), 1e-6)
    for i in range(D):
        h, x = max(float(entropy[i]), 1e-6), float(confidence[i])
        c = interpolate(x, knots[i].tolist(), values[i].tolist())
        position = (i + 1) / D
        features = [1.0, c, position, c * position, math.log1p(h), math.log(h / mean)]
        logit = sum(w * f for w, f in zip(weights.tolist(), features, strict=True))
        assert float(got[i]) == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)
        mean = (h + mean) / 2
    prefix = prefix_probabilities_ref(got)
    assert float(prefix[4]) == pytest.approx(math.prod(got[:5].tolist()))


def interpolate(x, knots, values):
    if x <= knots[0]:
        return values[0]
    points = list(zip(knots, values, strict=True))
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return values[-1]


def test_acceptance_table_with_repeated_knots_is_a_step():
    knots = torch.tensor([[0.0, 0.5, 0.5, 1.0, 1.0, 1.0]]).expand(2, -1).contiguous()
    values = torch.tensor([[0.1, 0.1, 0.9, 0.9, 0.9, 0.9]]).expand(2, -1).contiguous()
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    low = conditional_acceptance_ref(torch.tensor([0.49, 0.2]), torch.ones(2), knots, values, weights)
    high = conditional_acceptance_ref(torch.tensor([0.51, 1.0]), torch.ones(2), knots, values, weights)
    torch.testing.assert_close(low, torch.sigmoid(torch.tensor([0.1, 0.1])))
    torch.testing.assert_close(high, torch.sigmoid(torch.tensor([0.9, 0.9])))
