"""The CUDA driver's graph calls by ctypes, each checked; layouts and signatures of cuda.h, the same in 12.8 and 13."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_longlong, c_size_t, c_uint, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import torch

# CUDA 12.8 is the first with SWITCH nodes; cuda.h writes a version as 1000 * major + 10 * minor
MIN_VERSION = 12080

CONDITIONAL_NODE = 13
WHILE, SWITCH = 1, 2
ASSIGN_DEFAULT = 1
RELAXED_CAPTURE = 2


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("kernel_params", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    ]


class ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS; the driver points `bodies` at its own array of graphs."""

    _fields_ = [
        ("handle", c_uint64),
        ("type", c_int),
        ("size", c_uint),
        ("bodies", POINTER(c_void_p)),
        ("ctx", c_void_p),
    ]


class _AnyParams(ctypes.Union):
    _fields_ = [("padding", c_longlong * 29), ("conditional", ConditionalParams)]


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams, of the kinds of nodes only the conditional one."""

    _anonymous_ = ("params",)
    _fields_ = [("type", c_int), ("reserved0", c_int * 3), ("params", _AnyParams), ("reserved2", c_longlong)]


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuGraphCreate": (POINTER(c_void_p), c_uint),
    "cuGraphConditionalHandleCreate": (POINTER(c_uint64), c_void_p, c_void_p, c_uint, c_uint),
    # new node, graph, nodes it comes after, (their edges' data,) how many, what it is
    "cuGraphAddChildGraphNode": (POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t, c_void_p),
    "cuGraphAddKernelNode_v2": (POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_size_t, POINTER(KernelParams)),
    "cuGraphAddNode_v2": (
        *(POINTER(c_void_p), c_void_p, POINTER(c_void_p), c_void_p, c_size_t),
        POINTER(NodeParams),
    ),
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, c_uint64),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuEventRecord": (c_void_p, c_void_p),
}
# calls of a round, over in microseconds: they keep the interpreter's lock, which a busy thread gives back after 5 ms
QUICK = ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuEventRecord")


@lru_cache
def library() -> ctypes.CDLL:
    """The driver's library; raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@lru_cache
def _quick_library() -> ctypes.PyDLL:
    """The same library, whose functions keep the interpreter's lock."""
    return ctypes.PyDLL("libcuda.so.1")


@lru_cache
def _function(name: str) -> Any:
    function = getattr(_quick_library() if name in QUICK else library(), name)
    function.argtypes, function.restype = ARGUMENTS[name], c_int
    return function


def call(name: str, *arguments: Any) -> None:
    """Call a function of `ARGUMENTS`.

    Raises:
        RuntimeError: names the function and the driver's error.
    """
    status = _function(name)(*arguments)
    if status:
        raise RuntimeError(
            f"{name} failed with {_words('cuGetErrorName', status)} ({status}): {_words('cuGetErrorString', status)}. "
            "With CUDA_LOG_FILE=stderr in the environment the driver says more."
        )


def _words(name: str, status: int) -> str:
    text = c_char_p()
    _function(name)(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


def missing() -> list[str]:
    """Functions of `ARGUMENTS` that the driver does not have."""
    return [name for name in ARGUMENTS if not hasattr(library(), name)]


def version() -> int:
    """The newest CUDA the driver supports, 1000 * major + 10 * minor."""
    number = c_int()
    call("cuDriverGetVersion", ctypes.byref(number))
    return number.value


def current_context() -> int:
    """The context of the calling thread; raises RuntimeError if there is none."""
    context = c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        raise RuntimeError("No CUDA context is current on this thread. Run an operation on the device first.")
    return context.value


def context_of(device: torch.device) -> int:
    """A device's context, which PyTorch makes current with the first operation."""
    with torch.cuda.device(device):
        torch.zeros(1, device=device)
        return current_context()


@contextmanager
def using(context: int) -> Iterator[None]:
    """Make a context the calling thread's for a while: a new thread has none, whatever PyTorch's device is."""
    call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let the thread free driver objects without breaking a capture that it has under way."""
    mode = c_int(RELAXED_CAPTURE)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
