"""Token by token, the full state kept after every token, the accepted one copied (SGLang's default verifier)."""

import torch
from torch import Tensor

from hybridspec_kernels import (
    conv_commit,
    conv_commit_ref,
    gdn_recurrent_commit,
    gdn_recurrent_commit_ref,
    gdn_recurrent_verify,
    gdn_recurrent_verify_ref,
)

from .base import GDNBackend, GDNParams, GDNShape


class RecurrentGDN(GDNBackend):
    """Attributes: token_states: `[L, W, HV, V, K]`, fp32, the state after each of this round's tokens."""

    name = "recurrent"

    @torch.inference_mode(False)
    def __init__(self, shape: GDNShape, *, block: int, kernels: bool | None = None) -> None:
        super().__init__(shape, block=block, kernels=kernels)
        self.token_states = self.state.new_zeros(shape.layers, block, *self.state.shape[1:])

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        """See `GDNBackend.verify_convolved`."""
        w, heads = len(x), self.shape.key_heads
        inputs = (
            x,
            a,
            b,
            params.A_log,
            params.dt_bias,
            self.state[layer],
            self.token_states[layer, :w],
            self._out[:w],
        )
        if self.kernels:
            gdn_recurrent_verify(*inputs, key_heads=heads, overlap=overlap)
        else:
            gdn_recurrent_verify_ref(*inputs, key_heads=heads)
        return self._out[:w]

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        """See `GDNBackend.commit`."""
        if self.kernels:
            gdn_recurrent_commit(self.state, self.token_states, num_committed, overlap=overlap)
        else:
            gdn_recurrent_commit_ref(self.state, self.token_states, num_committed)
        if windows:
            (conv_commit if self.kernels else conv_commit_ref)(self.conv, self.shape.taps, num_committed)

    @property
    def round_buffers(self) -> tuple[Tensor, ...]:
        """The states after every token."""
        return (self.token_states,)
