"""A ring of recent updates beside an older state, folded into it when the ring is full (ReplaySSM)."""

import torch
from torch import Tensor

from hybridspec_kernels import (
    CompactFactors,
    conv_commit,
    conv_commit_ref,
    gdn_replay_commit,
    gdn_replay_commit_ref,
    gdn_replay_verify,
    gdn_replay_verify_ref,
    replay_ref,
    ring_capacity,
)

from .base import GDNBackend, GDNParams, GDNShape


class ReplayGDN(GDNBackend):
    """A state that lags behind the committed tokens by the updates in a ring.

    Attributes:
        ring: z `[L, R, HV, V]`, k `[L, R, H, K]`, g `[L, R, HV]`: updates since `state`, then this round's.
        count: `[1]`, int32, committed updates in the ring.
    """

    name = "replay"
    uneven_commits = True

    @torch.inference_mode(False)
    def __init__(self, shape: GDNShape, *, block: int, kernels: bool | None = None) -> None:
        super().__init__(shape, block=block, kernels=kernels)
        rows = ring_capacity(block)
        self.ring = CompactFactors(
            z=self.state.new_zeros(shape.layers, rows, shape.value_heads, shape.value_dim),
            k=self.conv.new_zeros(shape.layers, rows, shape.key_heads, shape.key_dim),
            g=self.state.new_zeros(shape.layers, rows, shape.value_heads),
        )
        self.count = torch.zeros(1, dtype=torch.int32, device=shape.device)

    def load(self, layer: int, window: Tensor, state: Tensor) -> None:
        """See `GDNBackend.load`; empties the ring."""
        super().load(layer, window, state)
        self.count.zero_()

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        """See `GDNBackend.verify_convolved`."""
        w, heads = len(x), self.shape.key_heads
        ring = CompactFactors(*(buffer[layer] for buffer in self.ring))
        inputs = (x, a, b, params.A_log, params.dt_bias, self.state[layer], ring, self.count, self._out[:w])
        if self.kernels:
            gdn_replay_verify(*inputs, key_heads=heads, overlap=overlap)
        else:
            gdn_replay_verify_ref(*inputs, key_heads=heads)
        return self._out[:w]

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        """See `GDNBackend.commit`: advances the ring, and folds it when another block would not fit."""
        inputs = (self.state, self.ring, self.count, num_committed)
        if self.kernels:
            gdn_replay_commit(*inputs, max_length=self.block, overlap=overlap)
        else:
            gdn_replay_commit_ref(*inputs, max_length=self.block)
        if windows:
            (conv_commit if self.kernels else conv_commit_ref)(self.conv, self.shape.taps, num_committed)

    def states(self) -> Tensor:
        """See `GDNBackend.states`; a copy with the ring folded in."""
        return replay_ref(self.state, self.ring, self.count)

    @property
    def round_buffers(self) -> tuple[Tensor, ...]:
        """The ring and its cursor."""
        return (*self.ring, self.count)
