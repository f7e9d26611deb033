"""The norm with the residual stream against float64 and against the models' own modules, rounding by rounding."""

import pytest
import torch
from gdn_blocks import DEVICE, error, mostly_equal, poisoned
from support.kernels import needs_triton
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from hybridspec_hf.drafters.modules import DFlashRMSNorm
from hybridspec_kernels.dense.linear import MAX_PARTS
from hybridspec_kernels.norm.add_rms import add_rms_norm, add_rms_norm_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6


def random_delta(parts, w, H, dtype):
    """None, `[w, H]` (parts = 1) or as many fp32 parts."""
    if parts == 0:
        return None
    delta = torch.randn(*((parts,) if parts > 1 else ()), w, H, device=DEVICE)
    return delta.to(dtype) if parts == 1 else delta


def double(tensor):
    """float64, a copy; None stays."""
    return None if tensor is None else tensor.double().clone()


def run_add(residual, delta, weight, zero_centered, kernel):
    """New residual, norm, and the tensor `[w, 3*H]` in whose middle the feature went."""
    residual, out, wide = residual.clone(), torch.full_like(residual, torch.nan), residual.repeat(1, 3)
    w, H = residual.shape
    feature = wide[:, H : 2 * H]
    feature[:] = torch.nan
    kernel(residual, delta, weight, out, eps=EPS, zero_centered=zero_centered, feature=feature)
    return residual, out, wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [Qwen3_5MoeRMSNorm, Qwen3NextRMSNorm, DFlashRMSNorm])
def test_reference_rounds_as_the_models(module, dtype):
    norm = module(96, EPS).to(dtype)
    torch.nn.init.normal_(norm.weight)
    residual, delta = (torch.randn(5, 96).to(dtype) for _ in range(2))
    got = run_add(residual, delta, norm.weight.detach(), module is not DFlashRMSNorm, add_rms_norm_ref)
    assert torch.equal(got[0], residual + delta)
    assert torch.equal(got[1], norm(residual + delta))


@needs_triton
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("parts", [0, 1, 2, MAX_PARTS])
@pytest.mark.parametrize("w, H", [(1, 1), (1, 128), (3, 100), (16, 130)])
def test_norm_matches_float64(w, H, parts, zero_centered):
    residual, delta = torch.randn(w, H, device=DEVICE), random_delta(parts, w, H, torch.float32)
    weight = torch.randn(H, device=DEVICE)
    got = run_add(residual, delta, weight, zero_centered, add_rms_norm)
    exact = run_add(double(residual), double(delta), double(weight), zero_centered, add_rms_norm_ref)
    for a, b in zip(got, exact, strict=True):
        assert error(a, b) <= 1e-6
    assert torch.equal(got[2], torch.cat([residual, got[0], residual], 1)), "only the feature's columns are written"


@needs_triton
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("parts", [0, 1, 2, MAX_PARTS])
def test_norm_rounds_as_the_reference(parts, zero_centered):
    # the interpreter rounds to bf16 towards zero
    dtype = torch.float16
    residual, delta = torch.randn(4, 300, device=DEVICE).to(dtype), random_delta(parts, 4, 300, dtype)
    weight = torch.randn(300, device=DEVICE).to(dtype)
    got = run_add(residual, delta, weight, zero_centered, add_rms_norm)
    want = run_add(residual, delta, weight, zero_centered, add_rms_norm_ref)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    assert mostly_equal(got[1], want[1])
    # each of the two orders has its own numbers
    other = run_add(residual, delta, weight if zero_centered else weight - 1, True, add_rms_norm_ref)
    assert zero_centered or not mostly_equal(got[1], other[1])


@needs_triton
def test_norm_needs_no_feature_and_takes_wide_weights():
    residual, weight = torch.randn(3, 48, device=DEVICE).half(), torch.randn(48, device=DEVICE)
    before, out, want = residual.clone(), *(poisoned(3, 48, dtype=torch.float16) for _ in range(2))
    add_rms_norm(residual, None, weight, out, eps=EPS, zero_centered=True)
    add_rms_norm_ref(before.clone(), None, weight, want, eps=EPS, zero_centered=True)
    assert torch.equal(residual, before)
    assert mostly_equal(out, want)


