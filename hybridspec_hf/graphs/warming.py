"""Work that will be captured -> compiled and run once, so that a capture neither compiles nor loads anything."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Any

import torch

from hybridspec_kernels import compile_only

MOST_THREADS = 16


def warm_up(
    runs: Sequence[Callable[[], Any]], stream: torch.cuda.Stream, advance: Callable[[], Any] = lambda: None
) -> None:
    """Compile what the runs launch, many kernels at a time, then run each once.

    Args:
        stream: to run on; it is done when this returns.
        advance: called after each of the two steps, for a progress bar.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    try:
        with torch.cuda.stream(stream):
            with ThreadPoolExecutor(min(MOST_THREADS, cpu_count() or 1)) as executor, compile_only(executor):
                for run in runs:
                    run()
            advance()
            for run in runs:
                run()
    finally:
        # whatever fails: nothing of it still writes when the caller goes on
        stream.synchronize()
    advance()
