"""Graphs steered by the GPU: layouts, PTX and refusals on a CPU; on a GPU each body runs only when it is chosen."""

import ctypes
import os
import re
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridspec_hf.graphs import driver, setter
from hybridspec_hf.graphs.capture import capture
from hybridspec_hf.graphs.conditional import Chain, ParentGraph, supported
from hybridspec_kernels.triton_support import await_previous, jit, launch_options, start_next, tl

# values, and what they are clamped to, for a SWITCH whose bodies mean 3, 4, 5, 6, 7
FIRST, BODIES = 3, 5
VALUES = [(value, min(max(value, FIRST), FIRST + BODIES - 1)) for value in range(FIRST - 2, FIRST + BODIES + 2)]


def test_layouts_are_those_of_the_header() -> None:
    """sizeof and offsetof by gcc with cuda.h of CUDA 12.8 and 13.0, which agree."""
    assert ctypes.sizeof(driver.KernelParams) == 72
    assert driver.KernelParams.shared_bytes.offset == 32
    assert driver.KernelParams.kernel_params.offset == 40
    assert driver.KernelParams.ctx.offset == 64
    assert ctypes.sizeof(driver.ConditionalParams) == 32
    assert driver.ConditionalParams.size.offset == 12
    assert driver.ConditionalParams.bodies.offset == 16
    assert driver.ConditionalParams.ctx.offset == 24
    assert ctypes.sizeof(driver.NodeParams) == 256
    assert driver.NodeParams.conditional.offset == 16


@pytest.mark.parametrize("name", sorted(setter.PARAMETERS))
def test_setter_takes_the_parameters_it_is_given(name: str) -> None:
    (text,) = re.findall(rf"\.visible \.entry {name}\((.*?)\)", setter.PTX, re.DOTALL)
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", text)]
    assert sizes == [ctypes.sizeof(kind) for kind in setter.PARAMETERS[name]]


def test_setters_are_text_for_old_enough_drivers() -> None:
    assert setter.PTX.isascii() and setter.PTX.count("{") == setter.PTX.count("}") == len(setter.PARAMETERS)
    (version,) = re.findall(r"\.version (\d+\.\d+)", setter.PTX)
    # 8.7 is CUDA 12.8's
    assert float(version) <= 8.7
    assert setter.PTX.count("call.uni cudaGraphSetConditional") == len(setter.PARAMETERS)


def test_a_cpu_is_refused_in_words() -> None:
    assert "NVIDIA GPU" in (supported("cpu") or "")


@pytest.mark.parametrize(
    ("version", "lacking", "says"),
    [
        (12040, [], "this one supports 12.4"),
        (12080, ["cuGraphAddNode_v2"], "lacks cuGraphAddNode_v2"),
        (13000, [], None),
    ],
)
def test_old_drivers_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, version: int, lacking: list[str], says: str | None
) -> None:
    pretend_to_have_a_gpu(monkeypatch)
    monkeypatch.setattr(driver, "version", lambda: version)
    monkeypatch.setattr(driver, "missing", lambda: lacking)
    monkeypatch.setattr(setter, "load", lambda context: {})
    monkeypatch.setattr(driver, "context_of", lambda device: 1)
    reason = supported("cuda:0")
    assert reason is None if says is None else says in (reason or "")


def test_no_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_have_a_gpu(monkeypatch)

    def no_library() -> int:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "version", no_library)
    assert "libcuda.so.1" in (supported("cuda:0") or "")


def pretend_to_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_failing_call_names_itself_and_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            if name.startswith("cuGetError"):
                arguments[1]._obj.value = (
                    b"CUDA_ERROR_INVALID_VALUE" if name == "cuGetErrorName" else b"invalid argument"
                )
                return 0
            return 1

        return function

    monkeypatch.setattr(driver, "_function", answers)
    message = r"cuGraphLaunch failed with CUDA_ERROR_INVALID_VALUE \(1\): invalid argument.*CUDA_LOG_FILE=stderr"
    with pytest.raises(RuntimeError, match=message):
        driver.call("cuGraphLaunch", 0, 0)


class Gpu:
    """A stream, a pool, and captures of small work on numbers of the GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream()
        self.pool: Any = torch.cuda.graph_pool_handle()

    def number(self, value: int = 0) -> Tensor:
        return torch.full((1,), value, dtype=torch.int32, device=self.device)

    def capture(self, work: Callable[[], Any], name: str = "test") -> torch.cuda.CUDAGraph:
        """Warm up on the side stream, undo nothing: `work` must not mind running once more."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.synchronize()
        return capture(work, self.pool, self.stream, name)

    def fills(self, out: Tensor, numbers: list[int]) -> list[torch.cuda.CUDAGraph]:
        """One graph a number, which writes it to `out`."""
        return [self.capture(lambda number=number: out.fill_(number)) for number in numbers]  # type: ignore[misc]


