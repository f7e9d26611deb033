"""A DFlash drafter bound to a target's embedding and head, with its static context: one block proposal at a time."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_generation.state import Draft

from .dflash import DFlashDrafter
from .visibility import block_mask


class DraftContext(NamedTuple):
    """Static keys and values `[LD, 1, HKV, capacity, DH]` of a drafter's layers, by slot = position."""

    keys: Tensor
    values: Tensor

    @classmethod
    @torch.inference_mode(False)
    def allocate(cls, drafter: DFlashDrafter, capacity: int) -> "DraftContext":
        """Room for `capacity` tokens, the block in flight included."""
        config, weight = drafter.config, drafter.fc.weight
        size = (config.num_hidden_layers, 1, config.num_key_value_heads, capacity, config.head_dim)
        # zeros because masked slots must be finite
        keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        return cls(keys, torch.zeros_like(keys))


class BlockDrafter:
    """Implements `hybridspec_generation.protocols.Drafter` on a DFlash drafter.

    Embedding and head are the target's own modules, borrowed, never copied.

    Args:
        drafter: the loaded drafter.
        embed_tokens, lm_head: the target's modules.
        context: its static context; the block's own keys use the slots behind the committed ones.
    """

    def __init__(self, drafter: DFlashDrafter, embed_tokens: Any, lm_head: Any, context: DraftContext) -> None:
        config = drafter.config
        assert config.block_size is not None and config.mask_token_id is not None
        self.drafter, self.embed_tokens, self.lm_head = drafter, embed_tokens, lm_head
        self.block_size: int = config.block_size
        self.keys, self.values = context
        self.slots = torch.arange(self.keys.shape[3], device=self.keys.device)  # [capacity]
        self.masks = torch.full((self.block_size - 1,), config.mask_token_id, device=self.keys.device)  # [D]

    def append(self, features: Tensor, start: Tensor) -> None:
        """Context keys and values of `features` `[T, A*H]` at slots `start` `[1]`, ... ."""
        positions = start + torch.arange(len(features), device=start.device)
        context = self.drafter.fuse_features(features[None])
        for layer, (keys, values) in enumerate(self.drafter.project_context(context, positions[None])):
            self.keys[layer].index_copy_(2, positions, keys)
            self.values[layer].index_copy_(2, positions, values)

    def propose(self, anchor: Tensor, length: Tensor, draft: Draft) -> None:
        """Draft the D tokens after `anchor` `[1]` at position `length` `[1]`, see `Drafter.propose`."""
        hidden = self.hidden_states(anchor, length)[0, 1:]
        # the head runs in its own dtype: it is the target's, and its input is normalised
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype)).float()
        log_prob = logits.log_softmax(-1)
        confidence, tokens = log_prob.max(-1)
        draft.tokens.copy_(tokens)
        draft.confidence.copy_(confidence.exp())
        draft.entropy.copy_(-(log_prob.exp() * log_prob).sum(-1))

    def hidden_states(self, anchor: Tensor, length: Tensor) -> Tensor:
        """Final hidden states of the block `[1, W, H]`; the block's keys go to the slots behind the context."""
        positions = length + self.slots[: self.block_size]
        hidden = self.embed_tokens(torch.cat([anchor, self.masks]))[None].to(self.keys.dtype)
        rotary = self.drafter.rotary(positions[None])
        masks = {rule: block_mask(rule, positions, self.slots, length) for rule in set(self.drafter.rules)}
        for i, layer in enumerate(self.drafter.layers):
            keys, values = layer.project_block(hidden, rotary)
            self.keys[i].index_copy_(2, positions, keys)
            self.values[i].index_copy_(2, positions, values)
            hidden = layer(hidden, rotary, self.keys[i], self.values[i], masks[self.drafter.rules[i]])
        return self.drafter.norm(hidden)
