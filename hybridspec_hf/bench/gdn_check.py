"""GDN verifiers + random rounds -> their worst errors against the float64 recurrence, and whether a bound broke."""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_generation.gdn import GDNShape, make_gdn

from .gdn_backends import ComparedGDN
from .gdn_exact import exact_round, relative_error
from .gdn_inputs import Round, Start, random_inputs

# relative Frobenius errors of outputs and states after two rounds; bf16 rounding of exact outputs alone is 1.67e-3
BOUNDS = {
    torch.bfloat16: (1.8e-3, 1e-4),
    torch.float16: (1.8e-3, 1e-4),
    torch.float32: (1e-5, 1e-6),
}
# cumulative log decays near 1e4 are multiples of 1e-3 in fp32, and a block adds some of them up
FORGET_BOUNDS = (5e-3, 5e-3)
LONG_ROUNDS = 8
SCOPES = ("core", "conv")


@dataclass(frozen=True)
class Part:
    """A share of the check that one process does.

    Attributes:
        shape: the layers.
        lengths: w of the rounds.
        backends: names for `make_gdn`.
        kernels: run the Triton kernels (on the CPU in Triton's interpreter), else the PyTorch references.
        block: the longest round that buffers are made for.
        every: commit every m in 1..w, else w and ceil(w/2) only.
        special: also unusual inputs, and more rounds.
    """

    shape: GDNShape
    lengths: tuple[int, ...]
    backends: tuple[str, ...]
    kernels: bool
    scopes: tuple[str, ...] = SCOPES
    block: int = 16
    every: bool = True
    special: bool = True

    @property
    def implementation(self) -> str:
        """One of "kernels", "interpreter" and "reference"."""
        if not self.kernels:
            return "reference"
        return "kernels" if self.shape.device.type == "cuda" else "interpreter"

    @property
    def dtype(self) -> str:
        """Such as "bfloat16"."""
        return str(self.shape.dtype).removeprefix("torch.")

    def only(self, lengths: Sequence[int]) -> "Part":
        """The part with these of its lengths."""
        return replace(self, lengths=tuple(w for w in self.lengths if w in lengths))

    def make(self, name: str) -> ComparedGDN:
        """A backend of ours."""
        return make_gdn(name, self.shape, block=self.block, kernels=self.kernels)


