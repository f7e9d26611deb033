"""A prompt through transformers' own forward -> our static cache, the drafter's context and the first token."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridspec_generation.cache import TargetCache
from hybridspec_generation.protocols import Drafter

from .models import SplitTarget

# tokens of a prompt that go through the model at once
PREFILL_CHUNK = 8192
WHOLE_INPUTS = ("inputs_embeds", "pixel_values", "pixel_values_videos", "mm_encoder_outputs")


def prefill(
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    target: SplitTarget,
    cache: TargetCache,
    drafter: Drafter | None,
) -> Tensor:
    """Run the prompt through the model as plain generate does, and take over its cache.

    Args:
        model: the transformers model; `_prefill` prepares text, image and chunked inputs.
        input_ids: `[1, T]`. generation_config, model_kwargs: as generate prepared them.

    Returns:
        The first token, `[1]`, int64: the anchor of the first round.
    """
    expected = prompt_length(input_ids, model_kwargs)
    generation_config = in_chunks(generation_config, expected, model_kwargs)
    with observe(target, drafter, expected) as seen:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
    length = int(outputs.cache.get_seq_length())
    check_prefill(length, expected, drafter, seen)
    load_cache(outputs.cache, length, target, cache)
    # nothing is seen of a compiled forward
    position_ids = seen.positions[-1] if seen.positions else model_kwargs.get("position_ids")
    cache.position_offset.copy_(rotary_positions(position_ids, length, target) + 1 - length)
    return outputs.logits[0, -1:].float().argmax(-1)


def in_chunks(generation_config: Any, length: int, model_kwargs: dict[str, Any]) -> Any:
    """The config with a chunk size for a long prompt that has none, so that its activations stay bounded.

    Images and embeddings cannot be cut by transformers; a caller's own `prefill_chunk_size` is kept.
    """
    whole = [key for key in WHOLE_INPUTS if model_kwargs.get(key) is not None]
    if generation_config.prefill_chunk_size is not None or length <= PREFILL_CHUNK or whole:
        return generation_config
    chunked = copy.copy(generation_config)
    chunked.prefill_chunk_size = PREFILL_CHUNK
    # which transformers would do for chunks alone; the feature layers must be seen
    chunked.disable_compile = True
    return chunked


@dataclass
class Seen:
    """What hooks saw of the prompt's forward, in one or more chunks.

    Attributes:
        tokens: whose features went to the drafter.
        positions: the rotary's position ids; an adapter may have moved them.
    """

    tokens: int = 0
    positions: list[Tensor] = field(default_factory=list)


@contextmanager
def observe(target: SplitTarget, drafter: Drafter | None, expected: int) -> Iterator[Seen]:
    """Hook the rotary embedding, and for a drafter the feature layers, for a forward in this thread.

    The drafter gets a chunk's features as soon as all layers have shown theirs: those of a long prompt would be as
    large as its cache.

    Args:
        expected: tokens of the prompt, for which the drafter has room.

    Raises:
        ValueError: from the forward, if it runs on more tokens.
    """
    seen, chunk, thread = Seen(), dict[int, Tensor](), threading.get_ident()
    layers = target.feature_layers if drafter is not None else ()

    def record(layer: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            # another thread may run the same model meanwhile
            if threading.get_ident() != thread:
                return
            chunk[layer] = output[0]
            if drafter is None or len(chunk) < len(layers):
                return
            features = torch.cat([chunk[each] for each in layers], dim=-1)
            chunk.clear()
            if seen.tokens + len(features) > expected:
                raise ValueError(too_many_tokens(expected, seen.tokens + len(features)))
            drafter.append(features, torch.full((1,), seen.tokens, device=features.device))
            seen.tokens += len(features)

        return hook

    def record_positions(module: Any, args: Any) -> None:
        if threading.get_ident() == thread:
            seen.positions.append(args[1])

    hooks = [target.layers[layer].register_forward_hook(record(layer)) for layer in layers]
    hooks.append(target.rotary_emb.register_forward_pre_hook(record_positions))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def prompt_length(input_ids: Tensor, model_kwargs: dict[str, Any]) -> int:
    """Tokens of the prompt, given as ids `[1, T]` or as embeddings."""
    embeds = model_kwargs.get("inputs_embeds")
    return max(input_ids.shape[1], 0 if embeds is None else embeds.shape[1])


def check_prefill(length: int, expected: int, drafter: Drafter | None, seen: Seen) -> None:
    """Refuse a forward that did something else than run the prompt's tokens eagerly.

    Args:
        length: tokens that it cached. expected: of the prompt.

    Raises:
        ValueError: if it cached others than the prompt's, or the feature layers did not show all outputs.
    """
    if length != expected:
        raise ValueError(too_many_tokens(expected, length))
    if drafter is not None and seen.tokens != expected:
        raise ValueError(
            f"The target's forward is compiled: of {expected} tokens, {seen.tokens} showed the layer outputs that the "
            "drafter reads. Load the target without torch.compile, or leave assistant_model out."
        )


def too_many_tokens(expected: int, found: int) -> str:
    """For the error."""
    return (
        f"The prompt has {expected} tokens, but the model's forward ran {found}: it adds virtual tokens (prompt or "
        "prefix tuning?), which HybridSpec cannot place, or a hook runs the model, too. Use an adapter that changes "
        "weights, remove the hook, or drop generation_mode."
    )


def load_cache(source: Any, length: int, target: SplitTarget, cache: TargetCache) -> None:
    """Copy transformers' cache of one sequence into ours (its states are `[1, HV, K, V]`, ours `[HV, V, K]`)."""
    for i, kind in enumerate(target.layer_types):
        layer, index = source.layers[target.mixers[i].layer_idx], target.kind_index[i]
        if kind == "full_attention":
            cache.keys[index, :, :length] = layer.keys[0, :, :length]
            cache.values[index, :, :length] = layer.values[0, :, :length]
        else:
            window = layer.conv_states[0][0, :, 1 - cache.gdn.shape.taps :].t()
            cache.gdn.load(index, window, layer.recurrent_states[0][0].transpose(-1, -2))
    cache.length.fill_(length)


def rotary_positions(position_ids: Tensor | None, length: int, target: SplitTarget) -> Tensor:
    """Rotary position of the prompt's last token, `[axes]`: 3 axes for the multimodal rotary, else 1."""
    if position_ids is None:
        return torch.full((target.rotary_axes,), length - 1)
    if position_ids.ndim == 3:
        # [text, time, height, width] x batch x token, or the last three
        position_ids = position_ids[-target.rotary_axes :, 0]
    return position_ids[:, -1].expand(target.rotary_axes)
