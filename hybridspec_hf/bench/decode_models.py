"""A shape's name -> a target and its drafter with random weights, made on the device, whose greedy text is known.

`successor` is one random cycle through the whole vocabulary. A token's embedding is a random row of its own, far
larger than what the layers add to it, plus a part that all tokens share. The head's row of `successor[v]` is the row
of v, so the best token after v is `successor[v]` by a wide margin, whatever came before and whichever kernels compute
it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridspec_generation import ExpertTable

from ..drafters.dflash import DFlashDrafter
from .decode_routing import (
    answer_to,
    bisect_strength,
    distinct_curve,
    distinct_experts,
    expert_table,
    route,
    routers,
    wanted_distinct,
)
from .decode_shapes import FAMILIES, SHAPES, Shape, drafter_config, shortened, target_config

# times what a layer adds to the residual stream; a power of two, so that scaling rounds nothing
EMBEDDING_SCALE = 16.0
# how differently tokens hold on to the shared experts: new experts of Layer 0 and of the later layers then correlate
# by about 0.5, as in the paper
TOKEN_SPREAD = 0.4
CALIBRATION_TOKENS = 256
TABLE_TOKENS = 4096
ROWS = 1 << 14


class Routing(NamedTuple):
    """How the target's routers behave.

    Attributes:
        strength: of the shared direction.
        distinct: length -> mean distinct experts of a layer.
        layers: mean distinct experts at 16 tokens in the layer with the fewest and in that with the most.
        table: what HybridSpec's correction reads. correlation: of new experts in Layer 0 with later layers'.
    """

    strength: float
    distinct: dict[int, float]
    layers: tuple[float, float]
    table: ExpertTable
    correlation: float


class RandomPair(NamedTuple):
    """What is measured.

    Attributes:
        target, drafter: transformers' model, in eval mode, and the drafter.
        successor: `[V]`, int64, the greedy next token after each.
        routing: None for a dense target.
    """

    target: Any
    drafter: DFlashDrafter
    successor: Tensor
    routing: Routing | None

    def text(self, tokens: int, start: int = 1) -> Tensor:
        """`[1, tokens]`, int64: a text that the target would write itself."""
        return follow(self.successor, torch.tensor([start], device=self.successor.device), tokens)[None]


def build(
    name: str, device: str | torch.device, dtype: torch.dtype, *, layers: int | None = None, seed: int = 0
) -> RandomPair:
    """A pair of the named shape.

    Args:
        name: key of `SHAPES`. layers: only so many of the target's layers. seed: of all weights.

    Raises:
        ValueError: if the shape is unknown or larger than the GPU's free memory.
    """
    if name not in SHAPES:
        raise ValueError(f"Unknown shape {name!r}: use one of {', '.join(SHAPES)}.")
    shape = SHAPES[name] if layers is None else shortened(SHAPES[name], layers)
    return build_pair(shape, torch.device(device), dtype, seed)


@torch.no_grad()
def build_pair(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> RandomPair:
    """A pair of a shape, see `build`."""
    generator = torch.Generator(device).manual_seed(seed)
    config = target_config(shape)
    with torch.device("meta"):
        model = FAMILIES[shape.family][0](config).to(dtype).eval()
        drafter = DFlashDrafter(drafter_config(shape)).to(dtype).eval()
    check_memory(model, drafter, device)
    for module in (model, drafter):
        module.to_empty(device=device)
        randomize(module, generator)
    restore_rotary(model, config, device)
    direction = torch.randint(0, 2, (config.hidden_size,), generator=generator, device=device) * 2.0 - 1.0
    successor = know_the_text(model, direction, generator)
    routing = correlate(model, successor, direction, generator) if routers(model) else None
    return RandomPair(model, drafter, successor, routing)


def check_memory(model: nn.Module, drafter: nn.Module, device: torch.device) -> None:
    """Raise if the weights alone do not fit."""
    if device.type != "cuda":
        return
    needed = sum(p.numel() * p.itemsize for module in (model, drafter) for p in module.parameters())
    free = torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise ValueError(
            f"The weights take {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB of {device} are free. Measure a part "
            "of the layers (--layers), which leaves the ratios of a layer's costs as they are."
        )


def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Neutral norms, and weights that keep the size of what they multiply."""
    for name, parameter in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        if kind in ("A_log", "dt_bias"):
            parameter.uniform_(-1, 1, generator=generator)
        elif "norm" in name:
            # transformers' RMSNorm multiplies by 1 + weight, the gated one and the drafter's by the weight
            neutral = 1.0 if isinstance(module, DFlashDrafter) or owner.endswith("linear_attn.norm") else 0.0
            parameter.fill_(neutral)
        elif "conv1d" in name:
            parameter.normal_(0, 0.4, generator=generator)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def restore_rotary(model: Any, config: Any, device: torch.device) -> None:
    """The only buffers of these models, which `to_empty` leaves undefined; fp32 as transformers keeps them."""
    rotary = model.model.rotary_emb
    known = {f"model.rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq")}
    unknown = {name for name, _ in model.named_buffers()} - known
    if unknown:
        raise RuntimeError(f"This transformers has buffers that are not initialised here: {sorted(unknown)}.")
    frequencies, rotary.attention_scaling = rotary.compute_default_rope_parameters(config, device=device)
    for name in ("inv_freq", "original_inv_freq"):
        setattr(rotary, name, nn.Buffer(frequencies.float().clone(), persistent=False))


