"""Routing and experts for few tokens against transformers' own block and float64 references."""

import types

import pytest
import torch
from gdn_blocks import DEVICE, error, poisoned
from support.kernels import needs_triton
from torch.nn import functional as F
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from hybridspec_hf.models.kernel_target import expert_weights, front_weights
from hybridspec_kernels.checks import MAX_TOKENS
from hybridspec_kernels.moe.combine import moe_combine_norm, moe_combine_norm_ref
from hybridspec_kernels.moe.experts import ExpertWeights, moe_experts, moe_experts_ref
from hybridspec_kernels.moe.route import ExpertSlots, Routing, moe_route, moe_route_ref, moe_slots_ref

SIZES = [(1, 8, 3, 32, 16, 16), (5, 10, 4, 48, 24, 40), (16, 40, 4, 72, 40, 24), (3, 300, 10, 32, 16, 16)]


def empty_routing(w, top_k, dtype):
    return Routing(poisoned(w, top_k, dtype=torch.int64), poisoned(w, top_k, dtype=dtype))


def empty_slots(w, top_k):
    def numbers(*size):
        return poisoned(*size, dtype=torch.int32)

    S = w * top_k + 1
    return ExpertSlots(numbers(S), poisoned(S, MAX_TOKENS), numbers(1), numbers(w, top_k), numbers(S))


def route(logits, routing, slots, **options):
    """With as many experts as the logits allow, in the routing's dtype."""
    moe_route(logits, routing, slots, experts=logits.shape[-1] - 1, dtype=routing.weights.dtype, **options)


def random_weights(E, D, M, MS, dtype):
    def draw(*size):
        return (torch.randn(*size, device=DEVICE) * size[-1] ** -0.5).to(dtype)

    return ExpertWeights(draw(E, 2 * M, D), draw(E, D, M), draw(D, MS))


def wide(tensors):
    return type(tensors)(*(t.double() if t.is_floating_point() else t for t in tensors))


def rounding(dtype, fp32=1e-6):
    """Relative: the interpreter rounds to 16 bits by cutting."""
    return fp32 if dtype == torch.float32 else 1e-2


def check_slots(slots, want, rtol=1e-5):
    count = int(want.used)
    assert int(slots.used) == count
    assert torch.equal(slots.expert[:count], want.expert)
    assert torch.equal(slots.of_pair[: len(want.of_pair)], want.of_pair)
    assert not slots.ready[: count + 1].any()
    torch.testing.assert_close(slots.weight[: count + 1].double(), want.weight.double(), rtol=rtol, atol=1e-7)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("w, E, top_k", [*(s[:3] for s in SIZES), (2, 70, 40), (2, 1100, 5)])
def test_route_matches_the_router(w, E, top_k, dtype):
    logits = (3 * torch.randn(w, E + 1, device=DEVICE)).to(dtype)
    routing, slots = empty_routing(w, top_k, dtype), empty_slots(w, top_k)
    route(logits, routing, slots)
    want = moe_route_ref(logits[:, :E], top_k)
    picked = logits[:, :E].gather(1, routing.ids)
    # equal logits may come in any order
    assert torch.equal(picked, logits[:, :E].gather(1, want.ids))
    assert all(len(row.unique()) == top_k for row in routing.ids)
    torch.testing.assert_close(routing.weights, want.weights, rtol=rounding(dtype), atol=0)
    check_slots(slots, moe_slots_ref(routing.ids, routing.weights.float(), logits[:, E]), rounding(dtype, 1e-5))


