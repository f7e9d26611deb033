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
    ids, weights = poisoned(w, top_k, dtype=torch.int64), poisoned(w, top_k, dtype=dtype)
    return Routing(ids, weights, torch.zeros(1, dtype=torch.int32, device=DEVICE))


def random_weights(E, D, M, MS, dtype):
    def draw(*size):
        return (torch.randn(*size, device=DEVICE) * size[-1] ** -0.5).to(dtype)

    return ExpertWeights(draw(E, 2 * M, D), draw(E, D, M), draw(D, MS))


def wide(tensors):
    return type(tensors)(*(t.double() if t.is_floating_point() else t for t in tensors))


def check_slots(slots, want, rtol=1e-5):
    count = int(want.used)
    assert int(slots.used) == count
    assert torch.equal(slots.expert[:count], want.expert)
    assert torch.equal(slots.of_pair[: len(want.of_pair)], want.of_pair)
    torch.testing.assert_close(slots.weight[: count + 1].double(), want.weight.double(), rtol=rtol, atol=1e-7)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("w, E, top_k", [s[:3] for s in SIZES])
def test_route_matches_the_router(w, E, top_k, dtype):
    logits = (3 * torch.randn(w, E + 1, device=DEVICE)).to(dtype)
    routing, slots = empty_routing(w, top_k, dtype), ExpertSlots.allocate(w, top_k, logits.device)
    moe_route(logits, routing, slots, experts=logits.shape[-1] - 1)
    want = moe_route_ref(logits[:, :E], top_k)
    picked = logits[:, :E].gather(1, routing.ids)
    # equal logits may come in any order
    assert torch.equal(picked, logits[:, :E].gather(1, want.ids))
    assert all(len(row.unique()) == top_k for row in routing.ids)
    torch.testing.assert_close(routing.weights, want.weights, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    # 16-bit: the interpreter rounds a sigmoid down
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    check_slots(slots, moe_slots_ref(routing.ids, routing.weights.float(), logits[:, E]), rtol)


@needs_triton
def test_logits_in_parts():
    parts, whole = torch.randn(4, 5, 31, device=DEVICE), torch.randn(5, 31, device=DEVICE)
    parts[0] = whole - parts[1:].sum(0)
    results = []
    for logits in (parts, parts.sum(0)):
        routing, slots = empty_routing(5, 3, torch.float32), ExpertSlots.allocate(5, 3, parts.device)
        moe_route(logits, routing, slots, experts=logits.shape[-1] - 1)
        results.append((routing, slots))
    assert torch.equal(results[0][0].ids, results[1][0].ids)
    check_slots(results[0][1], moe_slots_ref(results[1][0].ids, results[1][0].weights, whole[:, 30]), 1e-4)


@needs_triton
def test_ties_go_to_the_first_experts():
    # all equal: the first experts, in order, for every token
    logits, routing = torch.zeros(4, 10, device=DEVICE), empty_routing(4, 3, torch.float32)
    moe_route(logits, routing, None, experts=logits.shape[-1] - 1)
    assert routing.ids.tolist() == [[0, 1, 2]] * 4


@needs_triton
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_never_leave_the_experts(bad):
    logits, routing = torch.randn(3, 13, device=DEVICE), empty_routing(3, 4, torch.float32)
    logits[1] = bad
    logits[2, 3:8] = bad
    slots = ExpertSlots.allocate(3, 4, logits.device)
    moe_route(logits, routing, slots, experts=logits.shape[-1] - 1)
    assert all(len(row.unique()) == 4 and row.min() >= 0 and row.max() < 12 for row in routing.ids)
    count = int(slots.used)
    assert count == len(routing.ids.unique()) and slots.expert[:count].max() < 12
    # the clean token is untouched
    assert torch.equal(routing.ids[0], logits[0, :12].topk(4).indices)


@needs_triton
def test_slots_of_fewer_tokens_without_the_router():
    logits = torch.randn(9, 31, device=DEVICE)
    routing, slots = empty_routing(9, 3, torch.float32), ExpertSlots.allocate(9, 3, logits.device)
    moe_route(logits, routing, None, experts=logits.shape[-1] - 1)
    before = [t.clone() for t in routing]
    for w in (9, 4, 1):
        moe_route(logits[:w], routing, slots, experts=logits.shape[-1] - 1, choose=False)
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
    routing, slots = empty_routing(6, 3, torch.float32), ExpertSlots.allocate(6, 3, hidden.device)
    moe_route(front, routing, slots, experts=12)
    act, outputs, residual = poisoned(19, MAX_TOKENS, 32), poisoned(19, MAX_TOKENS, 48), torch.zeros_like(hidden)
    moe_experts(hidden, slots, 3, weights, front, act, outputs)
    moe_combine_norm(residual, outputs, slots, torch.zeros(48, device=DEVICE), poisoned(6, 48), eps=1e-6)
    torch.testing.assert_close(residual, want, rtol=1e-4, atol=1e-5)


@needs_triton
def test_refusals():
    routing, slots = empty_routing(2, 3, torch.float32), ExpertSlots.allocate(2, 3, torch.device(DEVICE))
    with pytest.raises(ValueError, match="1 to 16 tokens"):
        moe_route(torch.randn(17, 9, device=DEVICE), routing, slots, experts=8)
    with pytest.raises(ValueError, match=r"logits is .*float32.*float16"):
        moe_route(torch.randn(2, 9, device=DEVICE), routing._replace(weights=routing.weights.half()), slots, experts=8)
    with pytest.raises(ValueError, match="room for 4 experts, 2 tokens need 7"):
        moe_route(
            torch.randn(2, 9, device=DEVICE), routing, ExpertSlots.allocate(1, 3, torch.device(DEVICE)), experts=8
        )
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
        moe_route(logits, routing, slots, experts=logits.shape[-1] - 1, overlap=True)
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