def know_the_text(model: Any, direction: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the cycle, and the embedding and the head that follow it; the shared part is not added yet.

    Args:
        direction: `[H]`, fp32, of ones and minus ones. The head is blind to it.

    Returns:
        `successor`, `[V]`, int64.
    """
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    embedding.normal_(0, 1, generator=generator)
    vocabulary, hidden = embedding.shape
    order = torch.randperm(vocabulary, generator=generator, device=embedding.device)
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    for begin in range(0, vocabulary, ROWS):
        rows = embedding[begin : begin + ROWS].float()
        rows -= (rows @ direction)[:, None] * direction / hidden
        head[successor[begin : begin + ROWS]] = (rows * hidden**-0.5).to(head.dtype)
    embedding.mul_(EMBEDDING_SCALE)
    return successor


def follow(successor: Tensor, start: Tensor, tokens: int) -> Tensor:
    """`[tokens]`: the start `[1]` and what comes after it."""
    text = [start]
    for _ in range(tokens - 1):
        text.append(successor[text[-1]])
    return torch.cat(text)


def correlate(model: Any, successor: Tensor, direction: Tensor, generator: torch.Generator) -> Routing:
    """Add the shared part to the embedding, as strong as the wanted number of distinct experts asks for."""
    embedding, config = model.get_input_embeddings().weight, model.config
    experts, top_k, block = config.num_experts, config.num_experts_per_tok, 16
    answer_to(model, direction, generator)
    # each token's own hold on the shared experts
    hold = torch.empty(len(embedding), device=embedding.device).normal_(1.0, TOKEN_SPREAD, generator=generator)
    text = follow(successor, torch.ones_like(successor[:1]), CALIBRATION_TOKENS)
    shared = EMBEDDING_SCALE * hold[text, None] * direction

    def distinct(strength: float) -> float:
        embeds = (embedding[text].float() + strength * shared).to(embedding.dtype)
        return float(distinct_experts(route(model, inputs_embeds=embeds[None]), experts, block).mean())

    strength = bisect_strength(distinct, wanted_distinct(experts, top_k))
    for begin in range(0, len(embedding), ROWS):
        rows = slice(begin, begin + ROWS)
        shared_rows = strength * EMBEDDING_SCALE * hold[rows, None] * direction
        embedding[rows] = (embedding[rows].float() + shared_rows).to(embedding.dtype)
    # other text than the strength was set on, in pieces: transformers' GDN fallback is slow on long texts
    start = text[-1:]
    pieces = follow(successor, start, TABLE_TOKENS).view(-1, CALIBRATION_TOKENS)
    chosen = torch.cat([route(model, input_ids=piece[None]) for piece in pieces], dim=1)
    by_layer = distinct_experts(chosen, experts, block)
    table, correlation = expert_table(chosen, experts, block)
    extremes = float(by_layer.min()), float(by_layer.max())
    return Routing(strength, distinct_curve(chosen, experts), extremes, table, correlation)
