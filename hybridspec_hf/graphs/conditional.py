"""Captured graphs in a row, with SWITCH and WHILE nodes that the GPU steers: one graph to launch.

A SWITCH costs around 10 us more than running the chosen graph directly, whatever the number of bodies (H200).
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from . import driver, setter
from .driver import call


def supported(device: torch.device | str) -> str | None:
    """None if a `ParentGraph` can be made there, else the reason why not, in words."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return f"graphs with SWITCH nodes need an NVIDIA GPU, got {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"their setters are compiled for SM80 on, {torch.cuda.get_device_name(device)} is older"
    try:
        if (version := driver.version()) < driver.MIN_VERSION:
            return (
                f"SWITCH nodes need a driver for CUDA 12.8 or newer, this one supports {version // 1000}."
                f"{version % 1000 // 10}"
            )
        if missing := driver.missing():
            return f"the driver lacks {', '.join(missing)}"
        setter.load(driver.context_of(device))
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


class _Shared:
    """What all chains of one parent share."""

    def __init__(self, device: torch.device) -> None:
        # as tensors name it, with its index: theirs are compared with it
        self.device = torch.empty(0, device=device).device
        self.context = driver.context_of(device)
        # captured graphs own the memory that the parent works in
        self.kept: list[Any] = []
        self.instantiated = False
        root = c_void_p()
        with driver.using(self.context):
            setter.load(self.context)
            call("cuGraphCreate", ctypes.byref(root), 0)
        self.root = root.value


class Chain:
    """A graph being built: every node runs after the one added before it."""

    def __init__(self, shared: _Shared, graph: int | None) -> None:
        self._shared, self._graph = shared, graph
        self._last: c_void_p | None = None

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run a captured graph next; it must have been made with keep_graph=True (see `capture`)."""
        self._shared.kept.append(graph)
        self._append("cuGraphAddChildGraphNode", graph.raw_cuda_graph())

    def add_switch(self, value: Tensor, first: int, bodies: Sequence[torch.cuda.CUDAGraph]) -> None:
        """Run bodies[value - first] next.

        Args:
            value: [1] int32, read on the GPU when everything added before has run; out of range, it runs the nearest
                body, so the host should look at it when it reads the results.
            first: the value that means bodies[0].
        """
        shared = self._shared
        self._check("value", value)
        if not bodies:
            raise ValueError("A SWITCH needs at least one body.")
        handle = self._handle()
        self._set("hybridspec_set_switch", handle, value.data_ptr(), first, len(bodies) - 1)
        shared.kept.append(value)
        graphs = self._add_conditional(driver.SWITCH, handle, len(bodies))
        for graph, body in zip(graphs, bodies, strict=True):
            Chain(shared, graph).add(body)

    def add_while(self, build: Callable[["Chain"], None], keep_going: Tensor, limit: Tensor) -> Tensor:
        """Run a chain again and again: as long as keep_going is not 0, and at most `limit` times.

        Args:
            build: adds what a round does to the chain that it is given.
            keep_going: [1] int32, read on the GPU before every round.
            limit: [1] int32, rounds per launch, read before every round; a launch with no bound could never end.

        Returns:
            [1] int32, the rounds that the last launch ran.
        """
        self._check("keep_going", keep_going)
        self._check("limit", limit)
        rounds = torch.zeros_like(limit)
        self._shared.kept += [keep_going, limit, rounds]
        handle = self._handle()
        values = (handle, keep_going.data_ptr(), rounds.data_ptr(), limit.data_ptr())
        self._set("hybridspec_set_while", *values, 1)
        (graph,) = self._add_conditional(driver.WHILE, handle, 1)
        body = Chain(self._shared, graph)
        build(body)
        body._set("hybridspec_set_while", *values, 0)
        return rounds

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype != torch.int32 or tensor.numel() != 1 or tensor.device != self._shared.device:
            raise ValueError(
                f"{name} must be one int32 on {self._shared.device}, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}."
            )

    def _handle(self) -> int:
        """A new condition; a node's number in the root graph, so that it means another one in another root."""
        handle, shared = c_uint64(), self._shared
        with driver.using(shared.context):
            call(
                "cuGraphConditionalHandleCreate",
                *(ctypes.byref(handle), shared.root, shared.context, 0, driver.ASSIGN_DEFAULT),
            )
        return handle.value

    def _set(self, name: str, *values: int) -> None:
        with driver.using(self._shared.context):
            launch = setter.Launch(self._shared.context, name, *values)
        self._append("cuGraphAddKernelNode_v2", ctypes.byref(launch.params))

    def _add_conditional(self, kind: int, handle: int, size: int) -> list[int]:
        """Add the node, and return its empty bodies, which it owns."""
        node = driver.NodeParams(type=driver.CONDITIONAL_NODE)
        node.conditional = driver.ConditionalParams(handle, kind, size, None, self._shared.context)
        self._append("cuGraphAddNode_v2", ctypes.byref(node), edges=(None,))
        return node.conditional.bodies[:size]

    def _append(self, name: str, what: Any, edges: tuple[None, ...] = ()) -> None:
        if self._shared.instantiated:
            raise RuntimeError("The graph is instantiated or closed: nothing can be added. Make a new one.")
        node = c_void_p()
        after = (None, *edges, 0) if self._last is None else (ctypes.byref(self._last), *edges, 1)
        with driver.using(self._shared.context):
            call(name, ctypes.byref(node), self._graph, *after, what)
        self._last = node


class ParentGraph(Chain):
    """Captured graphs and the nodes that choose among them, launched as one.

    Example:
        parent = ParentGraph(device)
        parent.add(select)
        parent.add_switch(length, 2, rounds)
        parent.instantiate()
        parent.launch()
    """

    def __init__(self, device: torch.device | str) -> None:
        self._exec: int | None = None
        self._stream: torch.cuda.Stream | None = None
        shared = _Shared(torch.device(device))
        super().__init__(shared, shared.root)

    def instantiate(self) -> None:
        """Make it ready to launch; from then on nothing can be added. Waits for graphs that are running."""
        if self._shared.instantiated:
            raise RuntimeError("The graph is instantiated or closed already.")
        executable = c_void_p()
        stream = torch.cuda.current_stream(self._shared.device)
        with driver.using(self._shared.context):
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), self._graph, 0)
            self._exec, self._shared.instantiated = executable.value, True
            call("cuGraphUpload", self._exec, stream.cuda_stream)
        # launches on other streams must find it on the GPU
        stream.synchronize()

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Queue one run on a stream, by default the device's current one."""
        if self._exec is None:
            raise RuntimeError("The graph cannot be launched before instantiate() or after close().")
        self._stream = stream or torch.cuda.current_stream(self._shared.device)
        with driver.using(self._shared.context):
            call("cuGraphLaunch", self._exec, self._stream.cuda_stream)

    def close(self) -> None:
        """Wait for the last launch and free the graph; the captured graphs live on if others hold them."""
        shared = self._shared
        shared.instantiated = True
        # runs of one graph never overlap, so that the last one ends last
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            self._stream.synchronize()
        self._stream = None
        with driver.using(shared.context), driver.relaxed_capture():
            if self._exec is not None:
                executable, self._exec = self._exec, None
                call("cuGraphExecDestroy", executable)
            if self._graph is not None:
                graph, self._graph = self._graph, None
                call("cuGraphDestroy", graph)
        shared.kept.clear()

    def __del__(self) -> None:
        # never made, or the interpreter or the driver is going away and takes it along
        with suppress(Exception):
            self.close()
