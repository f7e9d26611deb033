"""Bytes and launches of a round -> the times below which it cannot get on this GPU."""

from statistics import median

import torch
from torch import Tensor

from hybridspec_generation.gdn import GDNShape
from hybridspec_kernels.triton_support import await_previous, jit, launch_options, start_next, tl

from .graphs import capture, sample_us

STATE_BYTES = 4
COPY_BYTES = 1 << 30


def round_bytes(method: str, shape: GDNShape, w: int, m: int, scope: str) -> float:
    """Bytes that a round over all layers has to read and write, each once.

    A convolved row that a separate convolution kernel would write and read again is not counted: one kernel could do
    both.

    Args:
        method: of a `Competitor`. w, m: verified and committed tokens; rounds are all alike, and blocks up to w fit.
    """
    return shape.layers * (_block_bytes(shape, w, scope) + METHODS[method](shape, w, m))


def _block_bytes(shape: GDNShape, w: int, scope: str) -> float:
    """Inputs, outputs and parameters of one layer, and in scope "conv" its window, read twice and written once."""
    element, HV, C, taps = shape.dtype.itemsize, shape.value_heads, shape.channels, shape.taps
    rows, gates, out = w * C * element, 2 * w * HV * element, w * HV * shape.value_dim * element
    conv = (taps + 3 * (taps - 1)) * C * element if scope == "conv" else 0
    # A_log is fp32
    return rows + gates + out + HV * (4 + element) + conv


def _state_bytes(shape: GDNShape) -> float:
    return shape.value_heads * shape.value_dim * shape.key_dim * STATE_BYTES


def _factor_bytes(shape: GDNShape) -> float:
    """Compact factors of one token: z and g in fp32, k in the model dtype."""
    return shape.value_heads * (shape.value_dim + 1) * 4 + shape.key_heads * shape.key_dim * shape.dtype.itemsize


def _block(shape: GDNShape, w: int, m: int) -> float:
    """The state read, the factors written; then m factors and the state read, the state written."""
    return 3 * _state_bytes(shape) + (w + m) * _factor_bytes(shape)


def _recurrent(shape: GDNShape, w: int, m: int) -> float:
    """The state read, w states written; then one of them read, the state written."""
    return (w + 3) * _state_bytes(shape)


def _replay(shape: GDNShape, w: int, m: int) -> float:
    """Mean over the rounds between two folds: the state and the ring read, factors appended; a fold at the end."""
    ring = max(16, 1 << (2 * w - 1).bit_length())
    # the first number of rounds after which the next block may not fit
    rounds = (ring - w) // m + 1
    history = m * (rounds - 1) / 2
    fold = 2 * _state_bytes(shape) + rounds * m * _factor_bytes(shape)
    return _state_bytes(shape) + (w + history) * _factor_bytes(shape) + fold / rounds


def _rerun(shape: GDNShape, w: int, m: int) -> float:
    """The state read; then the rows of m tokens and the state read again, the state written."""
    rows = m * (shape.channels + 2 * shape.value_heads) * shape.dtype.itemsize
    return 3 * _state_bytes(shape) + rows


METHODS = {"block": _block, "recurrent": _recurrent, "replay": _replay, "rerun": _rerun}


def copy_bandwidth(device: torch.device, samples: int) -> float:
    """Bytes per second of a 1 GiB device copy, read and write counted, median of the samples.

    Not in a graph, where the copy would be a job for the copy engines, which are slower than the multiprocessors.
    """
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPY_BYTES / (median(sample_us(lambda: target.copy_(source), samples, 10)) * 1e-6)


class LaunchFloor:
    """Microseconds of a graph of n kernels that do nothing, measured once for each n."""

    def __init__(self, device: torch.device, samples: int, replays: int) -> None:
        self.nothing = torch.zeros(1, dtype=torch.int32, device=device)
        self.samples, self.replays = samples, replays
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.known: dict[tuple[int, bool], float] = {}

    def us(self, launches: int, overlap: bool) -> float:
        """Median time of the graph; with `overlap` every kernel but the first may start early."""
        key = (launches, overlap)
        if key not in self.known:
            graph = capture(lambda: self._launch(launches, overlap))
            self.known[key] = median(sample_us(graph.replay, self.samples, self.replays))
        return self.known[key]

    def _launch(self, launches: int, overlap: bool) -> None:
        for i in range(launches):
            launch_nothing(self.nothing, self.processors, overlap=overlap and i > 0)


@jit
def _nothing_kernel(p_nothing, USE_PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    start_next(USE_PDL)
    await_previous(USE_PDL)


def launch_nothing(nothing: Tensor, programs: int, *, overlap: bool) -> None:
    """One kernel of `programs` programs that only starts and ends."""
    _nothing_kernel[(programs,)](nothing, **launch_options(nothing.device, overlap))
