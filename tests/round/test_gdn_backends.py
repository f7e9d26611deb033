"""Every GDN backend in whole rounds: generate's tokens, states of a fresh prefill, PyTorch and kernels alike."""

import gc
import weakref

import pytest
import torch
from support.harness import make_round, plain_text
from support.kernels import needs_triton
from support.policies import RandomLengths
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target

import hybridspec_hf
from hybridspec_generation import decode
from hybridspec_generation.gdn import GDN_BACKENDS, base, make_gdn
from hybridspec_hf.engine import get_engine
from hybridspec_hf.models import split_target


def generate(model, drafter, ids, new_tokens, **config):
    """One call in the mode; the output carries its report."""
    return model.generate(
        input_ids=ids, assistant_model=drafter, generation_mode="hybridspec", do_sample=False,
        max_new_tokens=new_tokens, return_dict_in_generate=True,
        hybridspec_config=hybridspec_hf.HybridSpecConfig(**config),
    )  # fmt: skip


@pytest.mark.parametrize("backend", GDN_BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_generate_the_targets_tokens(family, backend):
    model = tiny_target(family)
    drafter = tiny_drafter(model)
    for length in (1, 4, 9):
        ids = torch.randint(1, 90, (1, length))
        plain = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False)
        for policy in ("full", "static:5"):
            out = generate(model, drafter, ids, 24, policy=policy, gdn_backend=backend)
            assert torch.equal(out.sequences, plain)
            assert out.report.gdn == f"{backend}, PyTorch"
        ar = generate(model, None, ids, 24, gdn_backend=backend)
        assert torch.equal(ar.sequences, plain) and ar.report.gdn.startswith(backend)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; tests/test_exact_gpu.py runs on a GPU")
@pytest.mark.parametrize("backend", GDN_BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_generate_the_targets_tokens(family, backend, monkeypatch):
    monkeypatch.setattr(base, "has_kernels", lambda device: True)
    model = tiny_target(family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    drafter = tiny_drafter(model, target_layer_ids=[0, 1])
    ids = torch.randint(1, 90, (1, 5))
    plain = model.generate(input_ids=ids, max_new_tokens=7, do_sample=False)
    out = generate(model, drafter, ids, 7, policy="full", gdn_backend=backend)
    assert torch.equal(out.sequences, plain)
    assert out.report.gdn == f"{backend}, Triton kernels"


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_with_hooks_runs_its_own_projections(family, monkeypatch):
    monkeypatch.setattr(base, "has_kernels", lambda device: True)
    model = tiny_target(family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    module, seen = model.model.layers[0].linear_attn, []
    layer = module.in_proj_ba if family == "qwen3_next" else module.in_proj_b
    layer.register_forward_hook(lambda *_: seen.append(1))
    ids = torch.randint(1, 90, (1, 5))
    plain = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    seen.clear()
    out = generate(model, None, ids, 4)
    # the prompt, and three rounds
    assert torch.equal(out.sequences, plain) and len(seen) == 4


@pytest.mark.parametrize("backend", GDN_BACKENDS)
def test_states_are_those_of_the_block_backend_over_many_rounds(backend):
    model = tiny_target()
    drafter = tiny_drafter(model)
    prompt = torch.randint(1, 90, (1, 6))
    text = plain_text(model, prompt, 160)
    counts = torch.randint(0, 8, (40,)).tolist()
    options = {"budget": 120, "script": (text, counts)}
    target = split_target(model, (0, 2, 3))
    ours = make_round(model, drafter, prompt, policy=RandomLengths(3), target=target, gdn_backend=backend, **options)
    block = make_round(model, drafter, prompt, policy=RandomLengths(3), target=target, **options)
    with torch.no_grad():
        for got, want in zip(decode(ours), decode(block), strict=True):
            assert got.tokens == want.tokens
            for part in ("states", "windows"):
                a, b = (getattr(r.cache.gdn, part)() for r in (ours, block))
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_memory_for_verification_is_what_the_method_keeps():
    shape = split_target(tiny_target()).cache_shape.gdn
    block, recurrent, replay = (make_gdn(name, shape, block=16) for name in ("block", "recurrent", "replay"))
    tokens = shape.layers * 16
    values, keys = shape.value_heads * shape.value_dim, shape.key_heads * shape.key_dim
    assert block.verification_bytes() == 4 * tokens * (values + keys + shape.value_heads)
    assert recurrent.verification_bytes() == 4 * tokens * values * shape.key_dim
    assert replay.verification_bytes() == 2 * block.verification_bytes() + 4


def test_every_backend_has_its_own_cost_curve():
    model = tiny_target()
    drafter = tiny_drafter(model)
    ids = torch.randint(1, 90, (1, 5))
    for backend in GDN_BACKENDS:
        generate(model, drafter, ids, 4, gdn_backend=backend)
    costs = get_engine(model, drafter).costs
    assert (
        list(costs) == [f"{name}, PyTorch, modules" for name in GDN_BACKENDS]
        and len(set(map(id, costs.values()))) == 3
    )


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_outlives_the_model_that_gave_it_up(family, monkeypatch):
    monkeypatch.setattr(base, "has_kernels", lambda device: True)
    model = tiny_target(family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    generate(model, None, torch.randint(1, 90, (1, 3)), 3)
    module = model.model.layers[0].linear_attn
    layer = module.in_proj_ba if family == "qwen3_next" else module.in_proj_b
    storage = weakref.ref(layer.weight.untyped_storage())
    layer.weight = torch.nn.Parameter(layer.weight.detach().double())
    gc.collect()
    assert storage() is None


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="Unknown gdn_backend"):
        hybridspec_hf.HybridSpecConfig.from_dict({"gdn_backend": ["block"]})
    with pytest.raises(ValueError, match="Unknown gdn_backend 'fast'. Use one of 'block', 'recurrent', 'replay'"):
        hybridspec_hf.HybridSpecConfig(gdn_backend="fast")