@needs_triton
def test_norm_refuses_what_it_would_read_wrongly():
    def run(residual, delta, weight, out, zero_centered=True, **options):
        add_rms_norm(residual, delta, weight, out, eps=EPS, zero_centered=zero_centered, **options)

    x, weight, out = torch.randn(2, 32, device=DEVICE), torch.randn(32, device=DEVICE), poisoned(2, 32)
    with pytest.raises(ValueError, match="1 to 16 tokens .* got 17 of 32"):
        run(x.repeat(9, 1)[:17], None, weight, poisoned(17, 32))
    with pytest.raises(ValueError, match="got 1 of 8193"):
        run(poisoned(1, 8193), None, weight, poisoned(1, 8193))
    with pytest.raises(ValueError, match=r"residual is \[32\]"):
        run(x[0], None, weight, out)
    with pytest.raises(ValueError, match="residual is .*torch.float64"):
        run(x.double(), None, weight, out)
    with pytest.raises(ValueError, match="residual is .*strides"):
        run(x.t().contiguous().t(), None, weight, out)
    with pytest.raises(ValueError, match="delta is .*torch.float16"):
        run(x, x.half(), weight, out)
    with pytest.raises(ValueError, match="delta is .*torch.float16"):
        run(x.half(), x.half()[None], weight, out.half())
    with pytest.raises(ValueError, match="delta has 9 parts"):
        run(x, x.repeat(9, 1, 1), weight, out)
    with pytest.raises(ValueError, match="neither residual nor delta"):
        run(None, None, weight, out)
    with pytest.raises(ValueError, match="weight is .*torch.float32"):
        run(x.half(), None, weight, out.half(), zero_centered=False)
    with pytest.raises(ValueError, match="residual is .*torch.float16"):
        run(x, None, weight, out.half())
    for feature in (poisoned(2, 64)[:, ::2], poisoned(2, 33), poisoned(1, 32).expand(2, 32), out.half()):
        with pytest.raises(ValueError, match="feature is .*unit column stride"):
            run(x, None, weight, out, feature=feature)


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("H", [2048, 3072, 5120])
def test_norm_at_model_sizes(H, dtype, bound, zero_centered):
    weight = torch.randn(H, device=DEVICE).to(dtype)
    for w in (1, 2, 5, 16):
        for parts in (0, 1, 2, MAX_PARTS):
            residual, delta = torch.randn(w, H, device=DEVICE).to(dtype), random_delta(parts, w, H, dtype)
            got = run_add(residual, delta, weight, zero_centered, add_rms_norm)
            exact = run_add(double(residual), double(delta), double(weight), zero_centered, add_rms_norm_ref)
            for a, b in zip(got, exact, strict=True):
                assert error(a, b) <= bound
            if dtype != torch.float32:
                want = run_add(residual, delta, weight, zero_centered, add_rms_norm_ref)
                # the order of a sum of parts decides ties, which move the residual by a step, and its norm too
                assert parts > 1 or torch.equal(got[0], want[0])
                assert parts > 1 or mostly_equal(got[1], want[1])


@needs_triton
@pytest.mark.parametrize("parts", [1, 4])
def test_norm_of_a_sum_without_a_residual(parts):
    delta, weight = random_delta(parts, 3, 48, torch.float32), torch.randn(48, device=DEVICE)
    out, want = poisoned(3, 48), poisoned(3, 48, dtype=torch.float64)
    add_rms_norm(None, delta, weight, out, eps=EPS, zero_centered=False)
    add_rms_norm_ref(None, delta.double(), weight.double(), want, eps=EPS, zero_centered=False)
    assert error(out, want) <= 1e-6