@pytest.fixture
def gpu() -> Gpu:
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := supported(device):
        pytest.skip(reason)
    return Gpu()


def switch_parent(gpu: Gpu, value: Tensor, out: Tensor, scale: int = 1) -> ParentGraph:
    """A parent that writes scale * value to `out`, in one body a value."""
    parent = ParentGraph(gpu.device)
    parent.add_switch(value, FIRST, gpu.fills(out, [scale * (FIRST + i) for i in range(BODIES)]))
    parent.instantiate()
    return parent


@pytest.mark.gpu
def test_switch_runs_the_body_of_each_value(gpu: Gpu) -> None:
    value, out = gpu.number(), gpu.number()
    parent = switch_parent(gpu, value, out)
    for chosen, expected in VALUES:
        value.fill_(chosen)
        out.fill_(-1)
        parent.launch()
        assert int(out) == expected
    parent.close()


@pytest.mark.gpu
@pytest.mark.parametrize("first", [-3, 0, 1000])
@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1])
def test_extreme_values_run_an_end_body(gpu: Gpu, first: int, value: int) -> None:
    at, out = gpu.number(value), gpu.number()
    parent = ParentGraph(gpu.device)
    parent.add_switch(at, first, gpu.fills(out, [1, 2, 3]))
    parent.instantiate()
    out.zero_()
    parent.launch()
    assert int(out) in (1, 3)


@pytest.mark.gpu
def test_a_body_computes_the_value_of_the_next_switch(gpu: Gpu) -> None:
    value, second, out = gpu.number(), gpu.number(), gpu.number()
    parent = ParentGraph(gpu.device)
    parent.add(gpu.capture(lambda: out.fill_(-1)))
    # value v leads to 4 - v, so that the order of the bodies turns round
    parent.add_switch(value, 0, gpu.fills(second, [4, 3, 2, 1, 0]))
    parent.add_switch(second, 0, gpu.fills(out, [10, 11, 12, 13, 14]))
    parent.add(gpu.capture(lambda: out.add_(100)))
    parent.instantiate()
    for v in (0, 1, 2, 3, 4, 2, 0):
        value.fill_(v)
        parent.launch()
        assert int(out) == 110 + 4 - v
    value.fill_(9)
    parent.launch()
    assert int(out) == 110


@pytest.mark.gpu
@pytest.mark.parametrize(("rounds", "limit"), [(5, 100), (100, 7), (1, 1), (3, 0), (0, 9), (3, 3)])
def test_while_ends_at_the_flag_or_the_limit(gpu: Gpu, rounds: int, limit: int) -> None:
    """Each round a SWITCH of three bodies in turn, so the sum shows which ones ran."""
    count, turn, total = gpu.number(), gpu.number(), gpu.number()
    keep_going, wanted, bound = gpu.number(), gpu.number(rounds), gpu.number(limit)

    def step() -> None:
        count.add_(1)
        keep_going.copy_(count < wanted)
        turn.copy_(count % 3)

    # [1], [10], [100] added by turn
    bodies = [gpu.capture(lambda amount=10**i: total.add_(amount)) for i in range(3)]  # type: ignore[misc]
    graph = gpu.capture(step)

    def round_of(chain: Chain) -> None:
        chain.add(graph)
        chain.add_switch(turn, 0, bodies)

    parent = ParentGraph(gpu.device)
    ran = parent.add_while(round_of, keep_going, bound)
    parent.add(gpu.capture(lambda: total.neg_()))
    parent.instantiate()
    for _ in range(3):
        count.zero_()
        total.zero_()
        keep_going.fill_(int(rounds > 0))
        parent.launch()
        expected = min(rounds, limit)
        assert int(ran) == expected == int(count)
        assert -int(total) == sum(10 ** (i % 3) for i in range(1, expected + 1))


@pytest.mark.gpu
def test_two_parents_steer_their_own_nodes(gpu: Gpu) -> None:
    """A condition's number is the same in both: a setter must act on the graph it runs in."""
    values, outs = [gpu.number(), gpu.number()], [gpu.number(), gpu.number()]
    parents = [switch_parent(gpu, value, out, 10**i) for i, (value, out) in enumerate(zip(values, outs, strict=True))]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for i in range(50):
        chosen = [FIRST + i % BODIES, FIRST + (3 * i + 1) % BODIES]
        for value, v in zip(values, chosen, strict=True):
            value.fill_(v)
        torch.cuda.synchronize()
        for parent, stream in zip(parents, streams, strict=True):
            parent.launch(stream)
        torch.cuda.synchronize()
        assert [int(out) for out in outs] == [chosen[0], 10 * chosen[1]]


