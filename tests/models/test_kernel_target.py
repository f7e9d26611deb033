"""Target and drafter in kernels against the same layers run module by module: tokens, features and every cache."""

import pytest
import torch
from support.harness import CAPACITY, filled_cache, make_round
from support.kernels import needs_triton
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target
from torch import nn

from hybridspec_generation.decode import read_round
from hybridspec_generation.gdn import make_gdn
from hybridspec_generation.policies import FixedLength
from hybridspec_generation.round import run_round
from hybridspec_hf.drafters.block import DraftContext
from hybridspec_hf.drafters.kernel_drafter import KernelDrafter
from hybridspec_hf.models import split_target
from hybridspec_hf.models.kernel_support import why_not
from hybridspec_hf.models.kernel_target import KernelTarget

LAYERS = (0, 2, 3)


def kernel_cache(model, target, prompt, drafter=None):
    """A prefilled cache whose GDN layers run in kernels, in the interpreter too."""
    cache, anchor = filled_cache(model, target, prompt, drafter)
    gdn = make_gdn("block", cache.gdn.shape, block=cache.block, kernels=True)
    gdn.conv.copy_(cache.gdn.conv), gdn.state.copy_(cache.gdn.state)
    cache.gdn = gdn
    return cache, anchor


@needs_triton
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_equal_the_eager_ones(family):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_target(family, gain=1.0).to(device)
    drafter = tiny_drafter(model, gain=1.0, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    drafter = drafter.to(device)
    prompt = torch.randint(1, 90, (1, 7), device=device)
    eager = make_round(model, drafter, prompt, budget=60, policy=FixedLength(16))

    target = split_target(model, LAYERS)
    bound = KernelDrafter(drafter, target.embed_tokens, target.lm_head, DraftContext.allocate(drafter, CAPACITY))
    kernels = make_round(model, drafter, prompt, budget=60, policy=FixedLength(16))
    cache, _ = kernel_cache(model, target, prompt, bound)
    kernel_target = KernelTarget(target, cache)
    kernel_target.start_request()
    object.__setattr__(kernels, "target", kernel_target)
    object.__setattr__(kernels, "drafter", bound)
    object.__setattr__(kernels, "cache", cache)

    with torch.no_grad():
        for length in (16, 3):
            for r in (eager, kernels):
                r.policy.length = length
                run_round(r)
            a, b = kernels.state, eager.state
            assert read_round(a)[1:] == read_round(b)[1:]
            assert torch.equal(a.emitted[: int(a.num_committed)], b.emitted[: int(b.num_committed)])
            assert torch.equal(a.proposal, b.proposal)
            torch.testing.assert_close(a.confidence, b.confidence, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(a.entropy, b.entropy, rtol=1e-3, atol=1e-4)
            w, n = int(b.verify_length), int(eager.cache.length)
            torch.testing.assert_close(a.features[:w], b.features[:w], rtol=1e-3, atol=1e-4)
            for mine, theirs in (
                (cache.keys[:, :, :n], eager.cache.keys[:, :, :n]),
                (cache.values[:, :, :n], eager.cache.values[:, :, :n]),
                (cache.gdn.states(), eager.cache.gdn.states()),
                (cache.gdn.windows(), eager.cache.gdn.windows()),
                (bound.keys[..., :n, :], eager.drafter.keys[..., :n, :]),
                (bound.values[..., :n, :], eager.drafter.values[..., :n, :]),
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_modules_can_run_is_left_to_them(family):
    model = tiny_target(family)
    target = split_target(model)
    cache, _ = kernel_cache(model, target, torch.tensor([[3, 4, 5]]))
    assert why_not(target, cache) is None
    attention = target.mixers[target.layer_types.index("full_attention")]
    handle = attention.o_proj.register_forward_hook(lambda *_: None)
    assert "self_attn.o_proj (Linear) is more than" in why_not(target, cache)
    handle.remove()
    inner = target.layers[0].linear_attn.out_proj
    target.layers[0].linear_attn.out_proj = nn.Sequential(inner)
    target.layers[0].linear_attn.out_proj[0].bias = nn.Parameter(torch.zeros(len(inner.weight)))
    assert "out_proj" in why_not(target, cache)
    target.layers[0].linear_attn.out_proj = inner
    inner.bias = None
    target.norm.forward = lambda x: x
    assert "norm (" in why_not(target, cache)
    del target.norm.forward
    target.lm_head.half()
    assert "mix dtypes" in why_not(target, cache)
    target.lm_head.float()
    for module in (target.layers[1].mlp, target.layers[1].post_attention_layernorm):
        handle = module.register_forward_hook(lambda *_: None)
        assert "layers.1." in why_not(target, cache)
        handle.remove()
    mlp = target.layers[1].mlp
    owner = getattr(mlp, "shared_expert", mlp)
    owner.act_fn, act_fn = nn.GELU(), owner.act_fn
    assert "act_fn (GELU)" in why_not(target, cache)
    owner.act_fn = act_fn
    if target.top_k:
        mlp.gate.top_k = 2
        assert "another number of experts" in why_not(target, cache)
        mlp.gate.top_k = target.top_k
        mlp.gate.norm_topk_prob = False
        assert "does not renormalise" in why_not(target, cache)
        mlp.gate.norm_topk_prob = True
    assert why_not(target, cache) is None
    cache.gdn.kernels = False
    assert why_not(target, cache) == "the GDN kernels do not run here"


@needs_triton
@pytest.mark.parametrize(
    "sizes, reason", [({"head_dim": 264}, "264 channels"), ({"mlp_only_layers": [0]}, "is dense")]
)
def test_sizes_and_layouts_that_the_kernels_lack(sizes, reason):
    target = split_target(tiny_target("qwen3_next", **sizes))
    cache, _ = kernel_cache(tiny_target("qwen3_next", **sizes), target, torch.tensor([[3, 4, 5]]))
    assert reason in why_not(target, cache)
