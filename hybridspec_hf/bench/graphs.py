"""Work on the GPU -> captured CUDA graphs, their number of nodes and their times."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ..graphs import capture as graphs_capture
from ..graphs import driver

# the other projects' kernels tune themselves in their first runs
WARMUPS = 3


def capture(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Run the work a few times on a side stream, so that everything is compiled, then capture it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            work()
    side.synchronize()
    graph = graphs_capture.capture(work, torch.cuda.graph_pool_handle(), side, "the measured work")
    graph.instantiate()
    return graph


def num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels (and copies) in a captured graph, by the driver's count."""
    count = ctypes.c_size_t()
    driver.call("cuGraphGetNodes", graph.raw_cuda_graph(), None, ctypes.byref(count))
    return count.value


def sample_us(replay: Callable[[], Any], samples: int, replays: int) -> list[float]:
    """Microseconds per replay, one number for each sample of back-to-back replays, by CUDA events."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    for _ in range(replays):
        replay()
    for begin, end in events:
        begin.record()
        for _ in range(replays):
            replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) / replays for begin, end in events]


def mean_parts_us(parts: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Mean microseconds of each part over rounds that run them in turn."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)] for _ in range(rounds)]
    for marks in events:
        marks[0].record()
        for part, mark in zip(parts, marks[1:], strict=True):
            part()
            mark.record()
    torch.cuda.synchronize()
    return [1e3 * sum(m[i].elapsed_time(m[i + 1]) for m in events) / rounds for i in range(len(parts))]
