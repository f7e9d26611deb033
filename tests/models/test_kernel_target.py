"""Target and drafter in kernels against the same layers run module by module: tokens, features and every cache."""

import copy
from dataclasses import replace

import pytest
import torch
from support.harness import CAPACITY, filled_cache, make_round
from support.kernels import needs_triton
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target
from torch import nn

from hybridspec_generation.decode import read_round
from hybridspec_generation.gdn import make_gdn
from hybridspec_generation.policies import FixedLength
from hybridspec_generation.round import run_round, verify
from hybridspec_generation.round.proposal import propose
from hybridspec_generation.round.stage0 import stage0
from hybridspec_hf.drafters.block import DraftContext
from hybridspec_hf.drafters.kernel_drafter import KernelDrafter
from hybridspec_hf.models import kernel_target as kernel_module
from hybridspec_hf.models import split_target
from hybridspec_hf.models.kernel_support import why_not
from hybridspec_hf.models.kernel_target import KernelTarget
from hybridspec_kernels import moe_route

LAYERS = (0, 2, 3)


def kernel_cache(model, target, prompt, drafter=None):
    """A prefilled cache whose GDN layers run in kernels, in the interpreter too."""
    cache, anchor = filled_cache(model, target, prompt, drafter)
    gdn = make_gdn("block", cache.gdn.shape, block=cache.block, kernels=True)
    gdn.conv.copy_(cache.gdn.conv), gdn.state.copy_(cache.gdn.state)
    cache.gdn = gdn
    return cache, anchor


def in_kernels(model, drafter, prompt, budget, policy):
    """A prefilled round of `KernelTarget` and `KernelDrafter`."""
    r = make_round(model, drafter, prompt, budget=budget, policy=policy)
    target = split_target(model, LAYERS)
    bound = KernelDrafter(drafter, target.embed_tokens, target.lm_head, DraftContext.allocate(drafter, CAPACITY))
    cache, _ = kernel_cache(model, target, prompt, bound)
    kernel_target = KernelTarget(target, cache)
    kernel_target.start_request()
    return replace(r, target=kernel_target, drafter=bound, cache=cache)


