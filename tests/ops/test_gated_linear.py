"""A GDN layer's gated norm and output projection against float64 and against the models' own norms."""

import pytest
import torch
from gdn_blocks import DEVICE, error, mostly_equal, poisoned
from support.kernels import needs_triton
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from hybridspec_kernels.dense.gated_linear import gated_linear, gated_linear_ref, gated_rms_norm_ref
from hybridspec_kernels.dense.linear import linear, linear_parts

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6


def random_layer(w, HV, V, N, dtype=torch.float32, wide_norm=False):
    """x, gate, norm weight and weight; gates reach where SiLU is nearly 0 and nearly its argument."""
    norm_weight, weight = torch.randn(V), torch.randn(N, HV * V) * (HV * V) ** -0.5
    layer = torch.randn(w, HV, V).to(dtype), (3 * torch.randn(w, HV * V)).to(dtype), norm_weight, weight.to(dtype)
    return tuple(t.to(DEVICE) for t in (*layer[:2], norm_weight if wide_norm else norm_weight.to(dtype), layer[3]))


def buffer(parts, w, N, dtype):
    """`[P, w, N]`, fp32 (float64 for that), or without parts `[w, N]`."""
    wide = torch.promote_types(dtype, torch.float32)
    return poisoned(parts, w, N, dtype=wide) if parts else poisoned(w, N, dtype=dtype)


def run(op, layer, parts=None):
    """The kernel's or the reference's output."""
    x, weight = layer[0], layer[3]
    out = buffer(parts, len(x), len(weight), x.dtype)
    op(*layer, out, eps=EPS)
    return out


def double(layer):
    return tuple(t.double() for t in layer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide_norm", [False, True])
@pytest.mark.parametrize("module", [Qwen3_5MoeRMSNormGated, Qwen3NextRMSNormGated])
def test_reference_rounds_as_the_models(module, wide_norm, dtype):
    norm = module(16, EPS).to(torch.float32 if wide_norm else dtype)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(5, 6, 16).to(dtype), torch.randn(5, 96).to(dtype)
    want = norm(x.view(-1, 16), gate.view(-1, 16)).view(5, 96)
    assert torch.equal(gated_rms_norm_ref(x, gate, norm.weight.detach(), EPS), want)


# heads that are no power of two, heads narrower than a tile, parts that are short and parts that are empty
SIZES = [(1, 6, 16, 40, None), (5, 3, 12, 33, 2), (16, 4, 96, 20, 8), (2, 5, 130, 7, 2), (3, 9, 32, 70, 4)]


@needs_triton
@pytest.mark.parametrize("w, HV, V, N, parts", SIZES)
def test_matches_float64(w, HV, V, N, parts):
    layer = random_layer(w, HV, V, N)
    got, exact = run(gated_linear, layer, parts), run(gated_linear_ref, double(layer), parts)
    assert error(got, exact) <= 1e-6
    if parts:
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
        assert error(got.sum(0), run(gated_linear_ref, double(layer))) <= 1e-6


@needs_triton
@pytest.mark.parametrize("wide_norm", [False, True])
def test_rounds_as_the_reference(wide_norm):
    # the interpreter rounds to bf16 towards zero
    x, gate, norm_weight, _ = random_layer(4, 5, 48, 1, torch.float16, wide_norm)
    # with the identity as weight the output is the norm as the products see it
    got = run(gated_linear, (x, gate, norm_weight, torch.eye(240, device=DEVICE).half()))
    assert mostly_equal(got, gated_rms_norm_ref(x, gate, norm_weight, EPS))
    assert not mostly_equal(got, gated_rms_norm_ref(x.float(), gate.float(), norm_weight.float(), EPS).half())


# sizes with which both kernels sum in the same order
SAME_ORDER = [
    (torch.float32, 64, 8, 40, 4),
    (torch.float32, 64, 5, 33, None),
    (torch.float16, 128, 16, 520, 8),
    (torch.float16, 256, 3, 7, None),
]


@needs_triton
@pytest.mark.parametrize("wide_norm", [False, True])
@pytest.mark.parametrize("dtype, V, HV, N, parts", SAME_ORDER)
def test_is_the_norm_then_linear_bit_for_bit(dtype, V, HV, N, parts, wide_norm):
    _, _, norm_weight, weight = random_layer(2, HV, V, N, dtype, wide_norm)
    # squares and their sums are exact for small whole numbers, and so is SiLU for gates from 24 on
    x = torch.randint(-3, 4, (2, HV, V), device=DEVICE).to(dtype)
    gate = 24.0 * torch.randint(0, 3, (2, HV * V), device=DEVICE).to(dtype)
    normed, want = gated_rms_norm_ref(x, gate, norm_weight, EPS), buffer(parts, 2, N, dtype)
    linear(normed, (weight,), want)
    assert torch.equal(run(gated_linear, (x, gate, norm_weight, weight), parts), want)


@needs_triton
def test_refuses_what_it_would_read_wrongly():
    x, gate, norm_weight, weight = random_layer(2, 3, 16, 8, torch.float16)
    out = poisoned(2, 8, dtype=torch.float16)
    for message, change in {
        r"x is \[17, 3, 16\]; .* 1 to 16 tokens": {"x": x.repeat(9, 1, 1)[:17]},
        r"x is \[2, 48\]; .*\[w, HV, V\]": {"x": gate},
        "x is torch.float64": {"x": x.double()},
        r"gate is \[2, 3, 16\]": {"gate": x},
        "norm_weight is .*torch.bfloat16": {"norm_weight": norm_weight.bfloat16()},
        r"norm_weight is \[15\]": {"norm_weight": norm_weight[:15].float()},
        r"weight is \[8, 47\]": {"weight": weight[:, :47].contiguous()},
        "weight is .*torch.float32": {"weight": weight.float()},
        "out is .*torch.float32": {"out": out.float()},
        r"out is \[2, 2, 8\] torch.float16": {"out": out.repeat(2, 1, 1)},
    }.items():
        given = {"x": x, "gate": gate, "norm_weight": norm_weight, "weight": weight, "out": out} | change
        with pytest.raises(ValueError, match=message):
            gated_linear(**given, eps=EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("HV, N", [(32, 2048), (64, 3072), (48, 5120)])
def test_at_model_sizes(HV, N, dtype, bound):
    identity = torch.eye(HV * 128, device=DEVICE).to(dtype)
    for w in (1, 2, 5, 16):
        for wide_norm in (False, True):
            layer = random_layer(w, HV, 128, N, dtype, wide_norm)
            normed, want = run(gated_linear, (*layer[:3], identity)), gated_rms_norm_ref(*layer[:3], EPS)
            assert error(normed, want.double()) <= 1e-6 if dtype == torch.float32 else mostly_equal(normed, want)
            exact = normed.double() @ layer[3].double().T
            for parts, most in ((None, bound), (linear_parts(N, HV * 128), 1e-5)):
                out = buffer(parts, w, N, dtype)
                gated_linear(*layer, out, eps=EPS, overlap=True)
                assert error(out.sum(0) if parts else out, exact) <= most