@needs_triton
@pytest.mark.parametrize("w", range(1, 17))
def test_random_shapes_with_ties(w):
    # every number of parts, each with every third number of tokens: experts in one tile or several, lanes to spare
    E, parts = int(torch.randint(1, 141, ())), (w - 1) % 8 + 1
    top_k = min(E, int(torch.randint(1, 13, ())))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[w % 3]
    # sixteenths below 16: their sums are exact in every dtype, and many are equal
    grid = torch.randint(-128, 129, (w, E + 1 + w), device=DEVICE) / 16
    logits, whole = grid.to(dtype), grid
    if parts > 1:
        logits = torch.randint(-64, 65, (parts, w, E + 1 + w), device=DEVICE) / 16
        logits[0] = whole - logits[1:].sum(0)
    routing, slots, only_slots = empty_routing(w, top_k, dtype), empty_slots(w, top_k), empty_slots(w, top_k)
    moe_route(logits, routing, slots, experts=E, dtype=dtype)
    scores, ids = whole[:, :E].double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(routing.ids, ids[:, :top_k]), "the lower of equal experts first"
    weights = scores[:, :top_k].softmax(-1)
    torch.testing.assert_close(routing.weights.double(), weights, rtol=rounding(dtype, 1e-5), atol=1e-7)
    check_slots(slots, moe_slots_ref(routing.ids, routing.weights.float(), whole[:, E]), rounding(dtype, 1e-5))
    # the list alone, and from what was chosen
    moe_route(logits, None, only_slots, experts=E, dtype=dtype)
    chosen, later = empty_routing(w, top_k, dtype), empty_slots(w, top_k)
    moe_route(logits, chosen, None, experts=E, dtype=dtype)
    moe_route(logits, chosen, later, experts=E, dtype=dtype, choose=False)
    count = int(slots.used)
    for other in (only_slots, later):
        assert torch.equal(other.used, slots.used) and torch.equal(other.of_pair, slots.of_pair)
        assert torch.equal(other.expert[:count], slots.expert[:count])
        assert torch.equal(other.weight[: count + 1], slots.weight[: count + 1])
    assert all(map(torch.equal, chosen, routing))


