"""Triton where it is installed: one import for every kernel file, and what a launch may use on a device."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    # the references still work; annotations such as tl.constexpr must resolve
    class _Absent:
        def __getattr__(self, name: str) -> Any:
            return None

    triton, tl, gdc_launch_dependents, gdc_wait = None, _Absent(), None, None

# Triton's own switch, read as Triton reads it: before the first kernel is defined
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)


_COMPILING = threading.Lock()

Launcher = TypeVar("Launcher", bound=Callable[..., None])


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`triton.jit` with its options, or the plain function where there is no Triton."""
    return function if triton is None else triton.jit(function, **options)


def launcher(function: Launcher) -> Launcher:
    """Make a function that launches kernels do so on the device of its tensors; Triton takes the current device.

    The function raises ValueError if its tensors are on several devices, or on one without kernels.
    """

    @wraps(function)
    def launch(*args: Any, **kwargs: Any) -> None:
        devices = {tensor.device for tensor in _tensors((args, tuple(kwargs.values())))}
        if len(devices) != 1:
            raise ValueError(
                f"{function.__name__} got tensors on {sorted(map(str, devices))}. Move them to one device."
            )
        (device,) = devices
        if not (INTERPRETED or has_kernels(device)):
            raise ValueError(
                f"{function.__name__} needs an NVIDIA GPU from SM80 on and triton, got tensors on {device}. "
                "Use the function whose name ends in _ref there."
            )
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            function(*args, **kwargs)

    return launch  # type: ignore[return-value]


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


@lru_cache
def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run there at speed: an NVIDIA GPU from SM80 on."""
    if triton is None or INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def has_programmatic_launch(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it ends (programmatic dependent launch, SM90 on)."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, overlap: bool) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's `USE_PDL`, and Triton's option where it is on.

    Args:
        device: of the tensors.
        overlap: whether the caller allows the kernel to start before its predecessor ends.
    """
    pdl = overlap and has_programmatic_launch(device)
    return {"USE_PDL": True, "launch_pdl": True} if pdl else {"USE_PDL": False}


@jit
def start_next(USE_PDL: tl.constexpr):
    """Let the next kernel of the stream start its part that does not depend on this one."""
    if USE_PDL:
        gdc_launch_dependents()


@jit
def await_previous(USE_PDL: tl.constexpr):
    """Wait until everything that the previous kernels of the stream wrote is visible."""
    if USE_PDL:
        gdc_wait()


@contextmanager
def compile_only(executor: Executor) -> Iterator[None]:
    """Within the block, this thread's launches run nothing: their kernels are compiled by the executor instead.

    At the block's end all are compiled. Launches of other threads are as ever; one thread at a time may be in here.
    """
    kernel, mode = triton.runtime.jit.JITFunction, triton.runtime._async_compile.active_mode
    with _COMPILING:
        run, thread = kernel.run, threading.get_ident()

        def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == thread, **kwargs)

        kernel.run = warm_up
        try:
            with triton.AsyncCompileMode(executor):
                yield
        finally:
            kernel.run = run
            # Triton leaves it behind where a kernel does not compile
            mode.set(None)


if INTERPRETED:

    def loop_bound(n: Any) -> int:
        """A number read from memory, as the end of a `range`; NumPy 2.4 took the interpreter's own way."""
        return int(n.handle.data.item())

else:

    @jit
    def loop_bound(n):
        """A number read from memory, as the end of a `range`; call it inside `range()`, the interpreter needs that."""
        return n
