"""A bench report, an analysis -> Markdown, for people and for files."""

from collections.abc import Iterator, Sequence

from .analysis import Analysis, Modelled
from .markdown import table
from .pair_report import AVERAGE, Cell, PairReport, category_label

SHOWN_DIVERGENCES = 10


def bench_lines(report: PairReport, warning: str = "") -> Iterator[str]:
    """AL and SR by category, what a round is, lengths, ablations, exactness and notes; a warning goes ahead."""
    categories = [*report.categories, AVERAGE]
    labels = {row.name: row.label for row in report.rows}
    if warning:
        yield f"**{warning}**\n"
    yield "## Acceptance length and speedup\n"
    yield "AL: tokens emitted per round. SR: pooled decode throughput over AR's on the same prompts.\n"
    yield from table(
        ["row", *(f"{category_label(name)} {figure}" for name in categories for figure in ("AL", "SR"))],
        [
            [labels[row.name]]
            + [text for name in categories for text in al_and_sr(report.cell(row.name, name))]
            for row in report.rows
        ],
    )  # fmt: skip
    yield "\n## Rounds\n"
    yield "Means over the categories; the last columns span the repetitions, and count prompts with AR's tokens.\n"
    yield from table(
        ["row", "name", "mean w", "ms a round", "tokens/s", "SR", "SR, lowest to highest", "identical"],
        [rounds_row(labels[row.name], report.cell(row.name)) for row in report.rows],
    )
    yield "\n## Verification lengths\n"
    yield "Share of the rounds of all categories that verified so many tokens, in percent.\n"
    lengths = sorted({w for row in report.rows for w in report.cell(row.name).lengths})
    yield from table(
        ["row", *map(str, lengths)],
        [[labels[row.name], *shares(report.cell(row.name), lengths)] for row in report.rows],
    )
    yield from ablation_lines(report)
    yield from exactness_lines(report)
    yield "\n## How it ran\n"
    for row in report.rows:
        yield f"- {row.label}: {report.recording.ran[row.name]}"
        yield from (f"  - {text}" for text in report.recording.notes[row.name])
    if report.recording.captures:
        yield f"- {report.recording.captures} timed requests captured graphs first, outside their decode time"


def calibrated_warning(calibrated: int, prompts: int) -> str:
    """What to say of prompts that the tables were calibrated on; "" if there are none."""
    if not calibrated:
        return ""
    return (
        f"{calibrated} of {prompts} prompts are among those that --config was calibrated on: rows that choose lengths "
        "look better on them than on others. Leave them out, or calibrate on other prompts."
    )


def ablation_lines(report: PairReport) -> Iterator[str]:
    """HybridSpec without one component at a time."""
    found = report.ablations()
    if not found:
        return
    labels = {row.name: row.label for row in report.rows}
    yield "\n## Ablations\n"
    yield (
        "Gain: HybridSpec's SR over the variant's. Of the fixed lengths the fastest, chosen on these very prompts, "
        "which favours it.\n"
    )
    yield from table(
        ["component", "replaced by", "mean w", "AL", "SR", "gain"],
        [
            [
                row["component"] or "HybridSpec",
                labels[row["row"]] if row["component"] else "-",
                f"{row['mean_verify_length']:.1f}",
                f"{row['acceptance_length']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['gain']:.2f}" if row["component"] else "-",
            ]
            for row in found
        ],
    )


def exactness_lines(report: PairReport) -> Iterator[str]:
    """Every row against AR's tokens, with the first differences."""
    yield "\n## Exactness\n"
    if report.identical:
        yield "Every request wrote AR's tokens."
        return
    for row in report.rows:
        found = report.recording.divergences.get(row.name, [])
        if not found:
            continue
        cell = report.cell(row.name)
        yield f"- {row.label}: {cell.identical} of {cell.prompts} prompts wrote AR's tokens. First differences:"
        for d in found[:SHOWN_DIVERGENCES]:
            yield (
                f"  - prompt {d.prompt}, new token {d.position}: {d.plain} became {d.ours}; best and second best "
                f"logit are {d.margin:.3g} apart, {d.margin / d.spacing:.1f} spacings of the dtype"
            )
        if len(found) > SHOWN_DIVERGENCES:
            yield f"  - and {len(found) - SHOWN_DIVERGENCES} more in bench.json"


