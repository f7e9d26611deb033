"""GDN block verification and commit, references and kernels, against the token recurrence in float64."""

import pytest
import torch
from gdn_blocks import (
    DEVICE,
    LARGE,
    SIZES,
    Block,
    error,
    poisoned,
    random_block,
    random_state,
    recurrence,
    with_gate,
)
from support.kernels import needs_triton
from torch import Tensor
from torch.nn import functional as F

from hybridspec_kernels import conv_commit, gdn_commit, gdn_commit_ref, gdn_recurrent_ref, gdn_verify, gdn_verify_ref
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


@pytest.mark.parametrize("value_heads", [32, 48, 64])
@pytest.mark.parametrize("W", [1, 5, 16])
def test_references_at_model_sizes(W, value_heads):
    exact = setup_gdn(W, LARGE.H, value_heads, LARGE.K, LARGE.V)
    outputs, states = gdn_recurrent_ref(**exact)
    single = {name: x.float() for name, x in exact.items()}
    verified, factors = gdn_verify_ref(**single)
    assert error(verified, outputs) <= 1e-5
    for m in {1, W}:
        state = single["state"][None].clone()
        gdn_commit_ref(state, CompactFactors(*(f[None] for f in factors)), torch.tensor([m]))
        assert error(state[0], states[m - 1]) <= 1e-6


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


# ---- the kernels

TAPS = 4


def empty_factors(W: int, sizes, dtype: torch.dtype) -> CompactFactors:
    """Poisoned: what a kernel does not write stays NaN."""
    H, HV, K, V = sizes
    return CompactFactors(poisoned(W, HV, V), poisoned(W, H, K, dtype=dtype), poisoned(W, HV))


def verify_block(block: Block, state: Tensor, sizes, *, rows: int = 16, conv: Tensor | None = None, **options):
    """The verify kernel on buffers of `rows` tokens: outputs `[W, HV, V]` and factors."""
    W = len(block.a)
    out = poisoned(W, sizes.HV, sizes.V, dtype=block.x.dtype)
    factors = empty_factors(rows, sizes, block.x.dtype)
    gdn_verify(*block, state, factors, out, conv_weight=conv, **options)
    return out, factors


def convolved(block: Block, conv: Tensor) -> Block:
    """The block whose x went through the convolution in float64, rounded where the model rounds."""
    rows, weight, W = block.x.double(), conv.double(), len(block.a)
    y = sum(rows[t : t + W] * weight[t] for t in range(len(conv))).to(block.x.dtype)
    return block._replace(x=F.silu(y.double()).to(block.x.dtype))


def committed(state: Tensor, factors: CompactFactors, m: int) -> Tensor:
    """The state after m tokens by the commit kernel."""
    state = state[None].clone()
    gdn_commit(state, CompactFactors(*(f[None] for f in factors)), torch.tensor([m], dtype=torch.int32, device=DEVICE))
    return state[0]


