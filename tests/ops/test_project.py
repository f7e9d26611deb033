"""The joint producer against four linear layers and a convolution, and its weights against the models' own layers."""

import pytest
import torch
from gdn_blocks import DEVICE, error, poisoned
from support.kernels import needs_triton
from support.tiny_models import FAMILIES, tiny_target

from hybridspec_hf.models import split_target
from hybridspec_kernels import GDNProjection, gdn_project, gdn_project_ref

TAPS = 4


class QuantizedWeight(torch.Tensor):
    """A weight that only shows a dtype."""


def random_projection(D, sizes, dtype):
    """Weights of C, G, HV and HV outputs, their rows shuffled."""
    weights = [(torch.randn(n, D) * D**-0.5).to(dtype).to(DEVICE) for n in sizes]
    return GDNProjection(*weights, torch.cat([torch.randperm(n) for n in sizes]).int().to(DEVICE))


def outputs(w, sizes, rows):
    """rows, x, gate, a, b: written by the producer."""
    C, G, HV, _ = sizes
    return [rows.clone(), *(poisoned(w, n, dtype=rows.dtype) for n in (C, G, HV, HV))]


@needs_triton
@pytest.mark.parametrize("w, D, sizes", [(1, 64, (96, 64, 6, 6)), (5, 48, (100, 36, 3, 3)), (16, 130, (64, 64, 4, 4))])
def test_producer_matches_linear_layers(w, D, sizes):
    projection, conv = random_projection(D, sizes, torch.float32), torch.randn(TAPS, sizes[0], device=DEVICE)
    hidden, rows = torch.randn(w, D, device=DEVICE), torch.randn(TAPS - 1 + w, sizes[0], device=DEVICE)
    got, want = outputs(w, sizes, rows), outputs(w, sizes, rows)
    gdn_project(hidden, projection, conv, *got)
    gdn_project_ref(hidden, projection, conv, *want)
    for a, b in zip(got, want, strict=True):
        assert error(a, b.double()) <= 1e-6
    assert torch.equal(got[0][: TAPS - 1], rows[: TAPS - 1]), "the window is only read"


@needs_triton
def test_producer_refuses_weights_of_another_dtype():
    projection = random_projection(32, (64, 32, 4, 4), torch.float32)
    hidden, conv = torch.randn(2, 32, device=DEVICE), torch.randn(TAPS, 64, device=DEVICE)
    rows = torch.randn(TAPS + 1, 64, device=DEVICE)
    with pytest.raises(ValueError, match="projection.gate is"):
        gdn_project(hidden, projection._replace(gate=projection.gate.half()), conv, *outputs(2, (64, 32, 4, 4), rows))
    with pytest.raises(ValueError, match="1 to 16 tokens, got 17"):
        gdn_project(torch.randn(17, 32, device=DEVICE), projection, conv, *outputs(17, (64, 32, 4, 4), rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_projection_rows_are_those_of_the_model(family):
    # three value heads for a key head: every order of heads shows
    target = split_target(tiny_target(family, linear_num_value_heads=6))
    gdn, params = target.cache_shape.gdn, target.gdn_params[0]
    module = target.mixers[target.layer_types.index("linear_attention")]
    projection = GDNProjection(*target.projection_weights(module), target.gdn_rows[0])
    hidden, w = torch.randn(5, target.hidden_size), 5
    values = gdn.value_heads * gdn.value_dim
    sizes = (gdn.channels, values, gdn.value_heads, gdn.value_heads)
    rows, _, gate, a, b = out = outputs(w, sizes, torch.zeros(gdn.taps - 1 + w, gdn.channels))
    gdn_project_ref(hidden, projection, params.conv_weight, *out)
    want = target.project_gdn(module, hidden)
    for got, name in ((rows[gdn.taps - 1 :], "mixed_qkv"), (gate, "z"), (b, "b"), (a, "a")):
        torch.testing.assert_close(got, getattr(want, name), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_do_more_are_left_to_themselves(family):
    model = tiny_target(family)
    module = model.model.layers[0].linear_attn
    name = "in_proj_qkvz" if family == "qwen3_next" else "in_proj_z"
    layer = getattr(module, name)
    handle = layer.register_forward_hook(lambda *_: None)
    assert split_target(model).gdn_rows[0] is None
    handle.remove()
    assert split_target(model).gdn_rows[0] is not None
    setattr(module, name, torch.nn.Sequential(layer))
    assert split_target(model).gdn_rows[0] is None
    setattr(module, name, layer)
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert split_target(model).gdn_rows[0] is None
    # as quantization does it
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(QuantizedWeight), requires_grad=False)
    assert split_target(model).gdn_rows[0] is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize("D, sizes", [(2048, (8192, 4096, 32, 32)), (3072, (12288, 8192, 64, 64))])
def test_producer_at_model_sizes(D, sizes, dtype, bound):
    projection, conv = random_projection(D, sizes, dtype), (0.5 * torch.randn(TAPS, sizes[0], device=DEVICE)).to(dtype)
    for w in (1, 2, 5, 16):
        hidden = torch.randn(w, D, device=DEVICE).to(dtype)
        rows = torch.randn(TAPS - 1 + w, sizes[0], device=DEVICE).to(dtype)
        got, exact = outputs(w, sizes, rows), outputs(w, sizes, rows.double())
        gdn_project(hidden, projection, conv, *got, overlap=True)
        wide = GDNProjection(*(weight.double() for weight in projection[:4]), projection.row)
        gdn_project_ref(hidden.double(), wide, conv.double(), *exact)
        for a, b in zip(got, exact, strict=True):
            assert error(a, b) <= bound