def committed(r):
    """What a request has committed of every cache."""
    n, cache, drafter = int(r.cache.length), r.cache, r.drafter
    attention = (cache.keys[:, :, :n], cache.values[:, :, :n])
    return *attention, cache.gdn.states(), cache.gdn.windows(), drafter.keys[..., :n, :], drafter.values[..., :n, :]


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_equal_the_eager_ones(family, device):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are not interpreted here")
    model = tiny_target(family, gain=1.0).to(device)
    drafter = tiny_drafter(model, gain=1.0, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    drafter = drafter.to(device)
    prompt = torch.randint(1, 90, (1, 7), device=device)
    eager = make_round(model, drafter, prompt, budget=60, policy=FixedLength(16))
    kernels = in_kernels(model, drafter, prompt, 60, FixedLength(16))
    with torch.no_grad():
        for length in (16, 3) if device == "cpu" else (16, 3, 2, 9, 16, 8, 5, 4, 16, 3):
            if bool(eager.state.finished):
                break
            for r in (eager, kernels):
                r.policy.length = length
                run_round(r)
            a, b = kernels.state, eager.state
            assert read_round(a)[1:] == read_round(b)[1:]
            assert torch.equal(a.emitted[: int(a.num_committed)], b.emitted[: int(b.num_committed)])
            assert torch.equal(a.proposal, b.proposal)
            torch.testing.assert_close(a.confidence, b.confidence, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(a.entropy, b.entropy, rtol=1e-3, atol=1e-4)
            w = int(b.verify_length)
            torch.testing.assert_close(a.features[:w], b.features[:w], rtol=1e-3, atol=1e-4)
            for mine, theirs in zip(committed(kernels), committed(eager), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


# of the fp32 caches' norm; bf16 rounds to 0.004 of a number, several times on its way
BF16_ERROR = 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache_after_every_round_in_bf16(family):
    """Kernels and modules from the same state each round: as far from the fp32 model as each other."""
    exact = tiny_target(family, gain=1.0).to("cuda")
    model = copy.deepcopy(exact).to(torch.bfloat16)
    drafter = tiny_drafter(model, gain=1.0).to("cuda")
    prompt = torch.randint(1, 90, (1, 7), device="cuda")
    eager = make_round(model, drafter, prompt, budget=60, policy=FixedLength(16))
    kernels, text, differ = in_kernels(model, drafter, prompt, 60, FixedLength(16)), prompt[0].tolist(), 0
    text.append(int(eager.state.anchor))
    rounds = 0
    with torch.no_grad():
        while not bool(eager.state.finished):
            w = (16, 3, 7, 2, 11)[rounds % 5]
            for r in (eager, kernels):
                r.policy.length = w
                run_round(r)
            rounds += 1
            emitted, other = (
                [int(t) for t in r.state.emitted[: int(r.state.num_committed)]] for r in (eager, kernels)
            )
            if emitted == other:
                for mine, theirs in zip(committed(kernels), committed(eager), strict=True):
                    error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
                    assert error <= BF16_ERROR, (rounds, w)
            else:
                differ += 1
                at = next(i for i, (x, y) in enumerate(zip(emitted, other, strict=False)) if x != y)
                logits = model(input_ids=torch.tensor([text + emitted[:at]], device="cuda")).logits[0, -1].float()
                best = logits.topk(2).values
                assert best[0] - best[1] <= 4 * best[0].abs() * torch.finfo(torch.bfloat16).eps
            text += emitted
            take_over(kernels, eager)
    assert rounds >= 4 and differ <= rounds / 2


def take_over(mine, theirs):
    """Go on from the other round's state."""
    for a, b in ((mine.cache, theirs.cache), (mine.drafter, theirs.drafter)):
        a.keys.copy_(b.keys), a.values.copy_(b.values)
    mine.cache.gdn.state.copy_(theirs.cache.gdn.state), mine.cache.gdn.conv.copy_(theirs.cache.gdn.conv)
    mine.cache.length.copy_(theirs.cache.length)
    for name in ("target_input", "remaining", "readout"):
        getattr(mine.state, name).copy_(getattr(theirs.state, name))


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_5"])
def test_rows_beyond_the_selected_length_are_never_read(family, device, monkeypatch):
    """Graphs run Stage 0 on the whole block, whatever w is; and the router of Layer 0 runs there only."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernels are not interpreted here")
    model = tiny_target(family, gain=1.0).to(device)
    drafter = tiny_drafter(model, gain=1.0).to(device)
    prompt = torch.randint(1, 90, (1, 7), device=device)
    clean, dirty = (in_kernels(model, drafter, prompt, 60, FixedLength(16)) for _ in range(2))
    routed = []

    def counted(*args, choose=True, **options):
        routed.append(choose)
        moe_route(*args, choose=choose, **options)

    monkeypatch.setattr(kernel_module, "moe_route", counted)
    with torch.no_grad():
        for w in (3, 9, 5):
            for r in (clean, dirty):
                propose(r)
                stage0(r, 16)
                assert routed == [True]
                if r is dirty:
                    poison(r, w)
                r.state.verify_length.fill_(w)
                verify(r, w)
                assert routed == [True, False, *[True] * (r.target.num_moe_layers - 1)]
                routed.clear()
            assert torch.equal(clean.state.readout, dirty.state.readout)
            for mine, theirs in zip(committed(dirty), committed(clean), strict=True):
                assert torch.equal(mine, theirs)


def poison(r, w):
    """Overwrite everything that Stage 0 left of the tokens behind the first w."""
    boundary, gdn = r.state.boundary, r.cache.gdn
    for tensor in (boundary.hidden, boundary.residual, boundary.expert_weights, r.target.boundary_front):
        tensor[w:] = float("nan")
    boundary.expert_ids[w:] = 10**6
    for factor in gdn.factors:
        factor[0, w:] = float("nan")
    gdn.conv[0, gdn.shape.taps - 1 + w :] = float("nan")


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