@pytest.mark.gpu
def test_a_thousand_launches_in_a_row(gpu: Gpu) -> None:
    """Each launch chooses the next one's body: 0, 1, ..., 4, 0, ..."""
    value, counts = gpu.number(), torch.zeros(BODIES, dtype=torch.int32, device=gpu.device)

    def body(i: int) -> Callable[[], None]:
        def work() -> None:
            counts[i : i + 1].add_(1)
            value.fill_((i + 1) % BODIES)

        return work

    graphs = [gpu.capture(body(i)) for i in range(BODIES)]
    parent = ParentGraph(gpu.device)
    parent.add_switch(value, 0, graphs)
    parent.instantiate()
    counts.zero_()
    value.zero_()
    for _ in range(1000):
        parent.launch()
    assert counts.tolist() == [1000 // BODIES] * BODIES


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="free memory is that of all processes: run it alone")
def test_closed_parents_give_their_memory_back(gpu: Gpu) -> None:
    value, out = gpu.number(FIRST), gpu.number()
    bodies = gpu.fills(out, list(range(BODIES)))
    free = []
    for i in range(300):
        out.fill_(-1)
        parent = ParentGraph(gpu.device)
        parent.add_switch(value, FIRST, bodies)
        parent.instantiate()
        parent.launch()
        assert int(out) == 0
        if i % 2:
            parent.close()
        del parent
        free.append(torch.cuda.mem_get_info()[0])
    # the driver keeps what the first ones needed; 30 kB left by each of the others would show
    assert free[20] - free[-1] <= 8 << 20


@pytest.mark.gpu
def test_a_closed_parent_refuses_and_closing_waits(gpu: Gpu) -> None:
    value, out = gpu.number(FIRST), gpu.number()
    parent = switch_parent(gpu, value, out)
    for refused in (parent.instantiate, lambda: parent.add_switch(value, 0, [])):
        with pytest.raises((RuntimeError, ValueError)):
            refused()
    parent.launch()
    parent.close()
    parent.close()
    assert int(out) == FIRST
    with pytest.raises(RuntimeError, match="launched"):
        parent.launch()
    with pytest.raises(ValueError, match="one int32"):
        ParentGraph(gpu.device).add_switch(value.long(), 0, Gpu().fills(out, [1]))


@jit
def _step_kernel(x, USE_PDL: tl.constexpr):
    await_previous(USE_PDL)
    value = tl.load(x)
    tl.store(x, value * 3 + 1)
    start_next(USE_PDL)


@pytest.mark.gpu
def test_programmatic_launches_in_bodies(gpu: Gpu) -> None:
    value, x = gpu.number(), gpu.number()
    options = launch_options(gpu.device, overlap=True)

    def chain(length: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(length):
                _step_kernel[(1,)](x, **options)

        return work

    lengths = [1, 2, 11]
    parent = ParentGraph(gpu.device)
    parent.add(gpu.capture(chain(3)))
    parent.add_switch(value, 0, [gpu.capture(chain(length)) for length in lengths])
    parent.add(gpu.capture(chain(1)))
    parent.instantiate()
    for i, length in enumerate(lengths):
        value.fill_(i)
        x.fill_(1)
        parent.launch()
        expected = 1
        for _ in range(length + 4):
            expected = 3 * expected + 1
        assert int(x) == expected


@pytest.mark.gpu
def test_launch_from_a_thread_that_never_used_the_gpu(gpu: Gpu) -> None:
    value, out = gpu.number(FIRST + 2), gpu.number()
    parent = switch_parent(gpu, value, out)
    out.zero_()
    torch.cuda.synchronize()
    thread = Thread(target=parent.launch)
    thread.start()
    thread.join()
    assert int(out) == FIRST + 2


@pytest.mark.gpu
@pytest.mark.parametrize("breaks", ["the host reads", "the work raises"])
def test_a_failed_capture_is_named_and_leaves_cuda_usable(gpu: Gpu, breaks: str) -> None:
    x, before = gpu.number(5), torch.cuda.current_stream()

    def work() -> None:
        y = x + 1
        if breaks == "the host reads":
            y.item()
        raise ValueError("deliberate")

    with pytest.raises(RuntimeError, match="Capturing the odd piece failed with") as caught:
        capture(work, gpu.pool, gpu.stream, "the odd piece")
    assert caught.value.__cause__ is not None
    if breaks == "the work raises":
        assert "ValueError: deliberate" in str(caught.value)
    assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert torch.rand(100, device=gpu.device).unique().numel() > 50
    again = Gpu()
    out = again.number()
    parent = switch_parent(again, again.number(FIRST + 1), out)
    parent.launch()
    assert int(out) == FIRST + 1
