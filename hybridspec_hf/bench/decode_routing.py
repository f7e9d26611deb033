"""A target's routers on its own text -> distinct experts by length, and the table and the knob that follow from them.

The knob: every embedding carries a direction that all tokens share, and a part of the experts of each layer answers
to it. The stronger it is, the more experts do neighbouring tokens have in common.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridspec_generation import ExpertTable

from ..calibration.capture import CaptureRounds, routed_experts
from ..calibration.experts import fit_expert_table, routing_correlation

# of the 35B at 16 tokens, by the paper's profile: MoE time over the time that an expert costs
PROFILE_DISTINCT = 60.0
PROFILE_EXPERTS, PROFILE_TOP_K, PROFILE_TOKENS = 256, 8, 16
# the experts that answer to the shared direction would make this part of the distinct ones by themselves
POOL_SHARE = 0.855
BISECTIONS = 14
STRONGEST = 8.0


def independent_experts(experts: float, top_k: int, w: int) -> float:
    """Mean distinct experts of w tokens that choose independently and uniformly."""
    return experts * (1 - (1 - top_k / experts) ** w)


def wanted_distinct(experts: int, top_k: int) -> float:
    """Distinct experts at 16 tokens: 60 for the 35B; as much below independent routing for other routers."""
    profile = PROFILE_DISTINCT / independent_experts(PROFILE_EXPERTS, PROFILE_TOP_K, PROFILE_TOKENS)
    return profile * independent_experts(experts, top_k, PROFILE_TOKENS)


def pool_size(experts: int, top_k: int) -> int:
    """Experts of a layer that answer to the shared direction."""
    wanted = POOL_SHARE * wanted_distinct(experts, top_k)
    sizes = range(top_k, experts + 1)
    return min(sizes, key=lambda size: abs(independent_experts(size, top_k, PROFILE_TOKENS) - wanted))


def routers(model: Any) -> list[Any]:
    """The routers of the MoE layers, in layer order; none for a dense model."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def answer_to(model: Any, direction: Tensor, generator: torch.Generator) -> None:
    """Let a random pool of each layer's experts answer to the shared direction, and the others turn away from it.

    A random router's experts answer by normal numbers, which would leave fewer distinct experts for a few tokens.

    Args:
        direction: `[H]`, fp32, of ones and minus ones.
    """
    for gate in routers(model):
        experts, hidden = gate.weight.shape
        chosen = torch.randperm(experts, generator=generator, device=direction.device)
        answer = torch.full((experts,), -1.0, device=direction.device)
        answer[chosen[: pool_size(experts, gate.top_k)]] = 1.0
        rows = gate.weight.float()
        rows += (answer - rows @ direction)[:, None] * direction / hidden
        gate.weight.copy_(rows)


@torch.no_grad()
def route(model: Any, **inputs: Tensor) -> Tensor:
    """Experts that every MoE layer chooses for a text: `[layers, T, topk]`.

    Args:
        inputs: `input_ids` `[1, T]` or `inputs_embeds` `[1, T, H]`.
    """
    with routed_experts(model.model) as chosen:
        model.model(**inputs, use_cache=False)
    return torch.stack(chosen)


def membership(chosen: Tensor, experts: int) -> Tensor:
    """Whether a token chooses an expert: `[layers, T, topk]` -> `[layers, E, T]`, fp32."""
    layers, tokens, _ = chosen.shape
    member = torch.zeros(layers, tokens, experts, device=chosen.device)
    return member.scatter_(2, chosen, 1.0).transpose(1, 2)


def distinct_experts(chosen: Tensor, experts: int, w: int) -> Tensor:
    """`[layers]`: mean distinct experts over all windows of w consecutive tokens."""
    return F.max_pool1d(membership(chosen, experts), w, stride=1).sum(1).mean(-1)


def distinct_curve(chosen: Tensor, experts: int, lengths: Sequence[int] = range(1, 17)) -> dict[int, float]:
    """Length -> mean distinct experts of a layer."""
    return {w: float(distinct_experts(chosen, experts, w).mean()) for w in lengths}


def bisect_strength(distinct: Callable[[float], float], wanted: float) -> float:
    """The strength at which a falling function has the wanted value.

    Raises:
        RuntimeError: if no strength has it.
    """
    low, high = 0.0, STRONGEST
    if not distinct(high) < wanted < distinct(low):
        raise RuntimeError(f"No strength of the shared direction makes {wanted:.1f} distinct experts of a layer.")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(middle) > wanted else (low, middle)
    return (low + high) / 2


def new_experts(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """New experts that each token of N blocks of a text adds: Layer 0's and the later layers', `[N, W]` each."""
    member = membership(chosen, experts)
    blocks = member[..., : member.shape[-1] // block * block].unflatten(-1, (-1, block)).bool()
    seen = blocks.cumsum(-1) - blocks.long()
    # [layers, N, W]
    new = (blocks & (seen == 0)).sum(1)
    return new[0].cpu(), new[1:].sum(0).cpu()


def expert_table(chosen: Tensor, experts: int, block: int) -> tuple[ExpertTable, float]:
    """The expert table of HybridSpec from a text's routing, and its correlation of Layer 0 with the later layers."""
    layer0, later = new_experts(chosen, experts, block)
    empty = torch.zeros(0)
    rounds = CaptureRounds(empty, empty, empty, layer0, later)
    sizes = {"top_k": chosen.shape[2], "num_moe_layers": chosen.shape[0]}
    return fit_expert_table(rounds, **sizes, source="counted on the random routers"), routing_correlation(rounds)
