"""Linear layers of few tokens against float64."""

import pytest
import torch
from gdn_blocks import DEVICE, error, poisoned
from support.kernels import needs_triton

from hybridspec_kernels.dense.linear import linear, linear_parts, linear_ref
from hybridspec_kernels.dense.swiglu import swiglu_linear, swiglu_linear_ref


def random_linear(N, D, dtype=torch.float32):
    return (torch.randn(N, D, device=DEVICE) * D**-0.5).to(dtype)


def exact(ref, x, weights, N):
    out = torch.empty(len(x), N, dtype=torch.float64, device=DEVICE)
    ref(x.double(), *weights, out)
    return out


@needs_triton
@pytest.mark.parametrize(
    "w, D, sizes", [(1, 64, (40,)), (5, 48, (33, 1)), (16, 130, (64, 7, 100)), (2, 16, (3, 5, 7, 9))]
)
def test_linear_matches_ref(w, D, sizes):
    x, weights, out = (
        torch.randn(w, D, device=DEVICE),
        tuple(random_linear(n, D) for n in sizes),
        poisoned(w, sum(sizes)),
    )
    linear(x, weights, out)
    assert error(out, exact(linear_ref, x, (tuple(t.double() for t in weights),), sum(sizes))) <= 1e-6


PARTS = [(1, 512, (40,), 2), (5, 700, (33, 1), 4), (3, 130, (16,), 8), (2, 1536, (20,), 4)]


@needs_triton
@pytest.mark.parametrize("w, D, sizes, parts", PARTS)
def test_parts_add_up(w, D, sizes, parts):
    x, weights = torch.randn(w, D, device=DEVICE), tuple(random_linear(n, D) for n in sizes)
    out, want = poisoned(parts, w, sum(sizes)), poisoned(parts, w, sum(sizes))
    linear(x, weights, out)
    linear_ref(x, weights, want)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert error(out.sum(0), exact(linear_ref, x, (tuple(t.double() for t in weights),), sum(sizes))) <= 1e-6


@needs_triton
@pytest.mark.parametrize("D, parts", [(1536, 4), (3072, 8), (2560, 8)])
def test_parts_end_where_the_next_begins(D, parts):
    # 16-bit tiles are wider than a part
    x, weight = torch.randn(2, D, device=DEVICE).half(), random_linear(20, D, torch.float16)
    out, want = poisoned(parts, 2, 20), poisoned(parts, 2, 20, dtype=torch.float64)
    linear(x, (weight,), out)
    linear_ref(x.double(), (weight.double(),), want)
    assert error(out, want) <= 1e-5


@needs_triton
@pytest.mark.parametrize("w, D, N", [(1, 64, 40), (5, 48, 33), (16, 130, 64)])
def test_swiglu_matches_ref(w, D, N):
    x, gate, up, out = torch.randn(w, D, device=DEVICE), random_linear(N, D), random_linear(N, D), poisoned(w, N)
    swiglu_linear(x, gate, up, out)
    assert error(out, exact(swiglu_linear_ref, x, (gate.double(), up.double()), N)) <= 1e-6


@needs_triton
def test_refusals():
    x, weight = torch.randn(2, 32, device=DEVICE), random_linear(8, 32)
    with pytest.raises(ValueError, match=r"weights\[1\] is .*float16"):
        linear(x, (weight, weight.half()), poisoned(2, 16))
    with pytest.raises(ValueError, match="1 to 16 tokens"):
        linear(torch.randn(17, 32, device=DEVICE), (weight,), poisoned(17, 8))
    with pytest.raises(ValueError, match="got 5 weights"):
        linear(x, (weight,) * 5, poisoned(2, 40))
    with pytest.raises(ValueError, match="up is "):
        swiglu_linear(x, weight, weight[:4], poisoned(2, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("D, sizes", [(4096, (2048,)), (2048, (8192, 512, 512)), (2048, (256, 1)), (5120, (17408,))])
def test_linear_at_model_sizes(D, sizes, dtype, bound):
    weights = tuple(random_linear(n, D, dtype) for n in sizes)
    wide = tuple(weight.double() for weight in weights)
    for w in (1, 2, 5, 16):
        x, out = torch.randn(w, D, device=DEVICE).to(dtype), poisoned(w, sum(sizes), dtype=dtype)
        linear(x, weights, out, overlap=True)
        assert error(out, exact(linear_ref, x, (wide,), sum(sizes))) <= bound
        parts = poisoned(linear_parts(sum(sizes), D), w, sum(sizes))
        linear(x, weights, parts, overlap=True)
        assert error(parts.sum(0), exact(linear_ref, x, (wide,), sum(sizes))) <= 1e-5
        if len(sizes) == 1:
            out = poisoned(w, sizes[0], dtype=dtype)
            swiglu_linear(x, weights[0], weights[0], out, overlap=True)
            assert error(out, exact(swiglu_linear_ref, x, wide * 2, sizes[0])) <= 2 * bound
