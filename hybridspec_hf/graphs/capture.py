"""Work on the GPU -> a captured graph that can become a part of another one."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# PyTorch's allocators may go on asking a graph whose capture broke
_broken: list[torch.cuda.CUDAGraph] = []


class CaptureError(RuntimeError):
    """A piece of work could not be captured."""


def capture(
    work: Callable[[], Any], pool: tuple[int, int], stream: torch.cuda.Stream, name: str
) -> torch.cuda.CUDAGraph:
    """Capture work that has run before, so that everything it needs is compiled; nothing runs now.

    What later work reads must be written to tensors allocated outside: another capture reuses the pool's memory.

    Args:
        work: launches kernels and copies; must not read a device value on the host, nor allocate pinned memory.
        pool: torch.cuda.graph_pool_handle(), one for all graphs of which no two run at the same time. It dies with
            the last of them: PyTorch refuses to use it again.
        stream: to capture on, not the default one.
        name: of the piece, for the error.

    Raises:
        CaptureError: names the piece and says what it failed at. CUDA works on; take a new pool to try again.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    try:
        _record(graph, work, pool, stream)
    except Exception as error:
        _unwind(graph, pool, stream)
        raise CaptureError(f"Capturing {name} failed with {type(error).__name__}: {error}") from error
    return graph


def _record(
    graph: torch.cuda.CUDAGraph, work: Callable[[], Any], pool: tuple[int, int], stream: torch.cuda.Stream
) -> None:
    """What torch.cuda.graph does, but for freeing cached memory first; and it leaves the stream whatever happens."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            work()
        except BaseException:
            # fails too if the work broke the capture, but ends it
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()


def _unwind(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Undo what PyTorch before 2.12 leaves undone where a capture broke (its pull requests 171265 and 180395)."""
    graph.reset()
    _broken.append(graph)
    # refused where PyTorch has stopped allocating to the pool by itself
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    # the random generators think that they are being captured until a capture ends well
    scratch = torch.zeros(1, device=stream.device)
    _record(torch.cuda.CUDAGraph(keep_graph=True), scratch.zero_, torch.cuda.graph_pool_handle(), stream)