def analysis_lines(analysis: Analysis) -> Iterator[str]:
    """Policies by modelled cost, and how far the tables can be trusted."""
    yield "## Policies by modelled cost\n"
    judged = "prompts it was not fitted on" if analysis.unseen else "the prompts it was fitted on: too few for others"
    yield (
        f"{analysis.rounds} captured rounds of {analysis.prompts} prompts; every policy's own choice in each, judged "
        f"on {judged}. Time is the cost table's, with eta for each (layer, expert) pair that a round's routing has "
        "more or less than the average. The oracle knows what will be accepted and routed.\n"
    )
    yield f"{analysis.cost_line()}.\n"
    best = analysis.best_static()
    shown = [found for found in analysis.policies if not found.policy.startswith("static:")]
    yield from table(
        ["policy", "tokens/s", "of the oracle", "over the best fixed length", "AL", "mean w", "ms a round"],
        [modelled_row(found, best) for found in [*shown[:-1], best, shown[-1]]],
    )
    fixed = ", ".join(
        f"{found.policy.partition(':')[2]}: {found.tokens_per_second / best.tokens_per_second:.3f}"
        for found in analysis.policies
        if found.policy.startswith("static:")
    )
    yield f"\nFixed lengths, tokens/s over the best one's: {fixed}.\n"
    yield from calibration_lines(analysis)


def calibration_lines(analysis: Analysis) -> Iterator[str]:
    """How far the confidence and the tables can be trusted."""
    yield "## Calibration\n"
    before, after = analysis.reliability["confidence"], analysis.reliability["table"]
    yield (
        f"Expected calibration error {before.error:.4f} by the drafter's confidence, {after.error:.4f} by the table"
        f"{factor(before.error, after.error)}. By position:\n"
    )
    positions = range(1, len(before.by_position) + 1)
    yield from table(
        ["position", *map(str, positions)],
        [[name, *("-" if e is None else f"{e:.3f}" for e in found.by_position)]
         for name, found in (("confidence", before), ("table", after))],
    )  # fmt: skip
    if analysis.routing_correlation is not None:
        yield f"\nNew experts of Layer 0 and of the later layers correlate by {analysis.routing_correlation:.2f}."


def factor(before: float, after: float) -> str:
    """How many times less one error is than another, in words; of one that grew, what to do."""
    if not after:
        return ""
    if after < before:
        return f", {before / after:.1f} times less"
    return ": the table is no better than the confidence alone. Capture more rounds"


def modelled_row(found: Modelled, best: Modelled) -> list[str]:
    """The cells of one policy."""
    name = f"{found.policy} (best fixed)" if found is best else found.policy
    return [
        name, f"{found.tokens_per_second:.4g}", f"{found.of_oracle:.3f}",
        f"{found.tokens_per_second / best.tokens_per_second:.3f}", f"{found.acceptance_length:.2f}",
        f"{found.mean_verify_length:.2f}", f"{found.round_ms:.3f}",
    ]  # fmt: skip


def al_and_sr(cell: Cell) -> list[str]:
    """Two cells of the table of categories."""
    return [f"{cell.acceptance_length:.2f}", f"{cell.speedup:.2f}"]


def rounds_row(label: str, cell: Cell) -> list[str]:
    """What a round of one row is."""
    return [
        label, cell.row, f"{cell.mean_verify_length:.2f}", f"{cell.round_ms:.3f}", f"{cell.tokens_per_second:.1f}",
        f"{cell.speedup:.2f}", f"{min(cell.speedups):.2f} to {max(cell.speedups):.2f}",
        f"{cell.identical} of {cell.prompts}",
    ]  # fmt: skip


def shares(cell: Cell, lengths: Sequence[int]) -> list[str]:
    """Percent of a row's rounds by length."""
    return [f"{100 * cell.lengths[w] / cell.rounds:.0f}" if w in cell.lengths else "" for w in lengths]
