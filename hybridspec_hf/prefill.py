"""A prompt through transformers' own forward -> our static cache, the drafter's context and the first token."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridspec_generation.cache import TargetCache

from .drafters.block import BlockDrafter
from .models import SplitTarget


def prefill(
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    target: SplitTarget,
    cache: TargetCache,
    drafter: BlockDrafter | None,
) -> Tensor:
    """Run the prompt through the model as plain generate does, and take over its cache.

    Args:
        model: the transformers model; `_prefill` prepares text, image and chunked inputs.
        input_ids: `[1, T]`. generation_config, model_kwargs: as generate prepared them.

    Returns:
        The first token, `[1]`, int64: the anchor of the first round.
    """
    with layer_outputs(target) as chunks:
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
    load_cache(outputs.cache, target, cache)
    last_position = rotary_positions(model_kwargs.get("position_ids"), int(cache.length), target)
    cache.position_offset = (last_position + 1 - cache.length).to(cache.length.device)
    if drafter is not None:
        features = torch.cat([torch.cat(layer, dim=0) for layer in chunks], dim=-1)
        drafter.append(features, torch.zeros_like(cache.length))
    return outputs.logits[0, -1:].float().argmax(-1)


@contextmanager
def layer_outputs(target: SplitTarget) -> Iterator[list[list[Tensor]]]:
    """Collect the outputs `[T, H]` of the drafter's feature layers in this thread, a list of chunks per layer."""
    chunks: list[list[Tensor]] = [[] for _ in target.feature_layers]
    thread = threading.get_ident()

    def record(into: list[Tensor]) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            # another thread may run the same model meanwhile
            if threading.get_ident() == thread:
                into.append(output[0])

        return hook

    hooks = [
        target.layers[layer].register_forward_hook(record(into))
        for layer, into in zip(target.feature_layers, chunks, strict=True)
    ]
    try:
        yield chunks
    finally:
        for hook in hooks:
            hook.remove()


def load_cache(source: Any, target: SplitTarget, cache: TargetCache) -> None:
    """Copy transformers' cache of one sequence into ours (its states are `[1, HV, K, V]`, ours `[HV, V, K]`)."""
    length = int(source.get_seq_length())
    for i, kind in enumerate(target.layer_types):
        layer, index = source.layers[i], target.kind_index[i]
        if kind == "full_attention":
            cache.keys[index, :, :length] = layer.keys[0, :, :length]
            cache.values[index, :, :length] = layer.values[0, :, :length]
        else:
            window = cache.shape.conv_taps - 1
            cache.conv[index, :window] = layer.conv_states[0][0, :, -window:].t()
            cache.state[index] = layer.recurrent_states[0][0].transpose(-1, -2)
    cache.length.fill_(length)


def rotary_positions(position_ids: Tensor | None, length: int, target: SplitTarget) -> Tensor:
    """Rotary position of the prompt's last token, `[axes]`: 3 axes for the multimodal rotary, else 1."""
    if position_ids is None:
        return torch.full((target.rotary_axes,), length - 1)
    if position_ids.ndim == 3:
        # [text, time, height, width] x batch x token, or the last three
        position_ids = position_ids[-target.rotary_axes :, 0]
    return position_ids[:, -1].expand(target.rotary_axes)
