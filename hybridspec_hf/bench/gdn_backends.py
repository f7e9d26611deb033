"""A name -> one of the GDN verifiers that are compared: our three, and published ones where they are installed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor

from hybridspec_generation.gdn import GDNParams, GDNShape, make_gdn

from .foreign import FlaGDN, ReplaySSMGDN, SGLangGDN


class ComparedGDN(Protocol):
    """What is used here of a `hybridspec_generation.gdn.GDNBackend`, and what an adapter of a published one has.

    Attributes:
        uneven_commits: whether a commit costs more in some rounds than in others.
    """

    uneven_commits: ClassVar[bool]

    def load(self, layer: int, window: Tensor, state: Tensor) -> None:
        """Start from a layer's window `[taps-1, C]` and state `[HV, V, K]`."""

    def inputs(self, layer: int, w: int) -> Tensor:
        """`[w, C]`, a view: where a round's convolution inputs go."""

    def verify(self, layer: int, w: int, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False) -> Tensor:
        """Convolve and verify the rows of `inputs`: outputs `[w, HV, V]`."""

    def verify_convolved(
        self, layer: int, x: Tensor, a: Tensor, b: Tensor, params: GDNParams, overlap: bool = False
    ) -> Tensor:
        """Verify rows `[w, C]` that are convolved already: outputs `[w, HV, V]`."""

    def commit(self, num_committed: Tensor, windows: bool = True, overlap: bool = False) -> None:
        """Advance all layers through the committed tokens (`[1]`, int32, on the device)."""

    def states(self) -> Tensor:
        """`[L, HV, V, K]`, fp32."""

    def windows(self) -> Tensor:
        """`[L, taps-1, C]`."""

    def verification_bytes(self) -> int:
        """Bytes held for verification beyond one state a layer."""


@dataclass(frozen=True)
class Competitor:
    """A verifier of the comparison.

    Attributes:
        build: shape and longest block -> backend; raises what its package raises where it is not installed.
        method: "block", "recurrent", "replay" or "rerun": what it has to move through memory (`gdn_floors`).
        scopes: "core" (gates to state commit) and "conv" (with the convolution and the commit of its window).
        ours: held to the float64 bounds of `gdn_check`, and timed with programmatic launch on and off.
    """

    build: Callable[[GDNShape, int], ComparedGDN]
    method: str
    scopes: tuple[str, ...] = ("core", "conv")
    ours: bool = True


def _ours(name: str, shape: GDNShape, block: int) -> ComparedGDN:
    return make_gdn(name, shape, block=block)


COMPETITORS = {
    "block": Competitor(partial(_ours, "block"), "block"),
    "recurrent": Competitor(partial(_ours, "recurrent"), "recurrent"),
    "replay": Competitor(partial(_ours, "replay"), "replay"),
    "sglang": Competitor(SGLangGDN, "recurrent", ours=False),
    "replayssm": Competitor(ReplaySSMGDN, "replay", ours=False),
    "fla": Competitor(FlaGDN, "rerun", scopes=("core",), ours=False),
}
OURS = tuple(name for name, competitor in COMPETITORS.items() if competitor.ours)
