"""The target's latency by verification length on this machine -> CostTable (Appendix A.2), in seconds of measuring.

Measured inside a request, between prefill and the first round: stages run on pieces of the prompt without a commit, so
nothing of the request changes.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hybridspec_generation.round import Round
from hybridspec_generation.tables import CostTable

from ..graphs.timing import graph_seconds, mean_times

# a quadratic has three unknowns
LENGTHS = (2, 4, 8, 12, 16)
REPEATS = 5
# pieces of text to time the target on: how many experts a few tokens choose differs from one to the next
WINDOWS = 8
MIN_COST = 1e-9


# runs, and what writes their inputs -> seconds of each run
Timer = Callable[..., list[float]]


def measure_cost(r: Round, tokens: torch.Tensor, *, graphs: bool = False, runtime: str = "") -> CostTable:
    """Time a draft and both stages at several lengths and fit the paper's quadratic, for a first use.

    Acceptance, commit and launches, the same for all lengths, are not in it: `contexts.py` measures whole rounds.

    Args:
        r: a round whose cache holds a prompt; nothing of it is committed.
        tokens: `[T]`, int64, text of which pieces of W tokens are verified, repeated if T < W.
        graphs: time CUDA graphs, because rounds run as graphs; else launches one by one.
        runtime: what runs the rounds, for the table.

    Returns:
        The pair's `CostTable`, its `source` naming hardware, versions and method.
    """
    block, drafter = r.state.block, r.drafter
    assert drafter is not None
    # launched one by one, operations take their time whatever the experts
    windows = text_windows(tokens, block, WINDOWS if graphs else 1)
    text = windows[0].clone()
    inputs = [partial(text.copy_, window) for window in windows]
    lengths = some_lengths(block)
    timer = pick_timer(graphs, text.device)
    whole = timer([partial(run_target, r, text, w) for w in lengths], inputs=inputs)
    (draft,) = timer([partial(drafter.propose, text[:1], r.cache.length, r.state.draft)])
    how = f"stages one by one, mean over texts: {len(windows)}, shortest of {REPEATS} each"
    points = [(float(w), draft + seconds) for w, seconds in zip(lengths, whole, strict=True)]
    return cost_table(r, points, text, graphs, runtime, how)


def cost_table(
    r: Round, points: Sequence[tuple[float, float]], text: torch.Tensor, graphs: bool, runtime: str, how: str
) -> CostTable:
    """The table of a round's (mean) verification lengths and seconds; s and eta are measured here.

    Args:
        r, graphs, runtime: see `measure_cost`. text: `[W]`, int64, for Stage 0. how: how the seconds were measured.
    """
    block, timer, device = r.state.block, pick_timer(graphs, text.device), device_name(text.device)
    curve = np.polyval(fit_quadratic(points), np.arange(block + 1))
    # noise must not make a longer input look cheaper
    curve = np.maximum.accumulate(np.maximum(curve[2:], MIN_COST))
    fixed, some = float(curve[0]), some_lengths(block)
    first = timer([partial(r.target.stage0, text[:w], r.cache, r.state.boundary) for w in some])
    return CostTable(
        target_cost=(0.0, 0.0, *(float(c) - fixed for c in curve)),
        fixed_cost=fixed,
        stage0_token_cost=max(0.0, slope(some, first)),
        expert_cost=expert_cost(r, timer),
        device=device,
        runtime=runtime,
        context=int(r.cache.length),
        measured=tuple(points),
        source=f"measured on {device}, torch {torch.__version__}, {'graphs' if graphs else 'eager'}, context "
        f"{int(r.cache.length)}, {how}",
    )


def fit_quadratic(points: Sequence[Sequence[float]]) -> np.ndarray:
    """Least-squares coefficients of the second value of each pair in its first, highest power first; of fewer than
    three pairs, of a lower degree."""
    first, second = zip(*points, strict=True)
    return np.polyfit(first, second, min(2, len(points) - 1))


def some_lengths(block: int) -> list[int]:
    """Those that are measured, for a block of W tokens."""
    return sorted({min(w, block) for w in (*LENGTHS, block)})


def pick_timer(graphs: bool, device: torch.device) -> Timer:
    """Graphs are timed as graphs, because rounds run so."""
    return partial(graph_seconds, device=device) if graphs else wall_seconds


def text_windows(tokens: torch.Tensor, block: int, count: int) -> list[torch.Tensor]:
    """At most `count` pieces of `block` tokens of a text `[T]`, evenly apart from its end on; a short text repeats."""
    text = tokens.repeat(-(-block // len(tokens)))
    starts = np.linspace(len(text) - block, 0, count).round().astype(int).tolist()
    return [text[start : start + block] for start in dict.fromkeys(starts)]


def run_target(r: Round, text: torch.Tensor, w: int) -> None:
    """Both stages and the head on w tokens; writes scratch rows only."""
    r.target.stage0(text[:w], r.cache, r.state.boundary)
    hidden = r.target.stage1(w, r.cache, r.state.boundary, r.state.features)
    r.target.next_tokens(hidden, r.state.target_tokens[:w])


def expert_cost(r: Round, timer: Timer) -> float:
    """eta: slope of one MoE layer's time in its number of distinct experts, at W tokens; 0 for a dense target."""
    target: Any = r.target
    boundary, block, top_k = r.state.boundary, r.state.block, target.top_k
    if not top_k:
        return 0.0
    shared = torch.arange(top_k, device=boundary.expert_ids.device).expand(block, -1)
    offsets = torch.arange(block, device=shared.device)[:, None] * top_k
    counts, times = [], []
    for ids in (shared, (shared + offsets) % target.num_experts):
        boundary.expert_ids.copy_(ids)
        counts.append(len(ids.unique()))
        times += timer([partial(target.resume_mlp, block, boundary)])
    return max(0.0, slope(counts, times))


def slope(x: list[int], y: list[float]) -> float:
    """Least-squares slope; 0 when there is only one x."""
    return float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else 0.0


def wall_seconds(runs: Sequence[Callable[[], object]], inputs: Sequence[Callable[[], object]] = ()) -> list[float]:
    """Wall-clock time of each run, launched operation by operation; see `graph_seconds`."""
    return mean_times(lambda: [seconds(run) for run in runs], inputs)


def seconds(run: Callable[[], object]) -> float:
    """Shortest wall-clock time of `run` after one warm-up; what else the machine does only adds to it."""
    times = []
    for _ in range(REPEATS + 1):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
