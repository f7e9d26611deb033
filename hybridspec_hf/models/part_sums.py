"""Narrow linear layers on few tokens: their sums are cut into parts, so that they busy a whole GPU."""

import torch
from torch import Tensor

from hybridspec_kernels import MAX_PARTS, linear, linear_parts


class PartSums:
    """Room for the parts of whatever narrow layer ran last; the kernel behind it adds them up.

    Args:
        tokens, outputs: the most of any layer. device: of its weights.
    """

    def __init__(self, tokens: int, outputs: int, device: torch.device) -> None:
        self.buffer = torch.zeros(MAX_PARTS * tokens * outputs, dtype=torch.float32, device=device)

    def room(self, tokens: int, outputs: int, inputs: int) -> Tensor:
        """`[P, w, N]`, fp32, for a layer of these sizes."""
        parts = linear_parts(outputs, inputs)
        return self.buffer[: parts * tokens * outputs].view(parts, tokens, outputs)

    def linear(self, x: Tensor, *weights: Tensor) -> Tensor:
        """`x` `[w, D]` times the weights `[N_i, D]` side by side, as parts `[P, w, N]`."""
        out = self.room(len(x), sum(map(len, weights)), x.shape[1])
        linear(x, weights, out, overlap=True)
        return out
