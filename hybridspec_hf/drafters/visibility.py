"""Positions → which keys a drafter layer's queries see: the rule, for one decoding block and for training.

A block is anchored at position `a`: the context fills positions `0..a-1`, the block's own rows stand at
`a..a+W-1`. With `q` and `k` the positions of a query and a key:
    full, bidirectional     every context key, every key of the block
    causal                  only `k <= q`
    sliding window `w`      only `q - k < w` (the current token counts), and `k - q < w` where not causal
    window from the block   context keys with `a - k <= w`, and every key of the block that causality allows
"""

from typing import NamedTuple

import torch
from torch import Tensor


class VisibilityRule(NamedTuple):
    """What one drafter layer's queries may see.

    Args:
        causal: whether later positions of the block are hidden.
        window: tokens in reach, the current one included; None if all.
        window_from_block: count the window from the block's anchor (speculators) instead of from each query.
    """

    causal: bool
    window: int | None = None
    window_from_block: bool = False


def in_reach(rule: VisibilityRule, query_positions: Tensor, key_positions: Tensor, anchor: Tensor) -> Tensor:
    """Apply causality and window, by position alone; membership in context or block is the caller's.

    Args:
        rule: the layer's rule.
        query_positions: `[..., T]`, integer.
        key_positions: `[..., S]`, integer.
        anchor: `[..., T]` or `[..., 1]`, integer, the anchor's position of each query's block.

    Returns:
        `[..., T, S]`, bool, True where the key is in reach.
    """
    q, k, a = query_positions[..., :, None], key_positions[..., None, :], anchor[..., :, None]
    reach = (k <= q) if rule.causal else (k == k).expand(torch.broadcast_shapes(q.shape, k.shape))
    if rule.window is None:
        return reach
    if rule.window_from_block:
        return reach & (k >= a - rule.window)
    reach = reach & (q - k < rule.window)
    return reach if rule.causal else reach & (k - q < rule.window)


def block_mask(rule: VisibilityRule, query_positions: Tensor, key_positions: Tensor, context_length: Tensor) -> Tensor:
    """Mask of one block over a key buffer whose slots are positions; needs no length on the host.

    Slots before `context_length` hold the context, the next `T` the block's own keys, and whatever lies
    behind is invisible (it must still be finite: a masked NaN in the values is a NaN in the output).

    Args:
        rule: the layer's rule.
        query_positions: `[T]`, int64, `context_length + arange(T)`: one row for each token of the block.
        key_positions: `[S]`, int64, the position of each slot, usually `arange(capacity)`.
        context_length: `[1]`, int64, tokens in the context, which is also the anchor's position.

    Returns:
        `[1, 1, T, S]`, bool, True where visible.
    """
    reach = in_reach(rule, query_positions, key_positions, context_length)
    written = key_positions < context_length + query_positions.shape[-1]
    return (reach & written)[None, None]


def training_mask(
    rule: VisibilityRule,
    anchors: Tensor,
    context_length: int,
    block_size: int,
    context_valid: Tensor | None = None,
) -> Tensor:
    """Mask of many blocks per sequence over `[context | block 0 | block 1 | ...]`, each as when it is decoded.

    Args:
        rule: the layer's rule.
        anchors: `[B, N]`, int64, the anchor's position of each block.
        context_length: `L`, columns of the shared context, at positions `0..L-1`.
        block_size: `W`, rows of each block.
        context_valid: `[B, L]`, bool, False for padding; None if all columns are tokens.

    Returns:
        `[B, 1, N*W, L + N*W]`, bool, True where visible.
    """
    steps = torch.arange(block_size, device=anchors.device)
    # [B, N*W]
    queries = (anchors[:, :, None] + steps).flatten(1)
    anchor = anchors.repeat_interleave(block_size, dim=1)
    positions = torch.arange(context_length, device=anchors.device).expand(anchors.shape[0], -1)

    context = in_reach(rule, queries, positions, anchor) & (positions[:, None, :] < anchor[:, :, None])
    if context_valid is not None:
        context = context & context_valid[:, None, :]
    block = torch.arange(queries.shape[1], device=anchors.device) // block_size
    own = in_reach(rule, queries, queries, anchor) & (block[:, None] == block[None, :])
    return torch.cat((context, own), dim=-1)[:, None]
