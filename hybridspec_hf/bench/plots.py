"""A bench report, an analysis -> PNG files, with matplotlib (the extra `plots`)."""

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..calibration.latency import fit_quadratic
from .analysis import Analysis
from .pair_report import AVERAGE, PairReport, category_label
from .rows import STATIC

SIZE = (8.0, 4.5)


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def bench_plots(report: PairReport, folder: Path) -> list[Path]:
    """AL and SR by category, and the share of each verification length."""
    return [plot_categories(report, folder / "categories.png"), plot_lengths(report, folder / "lengths.png")]


def analysis_plots(analysis: Analysis, folder: Path, report: PairReport | None = None) -> list[Path]:
    """The cost curve with its experts, and the reliability diagram.

    Args:
        report: of the same pair, whose fixed lengths are points of the curve.
    """
    return [
        plot_cost(analysis, folder / "cost.png", report),
        plot_reliability(analysis, folder / "reliability.png"),
    ]


def plot_categories(report: PairReport, path: Path) -> Path:
    """Bars of AL above bars of SR: a group a category, a bar a row."""
    figure, (above, below) = new_figure(2, size=(10.0, 7.0))
    categories = [*report.categories, AVERAGE]
    for axes, figure_of, label in ((above, "acceptance_length", "AL, tokens a round"), (below, "speedup", "SR, x AR")):
        width = 0.85 / len(report.rows)
        for i, row in enumerate(report.rows):
            heights = [getattr(report.cell(row.name, category), figure_of) for category in categories]
            axes.bar(np.arange(len(categories)) + i * width, heights, width, label=row.label)
        axes.set_xticks(np.arange(len(categories)) + 0.425 - width / 2, map(category_label, categories))
        axes.set_ylabel(label)
    above.legend(fontsize="small", ncols=4)
    return save(figure, path)


def plot_lengths(report: PairReport, path: Path) -> Path:
    """Share of the rounds by verification length, a panel for each row that varies it."""
    # a row of one length has the budget's last rounds besides, few of them
    varying = [row for row in report.rows if len(report.cell(row.name).lengths) > 1 and not is_fixed(row.policy)]
    shown = varying or list(report.rows)
    figure, panels = new_figure(len(shown), size=(SIZE[0], 1.8 * len(shown) + 1))
    for axes, row in zip(panels, shown, strict=True):
        cell = report.cell(row.name)
        axes.bar(list(cell.lengths), [count / max(cell.rounds, 1) for count in cell.lengths.values()])
        axes.set_ylabel(row.label, fontsize="small")
        axes.set_xlim(0.5, max(w for r in shown for w in report.cell(r.name).lengths) + 0.5)
    panels[-1].set_xlabel("verification length w (share of rounds)")
    return save(figure, path)


def is_fixed(policy: str) -> bool:
    """Whether a policy verifies one length."""
    return policy in ("ar", "full") or policy.startswith(STATIC)


def plot_cost(analysis: Analysis, path: Path, report: PairReport | None) -> Path:
    """Milliseconds of a round by length: the cost table, and what was measured with the quadratic through it, which
    the table is but for never falling; distinct experts on an axis of their own."""
    figure, (axes,) = new_figure(1)
    lengths = np.arange(2, len(analysis.round_ms) + 2)
    measured = [(w, 1e3 * seconds) for w, seconds in analysis.cost.measured]
    if measured:
        fit = fit_quadratic(measured)
        axes.plot(*zip(*measured, strict=True), "o", label="measured")
        axes.plot(lengths, np.polyval(fit, lengths), ":", label="quadratic: " + equation(fit.tolist()))
    axes.plot(
        lengths, analysis.round_ms, label="cost table" if measured else "cost table, which keeps no measured points"
    )
    points = fixed_lengths(report) if report else []
    if points:
        axes.plot(*zip(*points, strict=True), "x", label="fixed lengths of this bench")
    axes.set_xlabel("verification length w")
    axes.set_ylabel("ms a round")
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    axes.set_title(textwrap.fill(analysis.cost_line(), 120), fontsize="x-small", parse_math=False)
    if any(analysis.distinct_pairs):
        experts = axes.twinx()
        experts.plot(lengths, analysis.distinct_pairs[1:], "--", color="gray")
        experts.set_ylabel("distinct (layer, expert) pairs, dashed")
        experts.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="lower right")
    return save(figure, path)


def fixed_lengths(report: PairReport) -> list[tuple[float, float]]:
    """(mean w, ms a round) of the rows with one length on the default backend."""
    cells = [report.cell(row.name) for row in report.rows if is_fixed(row.policy) and row.drafts and row.is_default]
    return sorted((cell.mean_verify_length, cell.round_ms) for cell in cells)


def equation(fit: Sequence[float]) -> str:
    """A polynomial in w as text, highest power last."""
    powers = ("", " w", " w²")
    return " ".join(f"{value:+.3g}{power}" for value, power in zip(list(fit)[::-1], powers, strict=False))


def plot_reliability(analysis: Analysis, path: Path) -> Path:
    """Accepted share over predicted probability, by the drafter's confidence and by the table."""
    figure, (axes,) = new_figure(1, size=(5.5, 5.5))
    axes.plot([0, 1], [0, 1], color="lightgray")
    for name, found in analysis.reliability.items():
        axes.plot(found.predicted, found.accepted, "o-", label=f"{name}, error {found.error:.3f}")
    axes.set_xlabel("predicted acceptance")
    axes.set_ylabel("accepted")
    axes.legend()
    return save(figure, path)


def new_figure(panels: int, size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    """A figure without a window, and its panels, one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(panels, squeeze=False)[:, 0]


def save(figure: Any, path: Path) -> Path:
    """Write the file."""
    figure.savefig(path, dpi=120)
    return path