@needs_triton
def test_nothing_is_written_behind_the_tokens():
    logits, routing, slots = torch.randn(3, 51, device=DEVICE), empty_routing(5, 4, torch.float32), empty_slots(5, 4)
    route(logits, routing, slots)
    untouched = empty_routing(5, 4, torch.float32), empty_slots(5, 4)
    for mine, theirs in zip((*routing, slots.of_pair), (*untouched[0], untouched[1].of_pair), strict=True):
        torch.testing.assert_close(mine[3:], theirs[3:], rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(mine[:3].nan_to_num(), theirs[:3].nan_to_num())
    assert slots.weight[13:].isnan().all()
    for name in ("expert", "ready"):
        assert torch.equal(getattr(slots, name)[13:], getattr(untouched[1], name)[13:])


@needs_triton
def test_every_expert_of_many_once():
    # 16 tokens that share nothing: words and slots are full, and experts with the highest bit of a word are among them
    logits = torch.zeros(16, 129, device=DEVICE)
    experts = torch.randperm(128, device=DEVICE).view(16, 8)
    logits.scatter_(1, experts, torch.rand(16, 8, device=DEVICE) + 1)
    routing, slots = empty_routing(16, 8, torch.float32), empty_slots(16, 8)
    route(logits, routing, slots)
    assert int(slots.used) == 128 and torch.equal(slots.expert[:128].cpu(), torch.arange(128, dtype=torch.int32))
    check_slots(slots, moe_slots_ref(routing.ids, routing.weights, logits[:, 128]))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_never_leave_the_experts(bad, dtype):
    logits, routing = torch.randn(3, 13, device=DEVICE).to(dtype), empty_routing(3, 4, dtype)
    logits[1] = bad
    logits[2, 3:8] = bad
    slots = empty_slots(3, 4)
    route(logits, routing, slots)
    assert all(len(row.unique()) == 4 and row.min() >= 0 and row.max() < 12 for row in routing.ids)
    count = int(slots.used)
    assert count == len(routing.ids.unique()) and slots.expert[:count].max() < 12
    # the clean token is untouched
    assert torch.equal(routing.ids[0], logits[0, :12].topk(4).indices)


@needs_triton
def test_slots_of_fewer_tokens_without_the_router():
    logits = torch.randn(9, 31, device=DEVICE)
    routing = empty_routing(9, 3, torch.float32)
    route(logits, routing, None)
    before = [t.clone() for t in routing]
    for w in (9, 4, 1):
        slots = empty_slots(9, 3)
        route(logits[:w], routing, slots, choose=False)
        check_slots(slots, moe_slots_ref(routing.ids[:w], routing.weights[:w], logits[:w, 30]))
    assert all(torch.equal(a, b) for a, b in zip(before, routing, strict=True)), "only read"


@needs_triton
@pytest.mark.parametrize("w, E, top_k, D, M, MS", SIZES)
def test_experts_match_ref(w, E, top_k, D, M, MS):
    weights, hidden = random_weights(E, D, M, MS, torch.float32), torch.randn(w, D, device=DEVICE)
    ids = torch.stack([torch.randperm(E)[:top_k] for _ in range(w)]).to(DEVICE)
    want = moe_slots_ref(ids, torch.rand(w, top_k, device=DEVICE), torch.randn(w, device=DEVICE))
    slots = ExpertSlots.allocate(w, top_k, hidden.device)
    for mine, theirs in zip(slots, want, strict=True):
        mine[: len(theirs)] = theirs
    size, front = w * top_k + 1, torch.randn(3, w, E + 1 + 2 * MS, device=DEVICE)
    act, outputs = poisoned(size, MAX_TOKENS, max(M, MS)), poisoned(size, MAX_TOKENS, D)
    moe_experts(hidden, slots, top_k, weights, front, act, outputs)
    exact = poisoned(size, MAX_TOKENS, D, dtype=torch.float64)
    moe_experts_ref(hidden.double(), wide(want), wide(weights), front.double().sum(0)[:, E + 1 :], exact)
    assert torch.equal(outputs.isnan(), exact.isnan()), "only the rows of tokens that chose the expert"
    assert error(outputs.nan_to_num(), exact.nan_to_num()) <= 1e-6
    # ... and what the tokens make of them
    residual, norm = torch.randn(w, D, device=DEVICE), torch.randn(D, device=DEVICE)
    out, features = poisoned(w, D), poisoned(w, 2 * D)
    want_residual, want_out = residual.double(), poisoned(w, D, dtype=torch.float64)
    moe_combine_norm(residual, outputs, slots, norm, out, eps=1e-6, feature=features[:, D:])
    moe_combine_norm_ref(want_residual, exact, wide(want), norm.double(), want_out, eps=1e-6)
    assert error(residual, want_residual) <= 1e-6 and error(out, want_out) <= 1e-6
    assert torch.equal(features[:, D:], residual)


@needs_triton
def test_block_matches_transformers():
    sizes = {"num_experts": 12, "hidden_size": 48, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
    config = types.SimpleNamespace(
        **sizes, hidden_act="silu", shared_expert_intermediate_size=32, _experts_implementation="eager"
    )
    block = Qwen3_5MoeSparseMoeBlock(config).to(DEVICE)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    hidden = torch.randn(6, 48, device=DEVICE)
    with torch.no_grad():
        want = block(hidden[None])[0]
        front = torch.cat([F.linear(hidden, weight) for weight in front_weights(block)], dim=1)
    weights = ExpertWeights(*(weight.detach() for weight in expert_weights(block)))
    slots = empty_slots(6, 3)
    moe_route(front, None, slots, experts=12, dtype=torch.float32)
    act, outputs, residual = poisoned(19, MAX_TOKENS, 32), poisoned(19, MAX_TOKENS, 48), torch.zeros_like(hidden)
    moe_experts(hidden, slots, 3, weights, front, act, outputs)
    moe_combine_norm(residual, outputs, slots, torch.zeros(48, device=DEVICE), poisoned(6, 48), eps=1e-6)
    torch.testing.assert_close(residual, want, rtol=1e-4, atol=1e-5)


@needs_triton
def test_refusals():
    routing, slots, logits = empty_routing(2, 3, torch.float32), empty_slots(2, 3), torch.randn(2, 9, device=DEVICE)
    with pytest.raises(ValueError, match="1 to 16 tokens"):
        route(torch.randn(17, 9, device=DEVICE), routing, slots)
    with pytest.raises(ValueError, match=r"logits is .*float32.*float16"):
        route(logits, routing._replace(weights=routing.weights.half()), slots)
    with pytest.raises(ValueError, match=r"routing.weights is .*float32.*float16"):
        moe_route(logits.half(), routing, slots, experts=8, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype is torch.float64"):
        moe_route(logits.double(), None, slots, experts=8, dtype=torch.float64)
    with pytest.raises(ValueError, match="room for 4 experts of 1 tokens, 2 tokens need 7"):
        route(logits, routing, empty_slots(1, 3))
    with pytest.raises(ValueError, match="room for 7 experts of 1 tokens"):
        route(logits, routing, slots._replace(of_pair=slots.of_pair[:1]))
    with pytest.raises(ValueError, match=r"slots.of_pair is \[2, 2\]"):
        route(logits, routing, empty_slots(4, 2)._replace(of_pair=slots.of_pair[:, :2].contiguous()))
    with pytest.raises(ValueError, match="routing.ids has 1 rows for 2 tokens"):
        route(logits, empty_routing(1, 3, torch.float32), slots)
    with pytest.raises(ValueError, match="8 columns for 8 experts"):
        moe_route(logits[:, :8].contiguous(), None, slots, experts=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="routing and slots are None"):
        moe_route(logits, None, None, experts=8, dtype=torch.float32)
    for given in ((routing, None), (None, slots)):
        with pytest.raises(ValueError, match="choose=False"):
            moe_route(logits, *given, experts=8, dtype=torch.float32, choose=False)
    weights, act = random_weights(8, 32, 16, 16, torch.float32), poisoned(7, MAX_TOKENS, 16)
    hidden, front = torch.randn(2, 32, device=DEVICE), torch.randn(2, 41, device=DEVICE)
    with pytest.raises(ValueError, match=r"weights.down is .*strides"):
        turned = weights._replace(down=weights.down.transpose(1, 2).contiguous().transpose(1, 2))
        moe_experts(hidden, slots, 3, turned, front, act, poisoned(7, MAX_TOKENS, 32))
    with pytest.raises(ValueError, match="act has room for 3 slots, 2 tokens need 7"):
        moe_experts(hidden, slots, 3, weights, front, act[:3], poisoned(3, MAX_TOKENS, 32))
    with pytest.raises(ValueError, match=r"outputs is \[7, 16, 30\]"):
        moe_experts(hidden, slots, 3, weights, front, act, poisoned(7, MAX_TOKENS, 30))
    with pytest.raises(ValueError, match="front has 31 columns"):
        moe_experts(hidden, slots, 3, weights, front[:, :31].contiguous(), act, poisoned(7, MAX_TOKENS, 32))
    with pytest.raises(ValueError, match="of_pair has 2 rows for 3 tokens"):
        residual = torch.zeros(3, 32, device=DEVICE)
        moe_combine_norm(residual, poisoned(7, 16, 32), slots, residual[0], residual.clone(), eps=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 6e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "E, top_k, D, M, MS", [(256, 8, 2048, 512, 512), (512, 10, 2048, 512, 512), (256, 8, 3072, 1024, 1024)]
)
def test_block_at_model_sizes(E, top_k, D, M, MS, dtype, bound):
    weights = random_weights(E, D, M, MS, dtype)
    for w in (1, 2, 5, 16):
        hidden, logits = torch.randn(w, D, device=DEVICE).to(dtype), torch.randn(w, E + 1, device=DEVICE).to(dtype)
        routing, slots = empty_routing(w, top_k, dtype), ExpertSlots.allocate(16, top_k, hidden.device)
        route(logits, routing, slots, overlap=True)
        want = moe_slots_ref(routing.ids, routing.weights.float(), logits[:, E])
        check_slots(slots, want, 1e-5 if dtype == torch.float32 else 1e-2)
        size = 16 * top_k + 1
        act, outputs = (poisoned(size, MAX_TOKENS, n, dtype=dtype) for n in (max(M, MS), D))
        residual, out, norm = torch.zeros(w, D, device=DEVICE, dtype=dtype), poisoned(w, D, dtype=dtype), hidden[0]
        front = torch.randn(w, E + 1 + 2 * MS, device=DEVICE).to(dtype)
        moe_experts(hidden, slots, top_k, weights, front, act, outputs, overlap=True)
        moe_combine_norm(residual, outputs, slots, norm, out, eps=1e-6, overlap=True)
        exact = poisoned(size, MAX_TOKENS, D, dtype=torch.float64)
        chosen = want.expert.long()
        few = weights._replace(gate_up=weights.gate_up[chosen], down=weights.down[chosen])
        renumbered = want._replace(expert=torch.arange(len(chosen), device=DEVICE), weight=want.weight)
        moe_experts_ref(hidden.double(), wide(renumbered), wide(few), front.double()[:, E + 1 :], exact)
        want_residual, want_out = torch.zeros(w, D, dtype=torch.float64, device=DEVICE), torch.zeros_like(out).double()
        moe_combine_norm_ref(want_residual, exact, wide(want), norm.double(), want_out, eps=1e-6)
        assert error(residual, want_residual) <= bound and error(out, want_out) <= 2 * bound
