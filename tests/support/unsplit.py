"""The unsplit form of a target: Stage 0 runs all of Layer 0, experts included, before the length is chosen."""

from typing import Any

import torch
from torch import Tensor

from hybridspec_hf.models import SplitTarget


def unsplit(target: SplitTarget) -> Any:
    """A target of the same family whose Stage 1 starts behind Layer 0."""

    class Unsplit(type(target)):  # type: ignore[misc]
        def stage0(self, tokens: Tensor, cache: Any, boundary: Any) -> None:
            super().stage0(tokens, cache, boundary)
            self.layer0 = super().resume_mlp(len(tokens), boundary)

        def resume_mlp(self, w: int, boundary: Any) -> Tensor:
            return self.layer0[:w]

    whole = object.__new__(Unsplit)
    whole.__dict__.update(target.__dict__)
    return whole


class CountingGate(torch.nn.Module):
    """Wraps Layer 0's router and counts the tokens that pass it."""

    def __init__(self, gate: torch.nn.Module) -> None:
        super().__init__()
        self.gate, self.tokens, self.calls = gate, 0, 0

    def forward(self, hidden: Tensor) -> Any:
        self.tokens, self.calls = self.tokens + hidden.shape[0], self.calls + 1
        return self.gate(hidden)
