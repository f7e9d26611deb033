"""The kernels that set what a conditional node does next, as PTX text that the driver compiles."""

import ctypes
from ctypes import c_int32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

from .driver import KernelParams, call, relaxed_capture

# 8.0 is CUDA 12.0's; the driver itself supplies cudaGraphSetConditional
PTX = """
.version 8.0
.target sm_80
.address_size 64

.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);

// chosen = clamp(*value - first, 0, last)
.visible .entry hybridspec_set_switch(
    .param .u64 handle_param,
    .param .u64 value_param,
    .param .u32 first_param,
    .param .u32 last_param
)
{
    .reg .b32 %value, %first, %last, %chosen;
    .reg .b64 %handle, %value_at;
    .param .b64 handle_argument;
    .param .b32 value_argument;

    ld.param.u64 %handle, [handle_param];
    ld.param.u64 %value_at, [value_param];
    ld.param.u32 %first, [first_param];
    ld.param.u32 %last, [last_param];
    cvta.to.global.u64 %value_at, %value_at;

    ld.volatile.global.u32 %value, [%value_at];
    sub.s32 %chosen, %value, %first;
    max.s32 %chosen, %chosen, 0;
    min.s32 %chosen, %chosen, %last;

    st.param.b64 [handle_argument], %handle;
    st.param.b32 [value_argument], %chosen;
    call.uni cudaGraphSetConditional, (handle_argument, value_argument);
    ret;
}

// *rounds = entering ? 0 : *rounds + 1; another one if *keep_going and *rounds < *limit
.visible .entry hybridspec_set_while(
    .param .u64 handle_param,
    .param .u64 keep_going_param,
    .param .u64 rounds_param,
    .param .u64 limit_param,
    .param .u32 entering_param
)
{
    .reg .pred %entering, %kept, %below;
    .reg .b32 %flag, %keep_going, %rounds, %limit, %next;
    .reg .b64 %handle, %keep_going_at, %rounds_at, %limit_at;
    .param .b64 handle_argument;
    .param .b32 value_argument;

    ld.param.u64 %handle, [handle_param];
    ld.param.u64 %keep_going_at, [keep_going_param];
    ld.param.u64 %rounds_at, [rounds_param];
    ld.param.u64 %limit_at, [limit_param];
    ld.param.u32 %flag, [entering_param];
    cvta.to.global.u64 %keep_going_at, %keep_going_at;
    cvta.to.global.u64 %rounds_at, %rounds_at;
    cvta.to.global.u64 %limit_at, %limit_at;

    ld.volatile.global.u32 %keep_going, [%keep_going_at];
    ld.volatile.global.u32 %rounds, [%rounds_at];
    ld.volatile.global.u32 %limit, [%limit_at];
    setp.ne.u32 %entering, %flag, 0;
    add.s32 %rounds, %rounds, 1;
    selp.b32 %rounds, 0, %rounds, %entering;
    st.volatile.global.u32 [%rounds_at], %rounds;
    setp.ne.s32 %kept, %keep_going, 0;
    setp.lt.s32 %below, %rounds, %limit;
    and.pred %kept, %kept, %below;
    selp.b32 %next, 1, 0, %kept;

    st.param.b64 [handle_argument], %handle;
    st.param.b32 [value_argument], %next;
    call.uni cudaGraphSetConditional, (handle_argument, value_argument);
    ret;
}
"""

# the C types of each kernel's parameters
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "hybridspec_set_switch": (c_uint64, c_uint64, c_int32, c_int32),
    "hybridspec_set_while": (c_uint64, c_uint64, c_uint64, c_uint64, c_int32),
}


@lru_cache
def load(context: int) -> dict[str, int]:
    """The kernels in a context, which must be the current one.

    They are loaded once and stay: loading waits until the GPU is idle, and unloading would have to.
    """
    module = c_void_p()
    with relaxed_capture():
        call("cuModuleLoadData", ctypes.byref(module), PTX.encode())
        return {name: _entry(module, name) for name in PARAMETERS}


def _entry(module: c_void_p, name: str) -> int:
    function = c_void_p()
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return function.value or 0


class Launch:
    """A launch of one thread of a setter as the driver takes it; holds the values that its pointers point at."""

    def __init__(self, context: int, name: str, *values: int) -> None:
        self.values = [kind(value) for kind, value in zip(PARAMETERS[name], values, strict=True)]
        self.pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in self.values))
        self.params = KernelParams(
            func=load(context)[name], grid=(1, 1, 1), block=(1, 1, 1), kernel_params=self.pointers
        )
