"""Reports of the check and of the benchmark -> lines for people."""

from collections.abc import Iterable, Iterator

from .gdn_check import LONG_ROUNDS, Errors
from .gdn_plan import CheckReport
from .gdn_producer import ProducerReport
from .gdn_report import Report, Row


def check_lines(report: CheckReport) -> Iterator[str]:
    """A line per implementation, backend, dtype and scope; each error stands before its bound."""
    yield f"Relative errors (Frobenius norm) against the float64 recurrence, random inputs. Checked: {report.checked}."
    yield f"outputs, states: 2 rounds. long: {LONG_ROUNDS} rounds. forget: log decays of -1e4. windows: bit for bit."
    head = f"{'checked':<12}{'backend':<11}{'dtype':<10}{'scope':<6}{'cases':>6}"
    columns = ("outputs", "states", "long outputs", "long states", "forget outputs", "forget states")
    yield head + "".join(f"{name:>19}" for name in columns) + "  windows"
    for group in _by_line(report.errors):
        first, cells = group[0], {}
        for e in group:
            prefix = "" if e.group == "rounds" else f"{e.group} "
            cells[f"{prefix}outputs"] = f"{e.output_error:.2e} <{e.output_bound:.1e}"
            cells[f"{prefix}states"] = f"{e.state_error:.2e} <{e.state_bound:.1e}"
        cases = sum(e.cases for e in group)
        line = f"{first.implementation:<12}{first.backend:<11}{first.dtype:<10}{first.scope:<6}{cases:>6}"
        exact = "exact" if all(e.windows_exact for e in group) else "WRONG"
        verdict = "" if all(e.passed for e in group) else "  BROKEN"
        yield line + "".join(f"{cells.get(name, '-'):>19}" for name in columns) + f"  {exact}{verdict}"


def _by_line(errors: Iterable[Errors]) -> list[list[Errors]]:
    lines: dict[tuple[str, ...], list[Errors]] = {}
    for e in errors:
        lines.setdefault((e.implementation, e.backend, e.dtype, e.scope), []).append(e)
    return [lines[key] for key in sorted(lines)]


def timing_lines(report: Report) -> Iterator[str]:
    """The table, the memory and what did not run."""
    sizes = ", ".join(f"{name} {value}" for name, value in report.shape.items())
    yield f"Shape: {sizes}. Method: {report.method}."
    yield f"Copy bandwidth {report.copy_bandwidth / 1e12:.3f} TB/s (1 GiB device copy, read and write counted)."
    yield (
        "Microseconds over all layers. PDL: programmatic launch (published kernels choose themselves). bytes: floor "
        "of the bytes that must move. launches: floor of as many empty kernels. x: times as fast as the reference."
    )
    yield (
        f"{'scope':<6}{'w':>3}{'m':>4}  {'backend':<10}{'PDL':<5}{'total':>8}{'spread':>8}{'verify':>8}{'commit':>8}"
        f"{'bytes':>8}{'launches':>10}{'x recurrent':>13}{'x sglang':>10}{'out err':>10}{'state err':>10}"
    )
    for row in sorted(report.rows, key=lambda r: (r.scope != "core", r.w, -r.m)):
        yield _row(report, row)
    for name, held in report.memory.items():
        yield f"Held for verification at 16 tokens, one request: {name} {held / 2**30:.4f} GiB"
    for name, reason in report.not_run.items():
        yield f"{name} not run: {reason}"


def _row(report: Report, row: Row) -> str:
    spread = "mean" if row.spread_us is None else f"{row.spread_us:.1f}"
    ratios = (report.ratio(row, "recurrent"), report.ratio(row, "sglang"))
    recurrent, sglang = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    floor = f"{row.launch_floor_us:.1f} ({row.launches})"
    return (
        f"{row.scope:<6}{row.w:>3}{row.m:>4}  {row.backend:<10}{'on' if row.overlap else 'off':<5}{row.total_us:>8.1f}"
        f"{spread:>8}{row.verify_us:>8.1f}{row.commit_us:>8.1f}{row.byte_floor_us:>8.1f}{floor:>10}"
        f"{recurrent:>13}{sglang:>10}{row.output_error:>10.1e}{row.state_error:>10.1e}"
    )


def producer_lines(report: ProducerReport) -> Iterator[str]:
    """The two front ends side by side."""
    sizes = ", ".join(f"{name} {value}" for name, value in report.shape.items())
    yield f"Shape: {sizes}. Random weights and hidden states; all layers in one CUDA graph, medians."
    yield f"Copy bandwidth {report.copy_bandwidth / 1e12:.3f} TB/s (1 GiB device copy, read and write counted)."
    yield "Microseconds over all layers, from hidden states to verified outputs; in brackets without the verification."
    yield "joint: one launch for projections and convolution. separate: four matrix products, then convolution and"
    yield "verification in one launch. floor: the weights' bytes, read once."
    yield f"{'w':>3}{'joint':>18}{'separate':>18}{'separate/joint':>16}{'floor':>8}"
    for row in report.rows:
        joint = f"{row.joint_us:.1f} ({row.joint_only_us:.1f})"
        separate = f"{row.separate_us:.1f} ({row.projections_only_us:.1f})"
        ratio = row.separate_us / row.joint_us
        yield f"{row.w:>3}{joint:>18}{separate:>18}{ratio:>16.2f}{row.byte_floor_us:>8.1f}"
