"""GDN block verification and commit against the token-by-token recurrence in float64."""

import pytest
import torch
from torch.nn import functional as F

from hybridspec_kernels import gdn_commit_ref, gdn_recurrent_ref, gdn_verify_ref
from hybridspec_kernels.gdn.gates import gdn_gates_ref
from hybridspec_kernels.gdn.verify import CompactFactors

SHAPES = [
    pytest.param(2, 4, 8, 12, id="H2-HV4-K8-V12"),
    pytest.param(3, 3, 16, 8, id="H3-HV3-K16-V8"),
    pytest.param(1, 6, 5, 7, id="H1-HV6-K5-V7"),
]


def setup_gdn(W, H, HV, K, V, dtype=torch.float64, decay=0.0, seed=0):
    """Random inputs of one layer; `decay` shifts the gates towards forgetting (positive) or keeping (negative)."""
    torch.manual_seed(seed)
    rand = lambda *size: torch.randn(*size, dtype=torch.float64)  # noqa: E731
    inputs = dict(
        q=rand(W, H, K), k=rand(W, H, K), v=rand(W, HV, V), a=rand(W, HV) + decay, b=rand(W, HV),
        A_log=rand(HV) * 0.5, dt_bias=rand(HV), state=0.3 * rand(HV, V, K),
    )  # fmt: skip
    return {name: x.to(dtype) for name, x in inputs.items()}


@pytest.mark.parametrize("H, HV, K, V", SHAPES)
@pytest.mark.parametrize("W", range(1, 17))
def test_verify_matches_recurrence(W, H, HV, K, V):
    inputs = setup_gdn(W, H, HV, K, V)
    outputs, states = gdn_recurrent_ref(**inputs)
    verified, factors = gdn_verify_ref(**inputs)
    torch.testing.assert_close(verified, outputs, rtol=1e-10, atol=1e-12)
    for m in range(1, W + 1):
        state = inputs["state"][None].clone()
        gdn_commit_ref(state, CompactFactors(*(f[None] for f in factors)), torch.tensor([m], dtype=torch.int32))
        torch.testing.assert_close(state[0], states[m - 1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [-8.0, 0.0, 8.0, 30.0])
def test_fp32_error_is_small(decay):
    exact = setup_gdn(16, 2, 4, 32, 32, decay=decay)
    outputs, states = gdn_recurrent_ref(**exact)
    single = {name: x.float() for name, x in exact.items()}
    verified, factors = gdn_verify_ref(**single)
    state = single["state"][None].clone()
    gdn_commit_ref(state, CompactFactors(*(f[None] for f in factors)), torch.tensor([16], dtype=torch.int32))
    assert (verified - outputs).norm() <= 1e-5 * outputs.norm()
    assert (state[0] - states[-1]).norm() <= 1e-6 * states[-1].norm().clamp_min(1e-3)


def test_two_rounds_commit_in_both_orders():
    for first, second in ((16, 7), (7, 16)):
        inputs = setup_gdn(first + second, 2, 4, 8, 12)
        _, states = gdn_recurrent_ref(**inputs)
        state = inputs["state"][None].clone()
        for rows in (slice(0, first), slice(first, first + second)):
            part = {n: x[rows] for n, x in inputs.items() if n in ("q", "k", "v", "a", "b")}
            rest = {n: inputs[n] for n in ("A_log", "dt_bias")}
            _, factors = gdn_verify_ref(**part, **rest, state=state[0])
            count = torch.tensor([rows.stop - rows.start])
            gdn_commit_ref(state, CompactFactors(*(f[None] for f in factors)), count)
        torch.testing.assert_close(state[0], states[-1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gate", [-1e4, -30.0, 0.0])
@pytest.mark.parametrize("beta", [-1e4, 1e4])
def test_extreme_gates_stay_finite(gate, beta):
    inputs = {name: x.float() for name, x in setup_gdn(16, 2, 4, 8, 12).items()}
    # softplus(-gate) is -gate for large values: log decay = gate when A_log = 0
    inputs["A_log"], inputs["dt_bias"] = torch.zeros(4), torch.zeros(4)
    inputs["a"][5] = -gate
    inputs["b"][:] = beta
    outputs, states = gdn_recurrent_ref(**inputs)
    verified, factors = gdn_verify_ref(**inputs)
    state = inputs["state"][None].clone()
    gdn_commit_ref(state, CompactFactors(*(f[None] for f in factors)), torch.tensor([16]))
    assert verified.isfinite().all() and state.isfinite().all()
    # differences of cumulative log decays near 1e4 carry 1e4 * eps(fp32) = 6e-4
    torch.testing.assert_close(verified, outputs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(state[0], states[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("m", [1, 3, 7])
def test_commit_ignores_rejected_rows(m):
    inputs = setup_gdn(8, 2, 4, 8, 12)
    _, factors = gdn_verify_ref(**inputs)
    clean = inputs["state"][None].clone()
    gdn_commit_ref(clean, CompactFactors(*(f[None] for f in factors)), torch.tensor([m]))
    for f in factors:
        f[m:] = float("nan")
    state = inputs["state"][None].clone()
    gdn_commit_ref(state, CompactFactors(*(f[None] for f in factors)), torch.tensor([m]))
    assert torch.equal(state, clean)


def test_prefix_factors_do_not_depend_on_later_tokens():
    inputs = setup_gdn(16, 2, 4, 8, 12)
    _, whole = gdn_verify_ref(**inputs)
    part = {n: x[:6] if n in ("q", "k", "v", "a", "b") else x for n, x in inputs.items()}
    _, prefix = gdn_verify_ref(**part)
    for a, b in zip(whole, prefix, strict=True):
        torch.testing.assert_close(a[:6], b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_beta_rounds_as_in_transformers_and_the_decay_does_not(dtype):
    a, b = torch.randn(2, 16, 4).to(dtype)
    A_log, dt_bias = torch.randn(4), torch.randn(4).to(dtype)
    log_decay, beta = gdn_gates_ref(a, b, A_log, dt_bias, torch.float32)
    assert log_decay.dtype == beta.dtype == torch.float32
    # GatedDeltaNet.forward of transformers, line by line
    assert torch.equal(beta, b.sigmoid().float())
    assert torch.equal(log_decay, -A_log.float().exp() * F.softplus(a.float() + dt_bias))
