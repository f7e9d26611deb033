"""Selector, correction and competing rules against plain Python or PyTorch in float64; their kernels."""

import math

import pytest
import torch
from gdn_blocks import DEVICE, captured, on_device, poisoned
from torch import Tensor

from hybridspec_kernels import (
    conditional_acceptance_ref,
    correct_length,
    correct_length_ref,
    fix_length,
    limit_length_ref,
    new_experts_ref,
    prefix_probabilities_ref,
    select_length,
    select_length_ref,
    select_ratio,
    select_ratio_ref,
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


class Signals:
    """A random round: what `select_length` reads (fp32), with the corners of each range in it."""

    def __init__(self, D: int, knots: int) -> None:
        self.confidence = torch.rand(D) * 1.2 - 0.1
        self.entropy = 10 ** (torch.rand(D) * 9 - 8)
        self.entropy[torch.rand(D) < 0.1] = 0.0
        self.entropy[torch.rand(D) < 0.1] = 12.0
        # a coarse grid: equal knots, and confidences that lie on one
        grid = torch.rand(D, knots) if torch.rand(()) < 0.5 else torch.randint(0, 9, (D, knots)) / 8
        self.knots = grid.sort(1).values
        on_knot = torch.rand(D) < 0.2
        self.confidence[on_knot] = self.knots[on_knot, knots // 2]
        self.values = torch.rand(D, knots).sort(1).values
        self.weights = torch.randn(6) * torch.tensor([1.0, 4.0, 1.0, 1.0, 0.5, 0.2])
        cost = torch.rand(D).mul(0.01).cumsum(0)
        self.cost, self.rho = torch.cat([torch.zeros(2), cost]), torch.rand(1) * 150
        for name, value in vars(self).items():
            setattr(self, name, value.to(DEVICE))

    def select(self, remaining: int, extra: int) -> tuple[Tensor, int, int]:
        """What the kernel writes: prefix probabilities, w0 and u."""
        prefix, w0, u = poisoned(len(self.knots)), *(poisoned(1, dtype=torch.int32) for _ in range(2))
        select_length(
            self.confidence, self.entropy, torch.tensor([remaining], device=DEVICE), self.knots, self.values,
            self.weights, self.cost, self.rho, prefix, w0, u, extra_tokens=extra,
        )  # fmt: skip
        return prefix, int(w0), int(u)

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """Float64: prefix probabilities, the score of every length and the numbers that it is made of."""
        signals = (self.confidence, self.entropy, self.knots, self.values, self.weights)
        prefix = prefix_probabilities_ref(conditional_acceptance_ref(*(t.double() for t in signals)))
        gain, cost = 1 + prefix.cumsum(0), self.rho.double() * self.cost[2:].double()
        return prefix, gain - cost, gain + cost


def within_budget(wanted: int, remaining: int, block: int) -> int:
    return min(wanted, max(2, min(remaining, block)))


@pytest.mark.parametrize("knots", [2, 13, 64])
@pytest.mark.parametrize("D", [1, 3, 7, 15, 17, 63])
def test_select_kernel_equals_float64(D, knots):
    pytest.importorskip("triton")
    chosen = set()
    for case in range(40 if D <= 15 else 5):
        signals = Signals(D, knots)
        remaining, extra = int(torch.randint(0, D + 4, ())), case % 2
        prefix, w0, u = signals.select(remaining, extra)
        want, score, size = signals.truth()
        torch.testing.assert_close(prefix.double(), want, rtol=0, atol=1e-6)
        best = int(select_length_ref(want, signals.cost.double(), signals.rho.double()))
        assert w0 == best or score[best - 2] - score[w0 - 2] < 1e-6 * size[best - 2]
        assert u == within_budget(w0 + extra, remaining, D + 1)
        chosen.add(w0)
    assert len(chosen) > min(D, 3) - 1


def test_select_kernel_ties_go_to_the_shorter():
    pytest.importorskip("triton")
    signals = Signals(D, 5)
    # every acceptance probability is 1/2 exactly; from 4 on a token costs what it gains
    signals.weights.zero_()
    gain = 0.5 ** torch.arange(1.0, D + 1, device=DEVICE)
    gain[:2] *= 0.5
    signals.cost, signals.rho = torch.cat([gain.new_zeros(2), gain.cumsum(0)]), gain.new_ones(1)
    prefix, w0, _ = signals.select(99, 0)
    assert w0 == 3 and torch.equal(prefix, 0.5 ** torch.arange(1.0, D + 1, device=DEVICE))


@pytest.mark.parametrize("name", ["confidence", "entropy", "knots", "values", "weights", "cost", "rho"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_select_kernel_stays_in_bounds(name, number):
    pytest.importorskip("triton")
    for place in (0, 4, ...):
        signals = Signals(D, 5)
        values = getattr(signals, name)
        values[0 if len(values) == 1 else place] = number
        prefix, w0, u = signals.select(6, 1)
        assert 2 <= w0 <= W and 2 <= u <= 6
        if math.isnan(number) and name in ("confidence", "entropy"):
            # as in the reference: the tokens in front of the NaN count as ever
            assert w0 <= 2 + (place if place != ... else 0) and bool(prefix[4:].isnan().all())
            assert w0 == int(select_length_ref(prefix, signals.cost, signals.rho))


class Boundary:
    """A random router boundary: what `correct_length` reads."""

    def __init__(self, D: int, top_k: int, experts: int) -> None:
        W = D + 1
        self.w0 = int(torch.randint(2, W + 1, ()))
        self.u = within_budget(self.w0 + 1, int(torch.randint(0, W + 4, ())), W)
        self.prefix = torch.rand(D).pow(0.2).cumprod(0)
        self.ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(W)])
        self.cost = torch.cat([torch.zeros(2), torch.rand(W - 1).cumsum(0)])
        self.s, self.eta, self.rho = torch.rand(1) * 0.3, torch.rand(1) * 0.1, torch.rand(1) * 2
        self.mean, self.given = torch.rand(W + 1) * 8, torch.rand(W + 1, top_k + 1) * 8
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(DEVICE))

    def tables(self) -> tuple[Tensor, ...]:
        """In the order of the arguments."""
        return self.cost, self.s, self.eta, self.mean, self.given, self.rho

    def correct(self) -> int:
        """What the kernel writes."""
        out = poisoned(1, dtype=torch.int32)
        correct_length(on_device(self.w0), on_device(self.u), self.prefix, self.ids, *self.tables(), out)
        return int(out)

    def is_tie(self) -> bool:
        """Whether Eq. 6 compares numbers that fp32 cannot tell apart."""
        new = int(new_experts_ref(self.ids)[min(self.w0, len(self.ids) - 1)])
        cost, s, eta, mean, given, rho = (t.double().cpu() for t in self.tables())
        w0 = min(self.w0, len(self.ids) - 1)
        parts = torch.stack([cost[w0 + 1], -cost[w0], -s[0], eta[0] * given[w0, new], -eta[0] * mean[w0]]) * rho
        gap = float(self.prefix[w0 - 1]) - float(parts.sum())
        return abs(gap) < 1e-6 * float(parts.abs().sum() + self.prefix[w0 - 1])


@pytest.mark.parametrize("top_k, experts", [(1, 4), (4, 12), (8, 64), (10, 16)])
@pytest.mark.parametrize("D", [1, 3, 7, 15])
def test_correct_kernel_equals_float64(D, top_k, experts):
    pytest.importorskip("triton")
    kept = []
    for _ in range(32):
        b = Boundary(D, top_k, experts)
        lengths = on_device(b.w0), on_device(b.u)
        new, tables = new_experts_ref(b.ids), (t.double() for t in b.tables())
        want = min(int(correct_length_ref(*lengths, b.prefix.double(), new, *tables)), b.u)
        got = b.correct()
        assert got == want or (b.is_tie() and got in (b.w0, b.w0 + 1) and got <= b.u)
        kept.append(got > b.w0)
    assert D == 1 or 0 < sum(kept) < 32


def test_correct_kernel_ignores_what_stage0_did_not_reach():
    pytest.importorskip("triton")
    for _ in range(8):
        b = Boundary(D, 4, 12)
        before = b.correct()
        b.ids[b.u :] = torch.randint(-(2**62), 2**62, b.ids[b.u :].shape, device=DEVICE)
        assert b.correct() == before


def test_correct_kernel_stays_in_bounds():
    pytest.importorskip("triton")
    for name in ("prefix", "cost", "s", "eta", "mean", "given", "rho"):
        b = Boundary(D, 4, 12)
        b.w0, b.u = 5, 6
        getattr(b, name).fill_(math.nan)
        # a comparison with NaN fails
        assert b.correct() == 5


# which of the lengths 2..W, and the keywords that a competing rule passes
RATIO_RULES = {
    "dcut": (lambda W: sorted({max(2, -(-W * q // 4)) for q in (1, 2, 3, 4)}), {"anchor_tokens": 1, "rising": False}),
    "evict": (lambda W: range(2, W + 1), {"anchor_tokens": 1, "rising": False}),
    "dspark": (lambda W: range(2, W + 1), {"anchor_tokens": 1, "rising": True}),
    "odd, no anchor": (lambda W: [2, *range(3, W + 1, 2)], {"anchor_tokens": 0, "rising": True}),
}  # fmt: skip


class Ratios:
    """A random round of a competing rule: what `select_ratio` reads (fp32).

    Args:
        knots: of the calibration; 0: there is none.
        exact: sums are exact in binary, and ratios are often equal.
    """

    def __init__(self, rule: str, D: int, knots: int, exact: bool) -> None:
        lengths, self.options = RATIO_RULES[rule]
        self.lengths = torch.tensor(lengths(D + 1), dtype=torch.int32)
        if exact:
            self.confidence = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0])[torch.randint(0, 5, (D,))]
            steps = torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (D,))] * torch.arange(D)
            cost, self.fixed = steps.sort().values, torch.randint(0, 3, (1,)).float()
            table = (torch.randint(0, 3, (D, knots)) / 2 for _ in range(2))
        else:
            self.confidence = torch.rand(D).pow(10 ** -(2 * torch.rand(())))
            cost, self.fixed = (torch.rand(D) * 10 ** -(2 * torch.rand(()))).cumsum(0), torch.rand(1) + 0.1
            table = (torch.rand(D, knots).pow(10 ** -(2 * torch.rand(()))) for _ in range(2))
        self.knots, self.values = (t.sort(1).values for t in table)
        self.cost = torch.cat([torch.zeros(2), cost])
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(DEVICE))

    def select(self, op, remaining: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, int, int]:
        """What the kernel or the reference writes: prefix probabilities, w0 and u."""
        prefix = poisoned(len(self.confidence), dtype=dtype)
        w0, u = (poisoned(1, dtype=torch.int32) for _ in range(2))
        op(
            self.confidence.to(dtype), torch.tensor([remaining], device=DEVICE), self.cost.to(dtype),
            self.fixed.to(dtype), self.lengths, prefix, w0, u, **self.options,
            calibration=(self.knots.to(dtype), self.values.to(dtype)) if self.knots.numel() else None,
        )  # fmt: skip
        return prefix, int(w0), int(u)

    def check(self, remaining: int) -> int:
        """Assert that the kernel writes what the reference does in float64; the length."""
        prefix, w0, u = self.select(select_ratio, remaining)
        want, *chosen = self.select(select_ratio_ref, remaining, torch.float64)
        torch.testing.assert_close(prefix.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert [w0, u] == chosen == [w0, within_budget(w0, remaining, len(prefix) + 1)]
        return w0


@pytest.mark.parametrize("knots", [0, 13])
@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("D", [1, 3, 7, 15, 17, 63])
def test_ratio_kernel_equals_float64(D, rule, knots):
    pytest.importorskip("triton")
    chosen = set()
    for case in range(20 if D == 15 else 6):
        ratios = Ratios(rule, D, knots, exact=case % 2 == 1)
        chosen.add(ratios.check(int(torch.randint(0, D + 4, ()))))
    assert D != 15 or len(chosen) >= 4


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_ratio_kernel_takes_broken_numbers_as_the_reference(number, rule):
    pytest.importorskip("triton")
    for case in range(16):
        ratios = Ratios(rule, D, knots=5 * (case % 2), exact=case % 3 == 0)
        name, place = ("confidence", "confidence", "cost", "fixed")[case // 2 % 4], int(torch.randint(0, D, ()))
        values = getattr(ratios, name)
        values[{"confidence": place, "cost": 2 + place, "fixed": 0}[name]] = number
        w0 = ratios.check(100)
        if math.isnan(number) and name == "confidence":
            # the tokens in front of the NaN count as ever, the others are worth nothing
            assert w0 <= max(int(ratios.lengths[0]), place + 1)


@pytest.mark.parametrize("rule", ["evict", "dspark"])
def test_ratio_kernel_takes_no_token_that_adds_nothing(rule):
    """Sums are rounded and all lengths cost the same: equal sums must be equal, whatever their order of additions."""
    pytest.importorskip("triton")
    for useful in range(1, D + 1):
        ratios = Ratios(rule, D, 0, exact=False)
        ratios.confidence.uniform_(0.7, 1.0)[useful:] = 0.0
        ratios.cost.fill_(1.0)
        assert ratios.check(100) == useful + 1


@pytest.mark.parametrize("rule", ["evict", "dspark"])
def test_ratio_kernel_finds_equal_ratios_equal(rule):
    """w tokens in w * t seconds: a division that is not rounded correctly tells the lengths apart."""
    pytest.importorskip("triton")
    for numerator in range(1, 40, 4):
        ratios = Ratios(rule, D, 0, exact=True)
        ratios.confidence.fill_(1.0)
        ratios.fixed.zero_()
        ratios.cost = torch.arange(W + 1, device=DEVICE) * (numerator / 64)
        assert ratios.check(100) == 2


@pytest.mark.parametrize("remaining", [-3, 0, 1, 2, 3, 15, 16, 17, 2**40])
@pytest.mark.parametrize("block, length", [(1, 1), (2, 2), (16, 2), (16, 3), (16, 16)])
def test_fix_length_equals_the_reference(block, length, remaining):
    pytest.importorskip("triton")
    w0, u = (poisoned(1, dtype=torch.int32) for _ in range(2))
    budget = torch.tensor([remaining], device=DEVICE)
    fix_length(length, budget, w0, u, block=block)
    want = min(length, max(min(2, block), min(remaining, block)))
    assert int(w0) == length and int(u) == want == int(limit_length_ref(w0, budget, block))


def test_selection_kernels_refuse_what_they_would_read_wrongly():
    pytest.importorskip("triton")
    signals, b = Signals(D, 5), Boundary(D, 4, 12)
    signals.entropy = signals.entropy.double()
    with pytest.raises(ValueError, match=r"entropy is \[15\] torch.float64.*\[15\] torch.float32"):
        signals.select(9, 1)
    with pytest.raises(ValueError, match=r"knots is \[64, 5\]; select_length takes.*select_length_ref"):
        Signals(64, 5).select(9, 1)
    b.ids = b.ids.int()
    with pytest.raises(ValueError, match=r"expert_ids is .*torch.int32.*torch.int64"):
        b.correct()
    b.ids = b.ids[:, :0]
    with pytest.raises(ValueError, match=r"expert_ids is \[16, 0\]; correct_length takes"):
        b.correct()
    with pytest.raises(ValueError, match=r"remaining is .*torch.int32.*torch.int64"):
        fix_length(2, on_device(2), on_device(0), on_device(0), block=16)


def test_ratio_kernel_refuses_what_it_would_read_wrongly():
    pytest.importorskip("triton")
    for name, value, message in (
        ("confidence", torch.rand(D, 1), r"confidence is \[15, 1\]; select_ratio takes \[D\].*select_ratio_ref"),
        ("confidence", torch.rand(64), r"confidence is \[64\]; select_ratio takes \[D\].*select_ratio_ref"),
        ("cost", torch.rand(D), r"target_cost is \[15\].*\[17\]"),
        ("fixed", torch.rand(2), r"fixed_cost is \[2\].*\[1\]"),
        ("lengths", torch.arange(2, 17), r"lengths is \[15\] torch.int64.*torch.int32"),
        ("lengths", on_device(), r"lengths is \[0\]; select_ratio takes \[L\] with 1 to D = 15"),
        ("lengths", on_device(*range(2, 18)), r"lengths is \[16\]; select_ratio takes \[L\] with 1 to D = 15"),
        ("knots", torch.rand(D, 4), r"values is \[15, 5\].*\[15, 4\]"),
        ("knots", torch.rand(D, 1), r"knots of the calibration is \[15, 1\].*N >= 2"),
    ):
        ratios = Ratios("evict", D, 5, exact=False)
        setattr(ratios, name, value.to(DEVICE))
        with pytest.raises(ValueError, match=message):
            ratios.select(select_ratio, 9)
    with pytest.raises(ValueError, match=r"confidence is \[15\] torch.float64.*\[15\] torch.float32"):
        Ratios("evict", D, 5, exact=False).select(select_ratio, 9, torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("knots", [0, 33])
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_ratio_kernel_in_a_graph(rule, knots):
    ratios, remaining = Ratios(rule, D, knots, exact=False), torch.tensor([9], device=DEVICE)
    prefix, w0, u = poisoned(D), *(poisoned(1, dtype=torch.int32) for _ in range(2))

    def launch() -> None:
        select_ratio(
            ratios.confidence, remaining, ratios.cost, ratios.fixed, ratios.lengths, prefix, w0, u,
            calibration=(ratios.knots, ratios.values) if knots else None, **ratios.options, overlap=True,
        )  # fmt: skip

    graph = captured(launch)
    for _ in range(20):
        ratios.confidence.copy_(torch.rand(D))
        graph.replay()
        want, *chosen = ratios.select(select_ratio_ref, 9, torch.float64)
        torch.testing.assert_close(prefix.double(), want, rtol=1e-5, atol=1e-6)
        assert [int(w0), int(u)] == chosen


@pytest.mark.gpu
def test_selection_kernels_in_a_graph():
    signals, b = Signals(D, 33), Boundary(D, 8, 256)
    remaining, prefix = torch.tensor([40], device=DEVICE), poisoned(D)
    w0, u, w = (poisoned(1, dtype=torch.int32) for _ in range(3))

    def launch() -> None:
        select_length(
            signals.confidence, signals.entropy, remaining, signals.knots, signals.values, signals.weights,
            signals.cost, signals.rho, prefix, w0, u, extra_tokens=1, overlap=True,
        )  # fmt: skip
        correct_length(w0, u, prefix, b.ids, *b.tables(), w, overlap=True)

    graph = captured(launch)
    for _ in range(20):
        other = Signals(D, 33)
        signals.confidence.copy_(other.confidence)
        signals.entropy.copy_(other.entropy)
        graph.replay()
        want, *_ = signals.truth()
        torch.testing.assert_close(prefix.double(), want, rtol=0, atol=1e-6)
        b.w0, b.u, b.prefix = int(w0), int(u), prefix
        assert b.u == within_budget(b.w0 + 1, 40, W) and int(w) == b.correct()
