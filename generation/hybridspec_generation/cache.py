"""The target's static cache: attention K/V, convolution rows, GDN states and the round's compact factors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridspec_kernels import CompactFactors, conv_commit_ref, gdn_commit_ref


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of a target's cache.

    Attributes:
        attention_layers, kv_heads, head_dim: the softmax-attention layers (LA, HKV, DH).
        gdn_layers, key_heads, value_heads, key_dim, value_dim: the GDN layers (L, H, HV, K, V).
        conv_taps, conv_channels: their causal convolution (C channels).
        rotary_axes: 3 for the multimodal rotary, else 1.
        dtype, device: of K/V and convolution rows; states and factors are fp32 (fp64 for an fp64 model).
    """

    attention_layers: int
    kv_heads: int
    head_dim: int
    gdn_layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    conv_channels: int
    rotary_axes: int
    dtype: torch.dtype
    device: torch.device

    @property
    def state_dtype(self) -> torch.dtype:
        """Of recurrent states and compact factors."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class TargetCache:
    """Static buffers of one request; every address stays the same from prefill to the last round.

    Attributes:
        keys, values: `[LA, HKV, capacity, DH]`; slots from `length` on are overwritten by the next round.
        conv: `[L, taps-1+W, C]`, the window, then the convolution inputs of this round's tokens.
        state: `[L, HV, V, K]`, fp32, the recurrent states after `length` tokens.
        factors: z `[L, W, HV, V]`, k `[L, W, H, K]`, g `[L, W, HV]`, fp32, of this round's tokens.
        length: `[1]`, int64, number of committed tokens.
        position_offset: `[axes]`, int64, rotary position of the token at slot 0 (not 0 behind an image).
    """

    @torch.inference_mode(False)
    def __init__(self, shape: CacheShape, *, capacity: int, block: int) -> None:
        s, device = shape, shape.device
        self.shape, self.capacity, self.block = shape, capacity, block
        # zeros, because attention over the whole capacity multiplies unused slots by 0: they must be finite
        self.keys = torch.zeros(s.attention_layers, s.kv_heads, capacity, s.head_dim, dtype=s.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        rows = s.conv_taps - 1 + block
        self.conv = torch.zeros(s.gdn_layers, rows, s.conv_channels, dtype=s.dtype, device=device)
        self.state = torch.zeros(
            s.gdn_layers, s.value_heads, s.value_dim, s.key_dim, dtype=s.state_dtype, device=device
        )
        self.factors = CompactFactors(
            z=self.state.new_zeros(s.gdn_layers, block, s.value_heads, s.value_dim),
            k=self.state.new_zeros(s.gdn_layers, block, s.key_heads, s.key_dim),
            g=self.state.new_zeros(s.gdn_layers, block, s.value_heads),
        )
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.position_offset = torch.zeros(s.rotary_axes, dtype=torch.int64, device=device)

    def slots(self, count: int) -> Tensor:
        """`[count]`, int64, the slots of this round's first `count` tokens."""
        return self.length + torch.arange(count, device=self.length.device)

    def conv_rows(self, layer: int, inputs: Tensor) -> Tensor:
        """Store the convolution inputs `[w, C]` of GDN layer `layer`; returns window + inputs `[taps-1+w, C]`."""
        taps, w = self.shape.conv_taps, inputs.shape[0]
        self.conv[layer, taps - 1 : taps - 1 + w] = inputs
        return self.conv[layer, : taps - 1 + w]

    def store_factors(self, layer: int, factors: CompactFactors) -> None:
        """Store the compact factors `[w, ...]` of GDN layer `layer`."""
        for buffer, rows in zip(self.factors, factors, strict=True):
            buffer[layer, : len(rows)] = rows

    def write_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store K and V `[HKV, w, DH]` of this round's tokens in attention layer `layer`."""
        slots = self.slots(keys.shape[1])
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def commit(self, num_committed: Tensor) -> None:
        """Advance every part of the cache through the committed tokens (`[1]`, integer, on the device)."""
        gdn_commit_ref(self.state, self.factors, num_committed)
        conv_commit_ref(self.conv, self.shape.conv_taps, num_committed)
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
        buffers = (self.keys, self.values, self.conv, self.state, *self.factors, self.length, self.position_offset)
        for buffer in buffers:
            buffer.zero_()
