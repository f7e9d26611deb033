"""The GDN layers' front end in two ways -> times: the joint producer, and projections with a fused convolution."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_generation.gdn import BlockGDN, GDNShape
from hybridspec_kernels import GDNProjection, gdn_project_ref

from .gdn_exact import relative_error
from .gdn_floors import copy_bandwidth
from .gdn_inputs import Start, describe_shape, random_inputs
from .graphs import capture, sample_us

# width of the hidden states in front of the layers of `gdn_inputs.SHAPES`
HIDDEN_SIZES = {"35b": 2048, "122b": 3072, "tiny": 256}
# two roundings to bf16, of the projections and of what the convolution makes of them
BOUND = 1e-2


@dataclass(frozen=True)
class ProducerRow:
    """Times over all layers in microseconds, from hidden states to verified outputs.

    Attributes:
        joint_us: one launch for projections and convolution, one for the verification of its result.
        separate_us: four projections (matrix products of the vendor's library), one launch for the rest.
        joint_only_us, projections_only_us: the same without the verification.
        byte_floor_us: the projections' weights, read once at the measured copy bandwidth.
    """

    w: int
    joint_us: float
    separate_us: float
    joint_only_us: float
    projections_only_us: float
    byte_floor_us: float


@dataclass(frozen=True)
class ProducerReport:
    """Rows by length; copy_bandwidth in bytes per second."""

    shape: dict[str, Any]
    copy_bandwidth: float
    rows: list[ProducerRow]
    passed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


@torch.inference_mode()
def time_producers(
    shape: GDNShape, hidden_size: int, lengths: Sequence[int], *, samples: int = 30, replays: int = 10
) -> ProducerReport:
    """Time both ways on random weights and hidden states, in graphs of all layers.

    Args:
        shape: its device is the GPU.

    Raises:
        RuntimeError: if the joint producer is wrong.
    """
    bandwidth = copy_bandwidth(shape.device, samples)
    start, _ = random_inputs(shape, [1])
    projections = [random_projection(shape, hidden_size) for _ in range(shape.layers)]
    weights = sum(weight.nbytes for projection in projections for weight in projection[:4])
    rows = []
    for w in lengths:
        work = FrontEnd(shape, start, projections, torch.randn(shape.layers, w, hidden_size).to(shape.device))
        work.check()
        joint, separate, joint_only, projections_only = (
            median(sample_us(capture(way).replay, samples, replays))
            for way in (work.joint, work.separate, work.joint_only, work.projections_only)
        )
        rows.append(ProducerRow(w, joint, separate, joint_only, projections_only, 1e6 * weights / bandwidth))
    return ProducerReport(describe_shape(shape) | {"hidden_size": hidden_size}, bandwidth, rows)


def random_projection(shape: GDNShape, hidden_size: int) -> GDNProjection:
    """A layer's weights, rows in order."""
    sizes = (shape.channels, shape.value_heads * shape.value_dim, shape.value_heads, shape.value_heads)
    qkv, gate, b, a = (
        torch.randn(n, hidden_size, dtype=shape.dtype, device=shape.device) * hidden_size**-0.5 for n in sizes
    )
    row = torch.cat([torch.arange(n, dtype=torch.int32, device=shape.device) for n in sizes])
    return GDNProjection(qkv, gate, b, a, row)


class Separate(NamedTuple):
    """Outputs of the separate projections that are no inputs of the convolution."""

    gate: Tensor
    a: Tensor
    b: Tensor


class FrontEnd:
    """All layers' projections and verification on fixed inputs, to be captured."""

    def __init__(self, shape: GDNShape, start: Start, projections: list[GDNProjection], hidden: Tensor) -> None:
        self.start, self.projections, self.hidden = start, projections, hidden.to(shape.dtype)
        self.w = w = hidden.shape[1]
        self.gdn = BlockGDN(shape, block=w)
        for layer in range(shape.layers):
            self.gdn.load(layer, start.windows[layer], start.states[layer])
        sizes = (shape.value_heads * shape.value_dim, shape.value_heads, shape.value_heads)
        gate, a, b = (hidden.new_empty(w, n, dtype=shape.dtype) for n in sizes)
        self.parts = Separate(gate, a, b)

    def joint(self, verify: bool = True) -> None:
        """Two launches a layer."""
        for layer, projection in enumerate(self.projections):
            params = self.start.params[layer]
            x, _, a, b = self.gdn.project(layer, self.hidden[layer], projection, params, overlap=True)
            if verify:
                self.gdn.verify_convolved(layer, x, a, b, params, overlap=True)

    def joint_only(self) -> None:
        """Without the verification."""
        self.joint(verify=False)

    def separate(self, verify: bool = True) -> None:
        """Four matrix products and a launch a layer; the first product writes where the convolution reads."""
        gate, a, b = self.parts
        for layer, projection in enumerate(self.projections):
            outputs = (self.gdn.inputs(layer, self.w), gate, b, a)
            for weight, out in zip(projection[:4], outputs, strict=True):
                torch.mm(self.hidden[layer], weight.t(), out=out)
            if verify:
                self.gdn.verify(layer, self.w, a, b, self.start.params[layer], overlap=True)

    def projections_only(self) -> None:
        """Without the verification."""
        self.separate(verify=False)

    def check(self) -> None:
        """Compare the joint producer with its reference on the last layer."""
        self.joint()
        shape, layer, w = self.gdn.shape, len(self.projections) - 1, self.w
        projection, conv_weight = self.projections[layer], self.start.params[layer].conv_weight.double()
        qkv, gate, b, a = (weight.double() for weight in projection[:4])
        wide = GDNProjection(qkv, gate, b, a, projection.row)
        rows = torch.cat([self.start.windows[layer], self.gdn.inputs(layer, w)]).double()
        x, *rest = (
            torch.empty(buffer[:w].shape, dtype=torch.float64, device=shape.device) for buffer in self.gdn.projected
        )
        gdn_project_ref(self.hidden[layer].double(), wide, conv_weight, rows, x, *rest)
        errors = [relative_error(got[:w], want) for got, want in zip(self.gdn.projected, (x, *rest), strict=True)]
        if not max(errors) <= BOUND:
            raise RuntimeError(f"The joint producer is off by {max(errors):.1e} (bound {BOUND}) at w = {w}.")
