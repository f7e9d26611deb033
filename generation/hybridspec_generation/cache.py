"""The target's static cache: attention K/V, and the GDN layers with their states and convolution windows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .gdn import GDNShape, make_gdn


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of a target's cache.

    Attributes:
        attention_layers, kv_heads, head_dim: the softmax-attention layers (LA, HKV, DH).
        gdn: the GDN layers.
        rotary_axes: 3 for the multimodal rotary, else 1.
        dtype, device: of K/V.
    """

    attention_layers: int
    kv_heads: int
    head_dim: int
    gdn: GDNShape
    rotary_axes: int
    dtype: torch.dtype
    device: torch.device


class TargetCache:
    """Static buffers of one request; every address stays the same from prefill to the last round.

    Attributes:
        keys, values: `[LA, HKV, capacity, DH]`; slots from `length` on are overwritten by the next round.
        gdn: the GDN layers' states, convolution windows and what this round's commit needs.
        length: `[1]`, int64, number of committed tokens.
        clear_rejected: whether a commit zeroes the K/V of rejected tokens, for an attention that reads unused slots.
        position_offset: `[axes]`, int64, rotary position of the token at slot 0 (not 0 behind an image).
    """

    @torch.inference_mode(False)
    def __init__(self, shape: CacheShape, *, capacity: int, block: int, gdn_backend: str = "block") -> None:
        s, device = shape, shape.device
        self.shape, self.capacity, self.block = shape, capacity, block
        # zeros, because attention over the whole capacity multiplies unused slots by 0: they must be finite
        self.keys = torch.zeros(s.attention_layers, s.kv_heads, capacity, s.head_dim, dtype=s.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.gdn = make_gdn(gdn_backend, s.gdn, block=block)
        self.clear_rejected = True
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.position_offset = torch.zeros(s.rotary_axes, dtype=torch.int64, device=device)

    def slots(self, count: int) -> Tensor:
        """`[count]`, int64, the slots of this round's first `count` tokens."""
        return self.length + torch.arange(count, device=self.length.device)

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store K and V `[HKV, w, DH]` of this round's tokens in attention layer `layer`."""
        slots = self.slots(keys.shape[1])
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def commit(self, num_committed: Tensor) -> None:
        """Advance every part of the cache through the committed tokens (`[1]`, integer, on the device)."""
        self.gdn.commit(num_committed)
        if self.clear_rejected:
            self._clear_rejected(num_committed)
        # K/V of the committed tokens are in place already
        self.length += num_committed

    def _clear_rejected(self, num_committed: Tensor) -> None:
        """Zero the K/V of rejected tokens: a NaN or inf there would reach later rounds as 0 * NaN behind the mask."""
        slots = self.slots(self.block)
        kept = (torch.arange(self.block, device=slots.device) < num_committed)[:, None]
        for buffer in (self.keys, self.values):
            rows = buffer.index_select(2, slots)
            buffer.index_copy_(2, slots, torch.where(kept, rows, 0.0))

    def reset(self) -> None:
        """Empty the cache; nothing of the last request stays, finite or not."""
        self.gdn.reset()
        for buffer in (self.keys, self.values, self.length, self.position_offset):
            buffer.zero_()