@dataclass(frozen=True)
class Errors:
    """Worst errors of a backend in one dtype, scope and group of cases.

    Attributes:
        implementation: of a `Part`.
        group: of a `Case`.
        windows_exact: the committed convolution windows equal the inputs, bit for bit.
        cases: how many.
    """

    implementation: str
    backend: str
    dtype: str
    scope: str
    group: str
    output_error: float
    output_bound: float
    state_error: float
    state_bound: float
    windows_exact: bool
    cases: int = 1

    @property
    def passed(self) -> bool:
        """Within both bounds, with exact windows."""
        return self.output_error <= self.output_bound and self.state_error <= self.state_bound and self.windows_exact

    def joined(self, other: "Errors") -> "Errors":
        """The worst of both."""
        return replace(
            self,
            output_error=max(self.output_error, other.output_error),
            state_error=max(self.state_error, other.state_error),
            windows_exact=self.windows_exact and other.windows_exact,
            cases=self.cases + other.cases,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types; None for an error that is not finite."""
        values = asdict(self) | {"passed": self.passed}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class Case(NamedTuple):
    """Consecutive rounds of one request.

    Attributes:
        group: what the errors are reported under: "rounds", "long" or "forget".
        kind: of the inputs, a key of `gdn_inputs.KINDS`.
        rounds: (verified, committed) tokens of each.
    """

    group: str
    kind: str
    rounds: tuple[tuple[int, int], ...]


def cases(part: Part) -> Iterator[Case]:
    """Two rounds of each length that commit w and ceil(w/2) tokens, in both orders, and every m; then special ones."""
    for w in part.lengths:
        half = -(-w // 2)
        commits = {(w, half), (half, w)} | ({(m, w + 1 - m) for m in range(1, w + 1)} if part.every else set())
        for first, second in sorted(commits):
            yield Case("rounds", "random", ((w, first), (w, second)))
    if part.special:
        yield from special_cases(part.lengths)


def special_cases(lengths: Sequence[int]) -> Iterator[Case]:
    """Unusual inputs at the longest length; and enough rounds, in changing lengths, to fold a ring several times."""
    w = max(lengths)
    for kind in ("all or nothing", "repeated keys"):
        yield Case("rounds", kind, ((w, -(-w // 2)), (w, w)))
    yield Case("forget", "forget", ((w, -(-w // 2)), (w, w)))
    turns = [lengths[i % len(lengths)] for i in range(LONG_ROUNDS)]
    yield Case("long", "random", tuple((w, 1 + i * 7 % w) for i, w in enumerate(turns)))


def bounds(dtype: torch.dtype, case: Case) -> tuple[float, float]:
    """Of the outputs and of the state; the rounding errors of more than two rounds add up like a random walk."""
    if case.group == "forget":
        return FORGET_BOUNDS
    output, state = BOUNDS[dtype]
    return output, state * max(1.0, len(case.rounds) / 2) ** 0.5


def check_part(part: Part) -> list[Errors]:
    """Run every case of a part on each backend."""
    found: list[Errors] = []
    with poisoned_memory():
        backends = {name: part.make(name) for name in part.backends}
        for scope in part.scopes:
            for seed, case in enumerate(cases(part)):
                found += check_case(part, backends, scope, case, seed)
    return merge(found)


def merge(found: Iterable[Errors]) -> list[Errors]:
    """One entry for each implementation, backend, dtype, scope and group."""
    merged: dict[tuple[str, ...], Errors] = {}
    for errors in found:
        key = (errors.implementation, errors.backend, errors.dtype, errors.scope, errors.group)
        merged[key] = merged[key].joined(errors) if key in merged else errors
    return list(merged.values())


def check_case(part: Part, backends: dict[str, ComparedGDN], scope: str, case: Case, seed: int) -> Iterator[Errors]:
    """One case on each backend."""
    start, rounds = random_inputs(part.shape, [w for w, _ in case.rounds], kind=case.kind, seed=seed)
    want = list(exact_rounds(part.shape, start, rounds, scope, case))
    output_bound, state_bound = bounds(part.shape.dtype, case)
    for name, gdn in backends.items():
        pairs = list(zip(run_rounds(gdn, start, rounds, scope, case), want, strict=True))
        yield Errors(
            implementation=part.implementation,
            backend=name,
            dtype=part.dtype,
            scope=scope,
            group=case.group,
            output_error=max(relative_error(g.outputs, w.outputs) for g, w in pairs),
            output_bound=output_bound,
            state_error=max(relative_error(g.state, w.state) for g, w in pairs),
            state_bound=state_bound,
            windows_exact=all(torch.equal(g.window, w.window) for g, w in pairs),
        )


class Committed(NamedTuple):
    """A round's outputs `[L, w, HV, V]`, and the state `[L, HV, V, K]` and window `[L, taps-1, C]` behind it."""

    outputs: Tensor
    state: Tensor
    window: Tensor


def exact_rounds(shape: GDNShape, start: Start, rounds: list[Round], scope: str, case: Case) -> Iterator[Committed]:
    """What every round has to give, in float64."""
    state, window = start.states, start.windows
    for item, (_, m) in zip(rounds, case.rounds, strict=True):
        outputs, states, rows = exact_round(shape, start.params, item, state, window, scope)
        state = states[:, m - 1]
        window = rows[:, m : m + shape.taps - 1] if scope == "conv" else window
        yield Committed(outputs, state, window)


def run_rounds(gdn: ComparedGDN, start: Start, rounds: list[Round], scope: str, case: Case) -> Iterator[Committed]:
    """What a backend gives. Outputs and the rows of earlier rounds are NaN before each round."""
    load(gdn, start)
    for item, (w, m) in zip(rounds, case.rounds, strict=True):
        place(gdn, item)
        outputs = []
        for layer in range(len(start.params)):
            out = verify(gdn, start, item, scope, layer)
            outputs.append(out.clone())
            out.fill_(float("nan"))
        gdn.commit(torch.tensor([m], dtype=torch.int32, device=item.rows.device), windows=scope == "conv")
        yield Committed(torch.stack(outputs), gdn.states().clone(), gdn.windows().clone())
        for layer in range(len(start.params)):
            gdn.inputs(layer, w).fill_(float("nan"))


def load(gdn: ComparedGDN, start: Start) -> None:
    """All layers before their first round."""
    for layer, (window, state) in enumerate(zip(start.windows, start.states, strict=True)):
        gdn.load(layer, window, state)


def place(gdn: ComparedGDN, item: Round) -> None:
    """The round's convolution inputs, where a projection would write them."""
    for layer, rows in enumerate(item.rows):
        gdn.inputs(layer, len(rows)).copy_(rows)


def verify(gdn: ComparedGDN, start: Start, item: Round, scope: str, layer: int, *, overlap: bool = False) -> Tensor:
    """Outputs `[w, HV, V]` of one layer; in scope "conv" of the rows in place."""
    rows, a, b, params = item.rows[layer], item.a[layer], item.b[layer], start.params[layer]
    if scope == "core":
        return gdn.verify_convolved(layer, rows, a, b, params, overlap=overlap)
    return gdn.verify(layer, len(rows), a, b, params, overlap=overlap)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Torch fills what is allocated uninitialised with NaN (integers: the largest)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
