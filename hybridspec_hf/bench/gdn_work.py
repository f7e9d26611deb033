"""A backend on fixed inputs -> a round that can be captured, and whether its graph computes what it should."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridspec_generation.gdn import GDNShape

from .gdn_backends import COMPETITORS, ComparedGDN
from .gdn_check import BOUNDS, load, place, verify
from .gdn_exact import exact_round, relative_error
from .gdn_inputs import Round, Start, random_inputs

# a published kernel rounds where ours does not; more than this is another function
FOREIGN_BOUNDS = (2e-2, 2e-2)


class WrongResultError(RuntimeError):
    """A backend's graph does not compute what it should."""


class Work:
    """A round of one backend: everything it reads keeps its address.

    Attributes:
        committed: `[1]`, int32; m may change between replays.
        last: the last layer's outputs `[w, HV, V]` of the latest verification.
    """

    def __init__(self, gdn: ComparedGDN, start: Start, item: Round, scope: str, overlap: bool) -> None:
        self.gdn, self.start, self.item, self.scope, self.overlap = gdn, start, item, scope, overlap
        self.committed = torch.ones(1, dtype=torch.int32, device=item.rows.device)
        self.last = item.rows.new_empty(0)

    def load(self) -> None:
        """Back to the start, with the round's inputs in place."""
        load(self.gdn, self.start)
        place(self.gdn, self.item)

    def verify(self) -> None:
        """All layers; the first one waits for whatever the previous round wrote."""
        for layer in range(len(self.item.rows)):
            early = self.overlap and layer > 0
            self.last = verify(self.gdn, self.start, self.item, self.scope, layer, overlap=early)

    def commit(self, early: bool = False) -> None:
        """All layers; `early`: may start before the verification in front of it ends."""
        self.gdn.commit(self.committed, windows=self.scope == "conv", overlap=early)

    def round(self) -> None:
        """Verification and commit."""
        self.verify()
        self.commit(early=self.overlap)


class Truth:
    """Inputs of one length and scope, and their float64 results.

    Attributes:
        w, scope: what was asked for.
        start, item: the random inputs.
    """

    def __init__(self, shape: GDNShape, w: int, scope: str) -> None:
        self.shape, self.w, self.scope = shape, w, scope
        self.start, (self.item,) = random_inputs(shape, [w], seed=w)
        self._known: dict[bool, tuple[Tensor, Tensor]] = {}

    def results(self, rounded: bool) -> tuple[Tensor, Tensor]:
        """The last layer's outputs `[w, HV, V]` and the states `[L, w, HV, V, K]` after each token, fp64."""
        if rounded not in self._known:
            start = self.start
            exact = exact_round(self.shape, start.params, self.item, start.states, start.windows, self.scope, rounded)
            self._known[rounded] = exact.outputs[-1], exact.states
        return self._known[rounded]


def check_replay(name: str, work: Work, replay: Callable[[], None], truth: Truth, m: int) -> tuple[float, float]:
    """Errors of the outputs and of the states after one replay of a round from the start.

    Raises:
        WrongResultError: if they are too large for the time of the graph to mean anything.
    """
    work.committed.fill_(m)
    work.last.fill_(float("nan"))
    work.load()
    replay()
    ours = COMPETITORS[name].ours
    outputs, states = truth.results(rounded=ours)
    errors = relative_error(work.last, outputs), relative_error(work.gdn.states(), states[:, m - 1])
    allowed = BOUNDS[truth.shape.dtype] if ours else FOREIGN_BOUNDS
    if not (errors[0] <= allowed[0] and errors[1] <= allowed[1]):
        raise WrongResultError(
            f"{name} is wrong at w = {truth.w}, m = {m}, scope {truth.scope}: errors {errors[0]:.1e} (outputs) and "
            f"{errors[1]:.1e} (states) against float64, allowed {allowed[0]:.1e} and {allowed[1]:.1e}. "
            "Its time is not taken; bench_gdn.py --check says more."
        )
    return errors
