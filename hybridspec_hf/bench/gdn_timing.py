"""GDN verifiers on one GPU and identical random inputs -> times of a round over all layers, beside their floors.

The method is the paper's (Appendix, "Kernel microbenchmark details"): a CUDA graph verifies w tokens in every GDN
layer and commits m, and its time is the median of 30 samples of 10 replays. A backend whose commit costs more in some
rounds than in others is timed as the mean over 300 rounds of a verification graph and a commit graph in turn.
"""

import traceback
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch
from tqdm import tqdm

from hybridspec_generation.gdn import GDNShape
from hybridspec_kernels.triton_support import has_programmatic_launch

from .gdn_backends import COMPETITORS
from .gdn_floors import LaunchFloor, copy_bandwidth, round_bytes
from .gdn_inputs import describe_shape
from .gdn_report import Report, Row
from .gdn_work import Truth, Work, check_replay
from .graphs import capture, mean_parts_us, num_nodes, sample_us

METHOD = (
    "random inputs, the same for every backend; per row one CUDA graph of all layers' verifications and the commit, "
    "already compiled; median of {samples} samples of {replays} replays (replay, replayssm: mean of {rounds} rounds "
    "of a verification graph and a commit graph in turn); m tokens committed, read from GPU memory"
)
LENGTHS = (1, 2, 3, 4, 8, 12, 16)
MEAN_ROUNDS = 300
MEMORY_BLOCK = 16


def time_backends(
    shape: GDNShape,
    backends: Sequence[str],
    *,
    lengths: Sequence[int] = LENGTHS,
    scopes: Sequence[str] = ("core", "conv"),
    samples: int = 30,
    replays: int = 10,
) -> Report:
    """Time backends on a GPU. A graph whose results are wrong is not timed, and neither is its backend after that.

    Args:
        shape: its device is the GPU. backends: keys of `COMPETITORS`.
    """
    return Bench(shape, backends, samples=samples, replays=replays).run(lengths, scopes)


class Graphs(NamedTuple):
    """Captured from the same buffers."""

    round: torch.cuda.CUDAGraph
    verify: torch.cuda.CUDAGraph
    commit: torch.cuda.CUDAGraph


class Bench:
    """Fills a report."""

    def __init__(self, shape: GDNShape, names: Sequence[str], *, samples: int, replays: int) -> None:
        self.shape, self.names, self.samples, self.replays = shape, names, samples, replays
        self.floor = LaunchFloor(shape.device, samples, replays)
        self.report = Report(
            shape=describe_shape(shape),
            method=METHOD.format(samples=samples, replays=replays, rounds=MEAN_ROUNDS),
            copy_bandwidth=copy_bandwidth(shape.device, samples),
        )

    @torch.inference_mode()
    def run(self, lengths: Sequence[int], scopes: Sequence[str]) -> Report:
        """Time every backend at every length and scope."""
        self.measure_memory()
        variants = [(w, scope, *variant) for w in lengths for scope in scopes for variant in self.variants(scope)]
        truth: Truth | None = None
        for w, scope, name, overlap in tqdm(variants, desc="timing", unit="backend"):
            if truth is None or (truth.w, truth.scope) != (w, scope):
                truth = Truth(self.shape, w, scope)
            if name not in self.report.not_run:
                self.attempt(name, truth, overlap)
        return self.report

    def measure_memory(self) -> None:
        """Bytes held for verification; a backend that cannot be built has no rows."""
        for name in self.names:
            try:
                gdn = COMPETITORS[name].build(self.shape, MEMORY_BLOCK)
                self.report.memory[name] = gdn.verification_bytes()
            except Exception as error:
                self.give_up(name, error)

    def variants(self, scope: str) -> Iterator[tuple[str, bool]]:
        """Backends of a scope with programmatic launch where the GPU has it; ours also without."""
        available = has_programmatic_launch(self.shape.device)
        for name in self.names:
            competitor = COMPETITORS[name]
            if scope in competitor.scopes:
                yield name, available
                if competitor.ours and available:
                    yield name, False

    def attempt(self, name: str, truth: Truth, overlap: bool) -> None:
        """Add a backend's rows of one length, or the reason why there are none."""
        try:
            gdn = COMPETITORS[name].build(self.shape, truth.w)
            work = Work(gdn, truth.start, truth.item, truth.scope, overlap)
            self.report.rows += self.time(name, work, truth)
        except Exception as error:
            self.give_up(name, error)

    def give_up(self, name: str, error: Exception) -> None:
        """Leave a backend out from now on; one of ours should not have failed."""
        reason = str(error).splitlines() or [""]
        self.report.not_run[name] = f"{type(error).__name__}: {reason[0]}"
        if COMPETITORS[name].ours:
            traceback.print_exception(error)

    def time(self, name: str, work: Work, truth: Truth) -> list[Row]:
        """Capture a backend's graphs once, and check and time them for each m."""
        work.load()
        verification, commit = capture(work.verify), capture(work.commit)
        # the last capture, so that `work.last` is what this graph writes
        graphs = Graphs(capture(work.round), verification, commit)
        rows = []
        for m in sorted({truth.w, -(-truth.w // 2)}, reverse=True):
            errors = check_replay(name, work, graphs.round.replay, truth, m)
            rows.append(self.row(name, work, graphs, (truth.w, m), errors))
        return rows

    def row(self, name: str, work: Work, graphs: Graphs, tokens: tuple[int, int], errors: tuple[float, float]) -> Row:
        """Time captured graphs that verify w and commit m tokens, (w, m) = `tokens`."""
        (w, m), launches = tokens, num_nodes(graphs.round)
        total, spread, verification, commit = self.times(graphs, work.gdn.uneven_commits)
        moved = round_bytes(COMPETITORS[name].method, self.shape, w, m, work.scope)
        return Row(
            backend=name,
            scope=work.scope,
            w=w,
            m=m,
            overlap=work.overlap,
            total_us=total,
            spread_us=spread,
            verify_us=verification,
            commit_us=commit,
            launches=launches,
            byte_floor_us=1e6 * moved / self.report.copy_bandwidth,
            launch_floor_us=self.floor.us(launches, work.overlap),
            output_error=errors[0],
            state_error=errors[1],
        )

    def times(self, graphs: Graphs, uneven: bool) -> tuple[float, float | None, float, float]:
        """Round, its spread, verification and commit, in microseconds."""
        if uneven:
            in_turn = [graphs.verify.replay, graphs.commit.replay]
            (total,) = sample_us(lambda: [replay() for replay in in_turn], 1, MEAN_ROUNDS)
            verification, commit = mean_parts_us(in_turn, MEAN_ROUNDS)
            return total, None, verification, commit
        totals, verifications, commits = (sample_us(graph.replay, self.samples, self.replays) for graph in graphs)
        return median(totals), max(totals) - min(totals), median(verifications), median(commits)
