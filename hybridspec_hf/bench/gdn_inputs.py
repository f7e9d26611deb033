"""A shape and a seed -> random GDN layers and rounds, the same for every backend."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from hybridspec_generation.gdn import GDNParams, GDNShape

# the GDN layers of the supported models; "tiny" is for a quick look
SHAPES = {
    "35b": {"layers": 30, "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "taps": 4},
    "122b": {"layers": 36, "key_heads": 16, "value_heads": 64, "key_dim": 128, "value_dim": 128, "taps": 4},
    "tiny": {"layers": 4, "key_heads": 2, "value_heads": 8, "key_dim": 32, "value_dim": 128, "taps": 4},
}


def shape_of(sizes: dict[str, int], dtype: torch.dtype, device: torch.device, layers: int | None = None) -> GDNShape:
    """Sizes (with another number of layers) on a device."""
    shape = GDNShape(**sizes, dtype=dtype, device=device)
    return replace(shape, layers=layers) if layers else shape


def describe_shape(shape: GDNShape) -> dict[str, Any]:
    """Sizes and dtype in JSON types."""
    sizes = {
        field.name: getattr(shape, field.name) for field in fields(shape) if field.name not in ("dtype", "device")
    }
    return sizes | {"dtype": str(shape.dtype).removeprefix("torch.")}


class Start(NamedTuple):
    """L layers before the first round.

    Attributes:
        params: per layer.
        windows: `[L, taps-1, C]`, model dtype, the last inputs of the convolution.
        states: `[L, HV, V, K]`, fp32.
    """

    params: list[GDNParams]
    windows: Tensor
    states: Tensor


class Round(NamedTuple):
    """What a round of w tokens gives to L layers, in the model dtype.

    Attributes:
        rows: `[L, w, C]`, inputs of the convolution (scope "conv"), or already convolved (scope "core").
        a, b: `[L, w, HV]`, raw gate projections.
    """

    rows: Tensor
    a: Tensor
    b: Tensor


def random_inputs(
    shape: GDNShape, lengths: Sequence[int], *, kind: str = "random", seed: int = 0
) -> tuple[Start, list[Round]]:
    """Layers and one round per length; drawn on the CPU, so equal on every device.

    Decays reach from almost 1 to almost 0: A = exp(A_log) is log-uniform in [0.05, 16], dt_bias uniform in [-4, 1].

    Args:
        kind: a key of `KINDS`.
    """
    generator = Generator().manual_seed(seed)
    start = _random_start(shape, generator)
    rounds = [_random_round(shape, w, generator) for w in lengths]
    KINDS[kind](shape, start, rounds, generator)
    params = [GDNParams(*(x.to(shape.device) for x in layer)) for layer in start.params]
    start = Start(params, start.windows.to(shape.device), start.states.to(shape.device))
    return start, [Round(*(x.to(shape.device) for x in item)) for item in rounds]


def _random_start(shape: GDNShape, g: Generator) -> Start:
    L, HV, C, taps = shape.layers, shape.value_heads, shape.channels, shape.taps
    A_log = (torch.rand(L, HV, generator=g) * torch.tensor(16 / 0.05).log() + torch.tensor(0.05).log()).unbind()
    dt_bias = (5 * torch.rand(L, HV, generator=g) - 4).to(shape.dtype).unbind()
    conv = (0.5 * torch.randn(L, taps, C, generator=g)).to(shape.dtype).unbind()
    windows = torch.randn(L, taps - 1, C, generator=g).to(shape.dtype)
    states = 0.3 * torch.randn(L, HV, shape.value_dim, shape.key_dim, generator=g)
    return Start([GDNParams(*layer) for layer in zip(conv, A_log, dt_bias, strict=True)], windows, states)


def _random_round(shape: GDNShape, w: int, g: Generator) -> Round:
    def normal(width: int) -> Tensor:
        return torch.randn(shape.layers, w, width, generator=g).to(shape.dtype)

    return Round(normal(shape.channels), normal(shape.value_heads), normal(shape.value_heads))


def _as_drawn(shape: GDNShape, start: Start, rounds: list[Round], g: Generator) -> None:
    """Nothing special."""


def _forget(shape: GDNShape, start: Start, rounds: list[Round], g: Generator) -> None:
    """One token of every head and round has the log decay -1e4, and the others have moderate ones."""
    for params in start.params:
        params.A_log.zero_()
        params.dt_bias.zero_()
    for item in rounds:
        token = torch.randint(item.a.shape[1], (shape.layers, 1, shape.value_heads), generator=g)
        item.a.scatter_(1, token, 1e4)


def _write_all_or_nothing(shape: GDNShape, start: Start, rounds: list[Round], g: Generator) -> None:
    """Two of three tokens have beta exactly 0 or exactly 1."""
    for item in rounds:
        draw = torch.rand(item.b.shape, generator=g)
        item.b[draw < 1 / 3] = -1e4
        item.b[draw > 2 / 3] = 1e4


def _repeat_keys(shape: GDNShape, start: Start, rounds: list[Round], g: Generator) -> None:
    """All keys of a head are equal, beta is almost 1, nothing decays: powers of I - H (Eq. 3) are huge here."""
    keys = slice(shape.key_heads * shape.key_dim, 2 * shape.key_heads * shape.key_dim)
    key = torch.randn(shape.layers, 1, keys.stop - keys.start, generator=g).to(shape.dtype)
    start.windows[..., keys] = key
    for params in start.params:
        params.dt_bias.fill_(-30.0)
    for item in rounds:
        item.rows[..., keys] = key
        item.b.fill_(12.0)


KINDS: dict[str, Callable[[GDNShape, Start, list[Round], Generator], None]] = {
    "random": _as_drawn,
    "forget": _forget,
    "all or nothing": _write_all_or_nothing,
    "repeated keys": _repeat_keys,
}