@needs_triton
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("taps", [0, TAPS], ids=["core", "conv"])
def test_verify_kernel_matches_recurrence(W, sizes, taps):
    block, state = random_block(W, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    conv = None
    if taps:
        conv = 0.5 * torch.randn(taps, block.x.shape[1], device=DEVICE)
        block = block._replace(x=torch.randn(taps - 1 + W, block.x.shape[1], device=DEVICE))
    truth, states = recurrence(convolved(block, conv) if taps else block, state, sizes.H)
    before = state.clone()
    out, factors = verify_block(block, state, sizes, conv=conv)
    assert torch.equal(state, before), "S0 is read only"
    assert error(out, truth) <= 1e-5
    assert all(f[W:].isnan().all() for f in factors), "rows beyond w belong to nobody"
    for m in {1, (W + 1) // 2, W}:
        assert error(committed(state, factors, m), states[m - 1]) <= 1e-6
    # a round launched behind the end of its request
    assert torch.equal(committed(state, factors, 0), state)


@needs_triton
@pytest.mark.parametrize("W", [4, 7, 16])
def test_solve_keeps_its_digits_when_keys_repeat(W):
    sizes = SIZES[0]
    block, state = random_block(W, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    # one token over and over, written with full strength and never forgotten: powers of X reach thousands
    block = block._replace(x=block.x[:1].expand(W, -1).contiguous(), b=torch.full_like(block.b, 30.0))
    block = block._replace(a=torch.full_like(block.a, -30.0))
    truth, states = recurrence(block, state, sizes.H)
    out, factors = verify_block(block, state, sizes)
    assert error(out, truth) <= 1e-5
    assert error(committed(state, factors, W), states[-1]) <= 1e-6


@needs_triton
@pytest.mark.parametrize("log_decay", [-30.0, -1e4])
@pytest.mark.parametrize("strength", [-1e4, 1e4])
def test_kernels_stay_finite_under_extreme_gates(log_decay, strength):
    sizes = SIZES[1]
    block, state = with_gate(random_block(16, sizes), 5, log_decay), random_state(sizes.HV, sizes.V, sizes.K)
    block.b.fill_(strength)
    truth, states = recurrence(block, state, sizes.H)
    out, factors = verify_block(block, state, sizes)
    after = committed(state, factors, 16)
    assert out.isfinite().all() and after.isfinite().all()
    # differences of cumulative log decays near 1e4 carry 1e4 * eps(fp32) = 6e-4
    torch.testing.assert_close(out.double(), truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after.double(), states[-1], rtol=1e-3, atol=1e-3)


@needs_triton
@pytest.mark.parametrize("low, high", [(-40.0, -20.0), (-20.0, -5.0), (-5.0, 5.0), (5.0, 30.0)])
def test_log_decays_keep_their_digits(low, high):
    sizes = SIZES[0]
    block, state = random_block(16, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    block = block._replace(a=torch.rand_like(block.a) * (high - low) + low, dt_bias=torch.zeros_like(block.dt_bias))
    _, factors = verify_block(block, state, sizes)
    exact, _ = gdn_gates_ref(block.a, block.b, block.A_log, block.dt_bias, torch.float64)
    torch.testing.assert_close(factors.g[:16].double(), exact.cumsum(0), rtol=2e-6, atol=0.0)


@needs_triton
@pytest.mark.parametrize("W, V", [(7, 16), (16, 40)])
def test_commit_kernel_matches_reference_for_every_m(W, V):
    L, H, HV, K, C = 3, 2, 4, 16, 1500
    z, k, g = torch.randn(L, W, HV, V), torch.randn(L, W, H, K), -torch.rand(L, W, HV).cumsum(1)
    state, rows = torch.randn(L, HV, V, K), torch.randn(L, TAPS - 1 + W, C)
    factors = CompactFactors(*(t.to(DEVICE) for t in (z, k, g)))
    for m in range(1, W + 1):
        exact, exact_rows = state.double(), rows.clone()
        doubled = CompactFactors(z.double(), k.double(), g.double())
        gdn_commit_ref(exact, doubled, torch.tensor([m]), conv_rows=exact_rows, taps=TAPS)
        got, got_rows = state.to(DEVICE).clone(), rows.to(DEVICE).clone()
        stale = CompactFactors(*(f.clone() for f in factors))
        for f in stale:
            f[:, m:] = float("nan")
        count = torch.tensor([m], dtype=torch.int32, device=DEVICE)
        gdn_commit(got, stale, count, conv_rows=got_rows, taps=TAPS)
        assert error(got, exact.to(DEVICE)) <= 1e-6
        assert torch.equal(got_rows.cpu(), exact_rows), "windows are moved, never recomputed"


@needs_triton
@pytest.mark.parametrize("first, second", [(16, 8), (8, 16), (5, 3)])
def test_kernels_over_two_rounds(first, second):
    sizes = SIZES[2]
    block, start = random_block(first + second, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    truth, states = recurrence(block, start, sizes.H)
    state, outputs = start, []
    for rows in ((0, first), (first, first + second)):
        out, factors = verify_block(block.rows(*rows), state, sizes)
        state = committed(state, factors, rows[1] - rows[0])
        outputs.append(out)
    assert error(torch.cat(outputs), truth) <= 1e-5
    assert error(state, states[-1]) <= 1e-6


@needs_triton
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b, s, f: (b, s.double(), f), "state is"),
        (lambda b, s, f: (b._replace(x=b.x[:, :-1]), s, f), "x is"),
        (lambda b, s, f: (b._replace(a=b.a.t()), s, f), "a is"),
        (lambda b, s, f: (b, s, f._replace(k=f.k.half())), "factors.k is"),
        (lambda b, s, f: (b, s, CompactFactors(*(t[:3] for t in f))), "at least 4"),
        (lambda b, s, f: (b, s, f._replace(k=f.k[:, :2].contiguous())), "share evenly|x is"),
    ],
)
def test_verify_kernel_refuses_what_it_would_misread(change, message):
    sizes = SIZES[0]
    block, state, factors = change(
        random_block(4, sizes), random_state(*sizes[1::2], sizes.K), empty_factors(4, sizes, torch.float32)
    )
    with pytest.raises(ValueError, match=message):
        gdn_verify(*block, state, factors, torch.empty(4, sizes.HV, sizes.V, device=DEVICE))


@needs_triton
def test_verify_kernel_refuses_long_blocks():
    sizes = SIZES[0]
    with pytest.raises(ValueError, match="1 to 16 tokens, got 17"):
        verify_block(random_block(17, sizes), random_state(sizes.HV, sizes.V, sizes.K), sizes, rows=17)


@needs_triton
@pytest.mark.parametrize("rate", [16.0, 148.0])
def test_strong_decay_costs_no_digits(rate):
    sizes = SIZES[0]
    block, state = random_block(16, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    block.A_log.fill_(rate).log_()
    truth, states = recurrence(block, state, sizes.H)
    out, factors = verify_block(block, state, sizes)
    assert error(out, truth) <= 1e-6
    assert error(committed(state, factors, 16), states[-1]) <= 1e-6


@needs_triton
def test_launchers_refuse_parameters_that_are_views():
    sizes = SIZES[0]
    block, state = random_block(4, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    for name in ("A_log", "dt_bias"):
        for bad in (getattr(block, name)[:1].expand(sizes.HV), getattr(block, name)[:2]):
            with pytest.raises(ValueError, match=f"{name} is"):
                verify_block(block._replace(**{name: bad}), state, sizes)


@needs_triton
def test_launchers_refuse_several_devices_and_devices_without_kernels():
    sizes = SIZES[0]
    block, state = random_block(4, sizes), random_state(sizes.HV, sizes.V, sizes.K)
    with pytest.raises(ValueError, match=r"gdn_verify got tensors on \[.*'meta'\]"):
        verify_block(block._replace(a=block.a.to("meta")), state, sizes)


@needs_triton
@pytest.mark.parametrize("count", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor(1)])
def test_commits_refuse_what_is_no_number_of_tokens(count):
    rows = torch.randn(1, 8, 6, device=DEVICE)
    factors = CompactFactors(*(f[None] for f in empty_factors(4, SIZES[0], torch.float32)))
    with pytest.raises(ValueError, match="num_committed is"):
        conv_commit(rows, 4, count.to(DEVICE))
    with pytest.raises(ValueError, match="num_committed is"):
        gdn_commit(random_state(1, *SIZES[0][1::2], SIZES[0].K), factors, count.to(DEVICE))


@needs_triton
def test_commits_refuse_windows_that_rows_cannot_hold():
    rows, count = torch.randn(1, 3, 8, device=DEVICE), torch.tensor([1], dtype=torch.int32, device=DEVICE)
    for taps in (0, 9):
        with pytest.raises(ValueError, match=f"3 rows a layer for a convolution of {taps} taps"):
            conv_commit(rows, taps, count)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes, dtype",
    [
        *((LARGE._replace(HV=heads), torch.bfloat16) for heads in (32, 48, 64)),
        (LARGE, torch.float16),
        (LARGE, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("taps", [0, TAPS], ids=["core", "conv"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8, 9, 16])
def test_kernels_at_model_sizes(W, sizes, dtype, taps):
    outputs_bound, state_bound = (1e-5, 1e-6) if dtype == torch.float32 else (1.8e-3, 1e-4)
    block, state = random_block(W, sizes, dtype), random_state(sizes.HV, sizes.V, sizes.K)
    conv = None
    if taps:
        conv = (0.5 * torch.randn(taps, block.x.shape[1], device=DEVICE)).to(dtype)
        block = block._replace(x=torch.randn(taps - 1 + W, block.x.shape[1], device=DEVICE).to(dtype))
    truth, states = recurrence(convolved(block, conv) if taps else block, state, sizes.H)
    out, factors = verify_block(block, state, sizes, conv=conv, overlap=True)
    assert error(out, truth) <= outputs_bound
    assert error(committed(state, factors, W), states[-1]) <= state_bound
