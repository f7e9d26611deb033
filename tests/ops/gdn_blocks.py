"""Random blocks of one GDN layer in the layout of the kernels, and their truth: the recurrence in float64."""

import sys
from collections.abc import Callable
from math import inf, isfinite
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybridspec_kernels import gdn_recurrent_ref
from hybridspec_kernels.gdn.recurrent_verify import split_heads

# Triton's interpreter runs on the CPU (conftest.py switches it on where there is no GPU)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Sizes(NamedTuple):
    """Key heads, value heads, key width, value width."""

    H: int
    HV: int
    K: int
    V: int

    def __str__(self) -> str:
        return f"H{self.H}-HV{self.HV}-K{self.K}-V{self.V}"


# heads that are no power of two, widths that are none, a tile with a masked rest
SIZES = [Sizes(3, 6, 16, 16), Sizes(1, 3, 12, 12), Sizes(2, 2, 32, 40)]
LARGE = Sizes(16, 32, 128, 128)


class Block(NamedTuple):
    """What a verifier takes: x `[W, C]`, a and b `[W, HV]`, A_log and dt_bias `[HV]`."""

    x: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def rows(self, start: int, stop: int) -> "Block":
        """The block's tokens from start to stop."""
        return Block(*(t[start:stop] for t in self[:3]), *self[3:])


def random_block(W: int, sizes: Sizes, dtype: torch.dtype = torch.float32) -> Block:
    """A_log stays fp32 in a 16-bit block, as in the models."""
    H, HV, K, V = sizes
    x, a, b = torch.randn(W, 2 * H * K + HV * V), torch.randn(W, HV), torch.randn(W, HV)
    A_log, dt_bias = 0.5 * torch.randn(HV), torch.randn(HV)
    tensors = x.to(dtype), a.to(dtype), b.to(dtype), A_log.to(torch.promote_types(dtype, torch.float32)), dt_bias
    return Block(*(t.to(DEVICE) for t in tensors))


def with_gate(block: Block, token: int, log_decay: float) -> Block:
    """The block with this log decay at one token of all heads."""
    block.A_log.zero_()
    block.dt_bias.zero_()
    # softplus(x) is x for large x
    block.a[token] = -log_decay
    return block


def random_state(*shape: int) -> Tensor:
    """`[..., HV, V, K]`, fp32."""
    return 0.3 * torch.randn(*shape, device=DEVICE)


def recurrence(block: Block, state: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
    """Outputs `[W, HV, V]` and states after every token `[W, HV, V, K]`, float64 (Eq. 1)."""
    x, state = block.x.double(), state.double()
    return gdn_recurrent_ref(*split_heads(x, state, key_heads), *block[1:], state)


def error(got: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; infinite where a number is missing, since a maximum passes over NaN."""
    value = float((got.double() - truth).norm() / truth.norm().clamp_min(1e-3))
    return value if isfinite(value) else inf


def mostly_equal(got: Tensor, want: Tensor) -> bool:
    """Whether 16-bit numbers are the same but for roundings that the order of an fp32 sum decides."""
    # + 0.0: one zero
    steps = ((got + 0.0).view(torch.int16).int() - (want + 0.0).view(torch.int16).int()).abs()
    return bool((steps == 0).double().mean() > 0.98 and steps.max() <= 2)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer that a kernel must fill before anything reads it."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def on_device(*numbers: int) -> Tensor:
    """int32 on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def forbid_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an operation of ours turns a tensor into a Python number."""
    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, _forbidding(name, getattr(Tensor, name)))


def _forbidding(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Tensor, *args: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        assert not caller.startswith("hybridspec_kernels"), f"{caller} calls {name}"
        return original(self, *args)

    return read


def captured(launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The launch, compiled by a first run, as a CUDA graph: capturing raises if the host waits for the device."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph
