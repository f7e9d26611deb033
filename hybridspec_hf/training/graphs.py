"""A loss function → its gradients, replayed as one CUDA graph per batch shape where that works.

The tiny target's step is thousands of small kernels: launching them takes twice as long as running them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

# (loss to differentiate, value to log)
LossFunction = Callable[..., tuple[Tensor, Tensor]]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: tuple[Tensor, ...]
    value: Tensor


class GradientStep:
    """Writes a batch's gradients into the parameters' `.grad` (kept tensors) and returns the value to log.

    Args:
        loss: called with the batch's tensors; must not read a device value on the host if it is to be captured.
    """

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self.loss = loss
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.grads = [p.grad for p in self.parameters if p.grad is not None]
        self.captured: dict[tuple[torch.Size, ...], _Captured] = {}
        self.use_graphs = self.parameters[0].device.type == "cuda"

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Gradients of one batch; the returned value is overwritten by the next call of the same shape."""
        shapes = tuple(tensor.shape for tensor in batch)
        if self.use_graphs and shapes not in self.captured:
            self._capture(shapes, batch)
        if shapes not in self.captured:
            return self._eager(batch)
        graph, static, value = self.captured[shapes]
        for held, tensor in zip(static, batch, strict=True):
            held.copy_(tensor)
        graph.replay()
        return value

    def _eager(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss, value = self.loss(*batch)
        grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = [(kept, new) for kept, new in zip(self.grads, grads, strict=True) if new is not None]
        torch._foreach_copy_([kept for kept, _ in pairs], [new for _, new in pairs])
        return value.detach()

    def _capture(self, shapes: tuple[torch.Size, ...], batch: tuple[Tensor, ...]) -> None:
        static = tuple(tensor.clone() for tensor in batch)
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._eager(static)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.captured.values())).graph.pool() if self.captured else None
            with torch.cuda.graph(graph, pool=pool):
                value = self._eager(static)
            self.captured[shapes] = _Captured(graph, static, value)
        except RuntimeError as error:
            print(f"training without CUDA graphs, capture failed: {error}", flush=True)
            self.use_graphs = False
            torch.cuda.synchronize()
