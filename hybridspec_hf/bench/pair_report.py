"""Requests of a run -> one cell per row and category, means over the categories, and ablations, as JSON types."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from .pair_prompts import BenchPrompt
from .pair_run import Recording, Request
from .rows import HYBRIDSPEC, STATIC, BenchRow

# no text, which any category could be
AVERAGE = None


@dataclass(frozen=True)
class Cell:
    """One row on one category, pooled over its prompts and repetitions; in the average, means over the categories.

    Attributes:
        acceptance_length: AL, tokens emitted per round. mean_verify_length: mean w, tokens verified per round.
        round_ms: decode time over rounds. tokens_per_second: tokens over decode time.
        speedup: SR, tokens per second over AR's on the same prompts.
        speedups: SR of each repetition.
        category: None for the average.
        lengths: rounds by verification length. rounds: all of them.
        prompts: how many. identical: those whose tokens were AR's in every repetition.
    """

    row: str
    category: str | None
    acceptance_length: float
    mean_verify_length: float
    round_ms: float
    tokens_per_second: float
    speedup: float
    speedups: list[float]
    lengths: dict[int, int]
    rounds: int
    prompts: int
    identical: int


@dataclass(frozen=True)
class PairReport:
    """A run in figures.

    Attributes:
        rows: that ran, AR first. cells: by category, the average last, rows in order.
        recording: what they were made of.
    """

    rows: list[BenchRow]
    cells: list[Cell]
    recording: Recording

    @property
    def categories(self) -> list[str]:
        """In order, without the average."""
        return list(dict.fromkeys(cell.category for cell in self.cells if cell.category is not None))

    @property
    def identical(self) -> bool:
        """Whether every request wrote AR's tokens."""
        return all(request.identical for request in self.recording.requests)

    def cell(self, row: str, category: str | None = AVERAGE) -> Cell:
        """The figures of a row on a category, or on average."""
        return next(cell for cell in self.cells if (cell.row, cell.category) == (row, category))

    def ablations(self) -> list[dict[str, Any]]:
        """Table 3: HybridSpec's SR over that of each variant that ran; of fixed lengths the fastest, on these prompts.

        Empty without HybridSpec, or if none of its single components was left out.
        """
        names = [row.name for row in self.rows]
        fixed = [name for name in names if name.startswith(STATIC) and "+" not in name]
        fastest = [max(fixed, key=lambda name: self.cell(name).speedup)] if fixed else []
        variants = [
            *(("length selection", name) for name in fastest), ("length selection", "full"),
            ("routing correction", "nominal"), ("GDN kernels", "hybridspec+recurrent"),
            ("all components", "full+recurrent"),
        ]  # fmt: skip
        ran = [(component, name) for component, name in variants if name in names]
        if HYBRIDSPEC not in names or all(component == "all components" for component, _ in ran):
            return []
        best = self.cell(HYBRIDSPEC)
        found = [("", HYBRIDSPEC), *ran]
        return [
            {
                "component": component,
                "row": name,
                "mean_verify_length": self.cell(name).mean_verify_length,
                "acceptance_length": self.cell(name).acceptance_length,
                "speedup": self.cell(name).speedup,
                "gain": best.speedup / self.cell(name).speedup,
            }
            for component, name in found
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON types, all requests included."""
        return {
            "rows": [asdict(row) | {"name": row.name, "label": row.label} for row in self.rows],
            "cells": [asdict(cell) for cell in self.cells],
            "ablations": self.ablations(),
            "identical": self.identical,
            **asdict(self.recording),
        }


def summarise(recording: Recording, prompts: Sequence[BenchPrompt], rows: Sequence[BenchRow]) -> PairReport:
    """Pool the requests of a run."""
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    cells = []
    for category in categories:
        members = {i for i, prompt in enumerate(prompts) if prompt.category == category}
        mine = [request for request in recording.requests if request.prompt in members]
        reference = [request for request in mine if request.row == rows[0].name]
        cells += [
            pooled(row.name, category, [request for request in mine if request.row == row.name], reference)
            for row in rows
        ]
    averages = [average([cell for cell in cells if cell.row == row.name]) for row in rows]
    return PairReport(list(rows), [*cells, *averages], recording)


def category_label(category: str | None) -> str:
    """What people read."""
    return "average" if category is None else category


def pooled(row: str, category: str, requests: list[Request], reference: list[Request]) -> Cell:
    """One cell; `reference` holds AR's requests on the same prompts."""
    rounds = sum(request.rounds for request in requests)
    tokens = sum(request.tokens for request in requests)
    lengths: Counter[int] = Counter()
    for request in requests:
        lengths.update(request.lengths)
    seconds = sum(request.seconds for request in requests)
    different = {request.prompt for request in requests if not request.identical}
    prompts = {request.prompt for request in requests}
    repetitions = sorted({request.repetition for request in requests})
    return Cell(
        row=row,
        category=category,
        acceptance_length=tokens / max(rounds, 1),
        mean_verify_length=sum(w * count for w, count in lengths.items()) / max(rounds, 1),
        round_ms=1e3 * seconds / max(rounds, 1),
        tokens_per_second=throughput(requests),
        speedup=ratio(throughput(requests), throughput(reference)),
        speedups=[ratio(*(throughput([r for r in part if r.repetition == repetition])
                          for part in (requests, reference))) for repetition in repetitions],
        lengths=dict(sorted(lengths.items())),
        rounds=rounds,
        prompts=len(prompts),
        identical=len(prompts - different),
    )  # fmt: skip


def throughput(requests: list[Request]) -> float:
    """Tokens emitted in rounds over decode seconds; 0 if there was nothing to decode."""
    seconds = sum(request.seconds for request in requests)
    return sum(request.tokens for request in requests) / seconds if seconds else 0.0


def ratio(value: float, reference: float) -> float:
    """How many times as fast; 0 where there was nothing to decode."""
    return value / reference if reference else 0.0


def average(cells: list[Cell]) -> Cell:
    """The mean over the categories, which count the same however many rounds they have; counts are sums."""
    lengths: Counter[int] = Counter()
    for cell in cells:
        lengths.update(cell.lengths)
    names = ("acceptance_length", "mean_verify_length", "round_ms", "tokens_per_second", "speedup")
    return Cell(
        row=cells[0].row,
        category=AVERAGE,
        **{name: mean(getattr(cell, name) for cell in cells) for name in names},
        speedups=[mean(each) for each in zip(*(cell.speedups for cell in cells), strict=True)],
        lengths=dict(sorted(lengths.items())),
        rounds=sum(cell.rounds for cell in cells),
        prompts=sum(cell.prompts for cell in cells),
        identical=sum(cell.identical for cell in cells),
    )
