"""Timed rows of the GDN benchmark, their ratios, and what was measured around them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from .gdn_backends import COMPETITORS


@dataclass(frozen=True)
class Row:
    """Times of one backend in microseconds, over all layers.

    Attributes:
        overlap: programmatic launch: a layer's kernel may start before the previous layer's ends.
        total_us: verification and commit in one graph. verify_us, commit_us: a graph of either alone.
        spread_us: slowest minus fastest sample of total_us; None for a mean over rounds.
        launches: kernels in the graph.
        byte_floor_us: the bytes that must move, at the measured copy bandwidth.
        launch_floor_us: a graph of as many empty kernels.
        output_error, state_error: of the timed graph against float64 (outputs: the last layer's).
    """

    backend: str
    scope: str
    w: int
    m: int
    overlap: bool
    total_us: float
    spread_us: float | None
    verify_us: float
    commit_us: float
    launches: int
    byte_floor_us: float
    launch_floor_us: float
    output_error: float
    state_error: float


@dataclass
class Report:
    """A run of the benchmark.

    Attributes:
        shape, method: in JSON types and in words.
        copy_bandwidth: bytes per second.
        not_run: backend -> why it has no (further) rows.
        memory: backend -> bytes held for verification at a block of 16, per request.
    """

    shape: dict[str, Any]
    method: str
    copy_bandwidth: float
    rows: list[Row] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Every backend of ours gave right results wherever it was timed."""
        return bool(self.rows) and not any(COMPETITORS[name].ours for name in self.not_run)

    def ratio(self, row: Row, reference: str) -> float | None:
        """The reference's time over the row's, with the row's kind of launch where both exist."""
        same = [r for r in self.rows if (r.backend, r.scope, r.w, r.m) == (reference, row.scope, row.w, row.m)]
        same.sort(key=lambda r: r.overlap != row.overlap)
        return same[0].total_us / row.total_us if same else None

    def to_dict(self) -> dict[str, Any]:
        """JSON types, each row with its ratios."""
        rows = [
            asdict(row) | {f"vs_{reference}": self.ratio(row, reference) for reference in ("recurrent", "sglang")}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows, "passed": self.passed}
