"""What every way to verify the GDN layers shares: sizes, parameters, convolution windows and states."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hybridspec_kernels import (
    INPUT_DTYPES,
    MAX_TOKENS,
    GDNProjection,
    conv_verify,
    conv_verify_ref,
    gdn_project,
    has_kernels,
)

# of keys: beyond, the kernels need more shared memory than every GPU has
MAX_KERNEL_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class GDNShape:
    """Sizes of a model's GDN layers.

    Attributes:
        layers, key_heads, value_heads, key_dim, value_dim: L, H, HV, K, V.
        taps: width of the causal convolution.
        dtype, device: of inputs and outputs; states and updates are fp32 (fp64 for an fp64 model).
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    dtype: torch.dtype
    device: torch.device

    @property
    def channels(self) -> int:
        """C, of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_dtype(self) -> torch.dtype:
        """Of states and compact factors."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class GDNParams(NamedTuple):
    """A layer's parameters besides its projections: conv_weight `[taps, C]`, A_log and dt_bias `[HV]`."""

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor


class Projected(NamedTuple):
    """A layer's projections of w tokens: convolved q | k | v `[w, C]`, output gate `[w, HV*V]`, raw a, b `[w, HV]`."""

    convolved: Tensor
    gate: Tensor
    a: Tensor
    b: Tensor


class GDNBackend(ABC):
    """The GDN layers of one request: static buffers from its prompt to its last round.

    A round verifies every layer once, then commits all layers at once. Results are buffers that the next layer's
    verification overwrites.

    Attributes:
        name: as in `HybridSpecConfig.gdn_backend`.
        uneven_commits: whether a commit costs more in some rounds than in others.
        kernels: whether the Triton kernels run here; else PyTorch does.
        conv: `[L, taps-1+W, C]`, the window, then the convolution inputs of this round's tokens.
        projected: `[W, ·]`, what `project` writes and returns the first rows of.
        state: `[L, HV, V, K]`; see `states` for the states after the committed tokens.
    """

    name: ClassVar[str]
    uneven_commits: ClassVar[bool] = False

    @torch.inference_mode(False)
    def __init__(self, shape: GDNShape, *, block: int, kernels: bool | None = None) -> None:
        s = self.shape = shape
        self.block = block
        fits = s.dtype in INPUT_DTYPES and block <= MAX_TOKENS and s.key_dim <= MAX_KERNEL_WIDTH
        self.kernels = fits and has_kernels(s.device) if kernels is None else kernels
        self.conv = torch.zeros(s.layers, s.taps - 1 + block, s.channels, dtype=s.dtype, device=s.device)
        self.state = torch.zeros(s.layers, s.value_heads, s.value_dim, s.key_dim, dtype=s.state_dtype, device=s.device)
        self._out = self.conv.new_zeros(block, s.value_heads, s.value_dim)
        self.projected = Projected(
            self.conv.new_zeros(block, s.channels),
            self.conv.new_zeros(block, s.value_heads * s.value_dim),
            self.conv.new_zeros(block, s.value_heads),
            self.conv.new_zeros(block, s.value_heads),
        )

    # ---- a round

    def inputs(self, layer: int, w: int) -> Tensor:
        """`[w, C]`, a view: the projection of this round's tokens goes here, before `verify`."""
        first = self.shape.taps - 1
        return self.conv[layer, first : first + w]

    def project(
        self, layer: int, hidden: Tensor, projection: GDNProjection, params: GDNParams, overlap: bool = False
    ) -> Projected:
        """Projections and convolution of `hidden` `[w, D]` in one launch, in place of `inputs`; needs `kernels`."""
        w = len(hidden)
        out = Projected(*(buffer[:w] for buffer in self.projected))
        gdn_project(hidden, projection, params.conv_weight, self._rows(layer, w), *out, overlap=overlap)
        return out

    def verify(self, layer: int, w: int, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False) -> Tensor:
        """Convolve this round's inputs and verify them.

        Args:
            layer: index among the GDN layers.
            a, b: `[w, HV]`, raw gate projections.
            overlap: see `gdn_verify`.

        Returns:
            `[w, HV, V]`, outputs.
        """
        rows, x = self._rows(layer, w), self.projected.convolved[:w]
        if self.kernels:
            conv_verify(rows, params.conv_weight, x, overlap=overlap)
        else:
            x = conv_verify_ref(rows, params.conv_weight)
        return self.verify_convolved(layer, x, a, b, params, overlap)

    @abstractmethod
    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        """`verify` for tokens that are convolved already: x `[w, C]`."""

    @abstractmethod
    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        """Advance all layers, and their windows, through the committed tokens.

        Args:
            num_committed: `[1]`, integer, on the device. windows: whether the convolution windows move too.
            overlap: see `gdn_commit`.
        """

    # ---- what a request starts from, and what tests and benchmarks look at

    def load(self, layer: int, window: Tensor, state: Tensor) -> None:
        """Start a layer from the end of a prompt: window `[taps-1, C]`, state `[HV, V, K]`."""
        self.conv[layer, : self.shape.taps - 1] = window
        self.state[layer] = state

    def windows(self) -> Tensor:
        """`[L, taps-1, C]`, a view: the last inputs of the convolutions."""
        return self.conv[:, : self.shape.taps - 1]

    def states(self) -> Tensor:
        """`[L, HV, V, K]`: the states after the committed tokens."""
        return self.state

    @property
    @abstractmethod
    def round_buffers(self) -> tuple[Tensor, ...]:
        """What is held only to be able to commit: its rows are garbage between rounds."""

    def verification_bytes(self) -> int:
        """Bytes held for verification beyond one state a layer."""
        return sum(buffer.nbytes for buffer in self.round_buffers)

    def reset(self) -> None:
        """Empty everything: nothing of the last request stays, finite or not."""
        for buffer in (self.conv, self.state, *self.round_buffers):
            buffer.zero_()

    def _rows(self, layer: int, w: int) -> Tensor:
        """`[taps-1+w, C]`: window and inputs of a layer."""
        return self.conv[layer, : self.shape.taps - 1 + w]
