"""All tokens of a block in parallel, compact factors kept, accepted states rebuilt in one launch (HybridSpec)."""

import torch
from torch import Tensor

from hybridspec_kernels import CompactFactors, gdn_commit, gdn_commit_ref, gdn_verify, gdn_verify_ref

from .base import GDNBackend, GDNParams, GDNShape


class BlockGDN(GDNBackend):
    """Attributes: factors: z `[L, W, HV, V]`, k `[L, W, H, K]`, g `[L, W, HV]` of this round's tokens."""

    name = "block"

    @torch.inference_mode(False)
    def __init__(self, shape: GDNShape, *, block: int, kernels: bool | None = None) -> None:
        super().__init__(shape, block=block, kernels=kernels)
        self.factors = CompactFactors(
            z=self.state.new_zeros(shape.layers, block, shape.value_heads, shape.value_dim),
            k=self.conv.new_zeros(shape.layers, block, shape.key_heads, shape.key_dim),
            g=self.state.new_zeros(shape.layers, block, shape.value_heads),
        )

    def verify(self, layer: int, w: int, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False) -> Tensor:
        """See `GDNBackend.verify`; convolution and verification are one launch."""
        if not self.kernels:
            return super().verify(layer, w, a, b, params)
        return self._verify(layer, self._rows(layer, w), a, b, params, params.conv_weight, overlap)

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        """See `GDNBackend.verify_convolved`."""
        if self.kernels:
            return self._verify(layer, x, a, b, params, None, overlap)
        s, w = self.shape, len(x)
        size = s.key_heads * s.key_dim
        q, k, v = x.split([size, size, s.value_heads * s.value_dim], dim=-1)
        q, k = q.view(w, s.key_heads, s.key_dim), k.view(w, s.key_heads, s.key_dim)
        out, factors = gdn_verify_ref(
            q, k, v.view(w, s.value_heads, s.value_dim), a, b, params.A_log, params.dt_bias, self.state[layer]
        )
        for buffer, rows in zip(self.factors, factors, strict=True):
            buffer[layer, :w] = rows
        return out

    def _verify(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, conv_weight: Tensor | None, overlap: bool
    ) -> Tensor:
        out = self._out[: len(a)]
        factors = CompactFactors(*(buffer[layer] for buffer in self.factors))
        gdn_verify(
            x, a, b, params.A_log, params.dt_bias, self.state[layer], factors, out,
            conv_weight=conv_weight, overlap=overlap,
        )  # fmt: skip
        return out

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        """See `GDNBackend.commit`: one launch for all layers."""
        rows, taps = (self.conv, self.shape.taps) if windows else (None, 0)
        if self.kernels:
            gdn_commit(self.state, self.factors, num_committed, conv_rows=rows, taps=taps, overlap=overlap)
        else:
            gdn_commit_ref(self.state, self.factors, num_committed, conv_rows=rows, taps=taps)

    @property
    def round_buffers(self) -> tuple[Tensor, ...]:
        """The compact factors."""
        return tuple(self.factors)
