"""A prompt through transformers' own forward -> our static cache, the drafter's context and the first token."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    generation_config = in_chunks(generation_config, prompt_length(input_ids, model_kwargs), model_kwargs)
    start = torch.zeros_like(cache.length)

    def append(features: Sequence[Tensor]) -> None:
        if drafter is not None:
            drafter.append(torch.cat(list(features), dim=-1), start)
            start.add_(len(features[0]))

    with observe(target, append) as seen:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
    length = int(outputs.cache.get_seq_length())
    check_prefill(length, prompt_length(input_ids, model_kwargs), target, seen)
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


class Seen(NamedTuple):
    """What hooks saw of the prompt's forward, in one or more chunks.

    Attributes:
        features: the drafter's feature layers that have shown a chunk -> their outputs of it `[T, H]`.
        chunks: for each chunk that all of them have shown, its tokens.
        positions: the rotary's position ids; an adapter may have moved them.
    """

    features: dict[int, Tensor]
    chunks: list[int]
    positions: list[Tensor]


@contextmanager
def observe(target: SplitTarget, take: Callable[[Sequence[Tensor]], None]) -> Iterator[Seen]:
    """Hook the feature layers and the rotary embedding for a forward in this thread.

    Args:
        take: gets the feature layers' outputs of a chunk, in the order of `feature_layers`, once all are there.
    """
    seen = Seen({}, [], [])
    layers, thread = set(target.feature_layers), threading.get_ident()

    def record(layer: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            # another thread may run the same model meanwhile
            if threading.get_ident() != thread:
                return
            seen.features[layer] = output[0]
            if len(seen.features) == len(layers):
                take([seen.features[each] for each in target.feature_layers])
                seen.features.clear()
                seen.chunks.append(output.shape[1])

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


def check_prefill(length: int, expected: int, target: SplitTarget, seen: Seen) -> None:
    """Refuse a forward that did something else than run the prompt's tokens eagerly.

    Raises:
        ValueError: if the cache holds more than the prompt's tokens, or the feature layers did not show their outputs.
    """
    if length != expected:
        raise ValueError(
            f"The prompt has {expected} tokens, but the model's forward cached {length}: it adds virtual tokens "
            "(prompt or prefix tuning?), which HybridSpec cannot place. Use an adapter that changes weights, or drop "
            "generation_mode."
        )
    if target.feature_layers and sum(seen.chunks) != length:
        raise ValueError(
            "The target's forward is compiled, so the layer outputs that the drafter reads cannot be seen. "
            "Load the target without torch.compile, or leave assistant_model out."
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
