"""Timed rows of the decoding benchmark -> means over categories, ratios, JSON and lines for people."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from .decode_contexts import ContextCost
from .markdown import table
from .rows import parse_row

LABEL = "scripted acceptance, random weights"
# the category of what does not depend on one
ALL = "all"
NAMES = {"ar": "AR", "full": "DFlash", "hybridspec": "HybridSpec"}
# what speeds are compared with: AR, DFlash in our kernels, and DFlash whose GDN layers verify token by token, which
# is what the paper calls vanilla
REFERENCES = {"ar": "x AR", "full": "x DFlash", "full+recurrent": "x vanilla"}


@dataclass(frozen=True)
class Row:
    """One policy on one category's trace; medians over the repeats.

    Attributes:
        tokens_per_second: decoding only. spread: fastest minus slowest; None of a single request.
        round_ms: whole rounds. rounds: of the last request.
        acceptance_length: tokens emitted per round. mean_verify_length: tokens verified per round.
        known_text: whether every request wrote the text that the weights were made for.
        notes: of the reports.
    """

    policy: str
    category: str
    tokens_per_second: float
    spread: float | None
    round_ms: float
    rounds: int
    acceptance_length: float
    mean_verify_length: float
    known_text: bool
    notes: list[str]


@dataclass(frozen=True)
class Stock:
    """transformers' own generate in one setting."""

    setting: str
    token_ms: float


@dataclass(frozen=True)
class Parts:
    """One part of a round alone, and what its bytes take at the measured bandwidth."""

    part: str
    ms: float
    floor_ms: float | None


@dataclass(frozen=True)
class Launches:
    """HybridSpec's rounds, launched one way.

    Attributes:
        way: the report's `launches`. busy: whether another Python thread computed meanwhile.
        round_ms: mean over a request. capture_seconds: compiling (what this process has not yet) and capturing.
        device_bytes: what the first request took of the GPU and kept: buffers, graphs, and modules of kernels.
        known_text: whether every token was the known one.
    """

    way: str
    busy: bool
    round_ms: float
    capture_seconds: float
    device_bytes: int
    known_text: bool


@dataclass(frozen=True)
class Split:
    """The same rounds with a graph that ends at the router boundary, and without.

    Attributes:
        rounds: of each, every length in turn. same: whether tokens, acceptance and rounds are equal.
        split_ms, unsplit_ms: a round. switched_ms, single_ms: an unsplit round of one length, behind a choice among
            graphs and as one graph.
    """

    rounds: int
    same: bool
    split_ms: float
    unsplit_ms: float
    switched_ms: float
    single_ms: float


@dataclass
class DecodeBenchmark:
    """A run of the benchmark, filled as it goes.

    Attributes:
        rows: of our engine. stock: of transformers'. parts: of a round. floors: bytes and times, `DecodeFloors`.
        launches: ways to launch a round. split: with and without the boundary behind Layer 0's router. contexts:
            latency behind prompts of several lengths.
    """

    floors: dict[str, Any]
    stock: list[Stock] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)
    launches: list[Launches] = field(default_factory=list)
    split: Split | None = None
    contexts: list[ContextCost] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every request of our engine wrote the known text."""
        known = [row.known_text for row in self.rows] + [way.known_text for way in self.launches]
        return all(known) and (self.split is None or self.split.same)

    def policies(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(row.policy for row in self.rows))

    def speed(self, policy: str, category: str) -> float | None:
        """Tokens per second; AR's is that of every category."""
        found = [r for r in self.rows if r.policy == policy and r.category in (category, ALL)]
        return found[0].tokens_per_second if found else None

    def ratio(self, policy: str, reference: str, category: str) -> float | None:
        """How many times as fast as the reference."""
        speeds = self.speed(policy, category), self.speed(reference, category)
        return None if speeds[0] is None or speeds[1] is None else speeds[0] / speeds[1]

    def summaries(self) -> list[dict[str, Any]]:
        """Each policy's means over the categories; ratios are means of the categories' ratios, as the paper's are."""
        return [self._summary(policy) for policy in self.policies()]

    def _summary(self, policy: str) -> dict[str, Any]:
        rows = [r for r in self.rows if r.policy == policy]
        summary: dict[str, Any] = {"policy": policy}
        for name in ("tokens_per_second", "round_ms", "acceptance_length", "mean_verify_length"):
            summary[name] = mean(getattr(r, name) for r in rows)
        for reference in REFERENCES:
            ratios = [self.ratio(policy, reference, r.category) for r in rows if r.category != ALL]
            known = [ratio for ratio in ratios if ratio is not None]
            summary[f"vs_{reference}"] = mean(known) if known else None
        return summary

    def to_dict(self) -> dict[str, Any]:
        """JSON types, every row with its ratios."""
        rows = [
            asdict(row) | {f"vs_{name}": self.ratio(row.policy, name, row.category) for name in REFERENCES}
            for row in self.rows
        ]
        return {"label": LABEL, **asdict(self), "rows": rows, "means": self.summaries(), "passed": self.passed}


def routing_lines(routing: Any) -> Iterator[str]:
    """How the random routers behave."""
    if routing is None:
        yield "Dense target: no experts."
        return
    curve = "  ".join(f"{w}: {count:.1f}" for w, count in routing.distinct.items())
    yield f"Distinct experts of a layer by tokens (mean over layers): {curve}"
    yield (
        f"At 16 tokens {routing.layers[0]:.1f} in the layer with the fewest and {routing.layers[1]:.1f} in that with "
        f"the most; new experts of Layer 0 and of the later layers correlate by {routing.correlation:.2f}; strength "
        f"of the shared direction {routing.strength:.3f}."
    )


