"""Work on the GPU -> seconds that it takes as a captured graph: what a round pays for it."""

from collections.abc import Callable, Sequence
from statistics import mean

import torch

from .capture import capture
from .warming import warm_up

REPEATS = 5


def graph_seconds(
    runs: Sequence[Callable[[], object]], device: torch.device, inputs: Sequence[Callable[[], object]] = ()
) -> list[float]:
    """Shortest time of each run as a graph, of a few; they are compiled together before.

    Args:
        inputs: each writes what all runs read, where they read it: the times are the means over these inputs.
    """
    stream = torch.cuda.Stream(device)
    warm_up(runs, stream)
    pool = torch.cuda.graph_pool_handle()
    graphs = [capture(run, pool, stream, "a measured piece") for run in runs]
    for graph in graphs:
        graph.instantiate()
    with torch.cuda.stream(stream):
        return mean_times(lambda: [shortest(graph, stream) for graph in graphs], inputs)


def mean_times(measure: Callable[[], list[float]], inputs: Sequence[Callable[[], object]]) -> list[float]:
    """What `measure` says of each run, averaged over the inputs; with none, of what is there."""
    if not inputs:
        return measure()
    times = []
    for write in inputs:
        write()
        times.append(measure())
    return [mean(of_run) for of_run in zip(*times, strict=True)]


def shortest(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Seconds of the quickest replay; the first does not count."""
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[1:])