def head_lines(report: DecodeBenchmark) -> Iterator[str]:
    """What stands above the rows."""
    yield f"All numbers: {LABEL}. Bandwidth of the floors: {_bandwidth(report)}."
    for stock in report.stock:
        yield f"stock generate, {stock.setting}: {stock.token_ms:.2f} ms a token"
    columns = f"{'tokens/s':>10}{'spread':>9}{'ms/round':>10}{'AL':>7}{'mean w':>8}"
    columns += "".join(f"{name:>11}" for name in REFERENCES.values())
    yield f"{'category':<15}{'policy':<22}{columns}  text"


def row_line(report: DecodeBenchmark, row: Row) -> str:
    """A row with its ratios to those that ran before it."""
    ratios = {f"vs_{name}": report.ratio(row.policy, name, row.category) for name in REFERENCES}
    return _line(row.category, asdict(row) | ratios) + ("  known" if row.known_text else "  WRONG")


def mean_lines(report: DecodeBenchmark) -> Iterator[str]:
    """Each policy's means, and what the reports note of whom."""
    yield "Means over the categories:"
    for summary in report.summaries():
        yield _line("mean", summary)
    for note in sorted({note for row in report.rows for note in row.notes}):
        policies = dict.fromkeys(row.policy for row in report.rows if note in row.notes)
        yield f"note of {', '.join(policies)}: {note}"


def part_lines(parts: list[Parts]) -> Iterator[str]:
    """A round's parts beside their floors."""
    yield "Parts of a round, each alone, as a graph where kernels run (shortest of several, mean over texts):"
    for part in parts:
        floor = "" if part.floor_ms is None else f", floor {part.floor_ms:.3f} ms, {part.ms / part.floor_ms:.2f}x"
        yield f"{part.part}: {part.ms:.3f} ms{floor}"


def launch_line(way: Launches) -> str:
    """A way to launch a round."""
    return (
        f"HybridSpec, {way.way}{', beside a busy Python thread' if way.busy else ''}: {way.round_ms:.3f} ms a "
        f"round; capture {way.capture_seconds:.1f} s; {way.device_bytes / 2**20:.0f} MiB of the GPU"
        f"{'' if way.known_text else '; WRONG TEXT'}"
    )


def split_line(split: Split) -> str:
    """The boundary behind Layer 0's router."""
    same = "the same" if split.same else "DIFFER"
    return (
        f"Split at the router boundary {split.split_ms:.3f} ms a round, unsplit {split.unsplit_ms:.3f} ms, over "
        f"{split.rounds} rounds of every length: tokens, acceptance and rounds {same}. At one length, behind a choice "
        f"among graphs {split.switched_ms:.3f} ms, as one graph {split.single_ms:.3f} ms"
    )


def table_lines(report: DecodeBenchmark) -> Iterator[str]:
    """The rows as in the paper's Table 1, in Markdown: AL and SR by category, and HybridSpec's SR over each one's."""
    rows = [row for row in report.rows if row.category != ALL]
    categories = list(dict.fromkeys(row.category for row in rows))
    means = {summary["policy"]: summary for summary in report.summaries()}
    ours = means.get("hybridspec", {}).get("vs_ar")

    def figures(policy: str) -> Iterator[str]:
        mine = {row.category: row for row in rows if row.policy == policy}
        for category in categories:
            yield f"{mine[category].acceptance_length:.2f}, {report.ratio(policy, 'ar', category):.2f}"
        mean = means[policy]
        yield f"{mean['acceptance_length']:.2f}, {mean['vs_ar']:.3f}"
        yield f"{mean['round_ms']:.2f}"
        yield f"{mean['mean_verify_length']:.1f}"
        yield "-" if ours is None else f"{ours / mean['vs_ar']:.3f}"

    if rows and "ar" in means:
        header = ["AL, SR", *categories, "mean", "ms a round", "mean w", "HybridSpec over it"]
        yield from table(
            header, [[parse_row(p).label, *figures(p)] for p in dict.fromkeys(row.policy for row in rows)]
        )


def context_lines(contexts: list[ContextCost]) -> Iterator[str]:
    """The target's latency behind prompts of several lengths."""
    for each in contexts:
        cost, first = each.cost, contexts[0].cost.context
        curve = ", ".join(f"{1e3 * c:.3f}" for c in cost.target_cost[2:])
        yield (
            f"Behind {cost.context} tokens: {1e3 * cost.fixed_cost:.3f} ms for a draft and 2 tokens; more for 2 to "
            f"{cost.block} tokens: {curve}; rho {cost.throughput:.1f}; modelled throughput over that with the curve "
            f"of {first}: {each.gain:.5f}"
        )


def _bandwidth(report: DecodeBenchmark) -> str:
    bandwidth = report.floors["bandwidth"]
    return "not measured" if bandwidth is None else f"{bandwidth / 1e12:.3f} TB/s (1 GiB device copy)"


def _line(category: str, row: dict[str, Any]) -> str:
    spread = " " * 9
    if "spread" in row:
        spread = f"{'-':>9}" if row["spread"] is None else f"{row['spread']:>9.1f}"
    ratios = "".join(
        f"{'-' if row[f'vs_{name}'] is None else format(row[f'vs_{name}'], '.3f'):>11}" for name in REFERENCES
    )
    return (
        f"{category:<15}{NAMES.get(row['policy'], row['policy']):<22}{row['tokens_per_second']:>10.1f}{spread}"
        f"{row['round_ms']:>10.3f}{row['acceptance_length']:>7.2f}{row['mean_verify_length']:>8.2f}{ratios}"
    )
