"""The static buffers of one request, what was captured on them, and how large they are made."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hybridspec_generation.cache import TargetCache
from hybridspec_generation.protocols import Drafter
from hybridspec_generation.state import RoundState

from .drafters.block import BlockDrafter, DraftContext
from .graphs.rounds import GraphedRounds
from .models.kernel_target import KernelTarget

CAPACITY_STEP = 256
# on a GPU, where graphs are captured with the buffers: the smallest, and what serves any shorter request
LEAST_CAPACITY, KEPT_CAPACITY = 2048, 4096


class NotCaptured(NamedTuple):
    """Why a capture failed, and for which drafter: alive, so that no other can have its identity."""

    reason: str
    drafter: Drafter | None


@dataclass
class Buffers:
    """Static buffers of one request, and what was built on their addresses for the requests to come.

    Attributes:
        cache, context, state: the target's cache, the drafter's context if there is one, the round's buffers.
        target, drafter: who works on them in kernels; None until asked for, or where kernels cannot run.
        rounds: captured graphs, by what they hold besides the buffers; or why a capture failed.
        policies: adaptive policies, whose tables the graphs read.
        broken: why a kernel failed, where one did: the rounds on these buffers run the modules then.
        weights: addresses of the weights that all of these read.
    """

    cache: TargetCache
    context: DraftContext | None
    state: RoundState
    target: KernelTarget | None = None
    drafter: BlockDrafter | None = None
    rounds: dict[Any, GraphedRounds | NotCaptured] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None
    weights: tuple[int, ...] = ()

    def reset(self) -> None:
        """Empty cache and context: nothing of the last request stays, finite or not."""
        # a round may still run behind the last request's end
        for rounds in self.graphs():
            torch.cuda.current_stream(rounds.stream.device).wait_stream(rounds.stream)
        self.cache.reset()
        for buffer in self.context or ():
            buffer.zero_()

    def graphs(self) -> list[GraphedRounds]:
        """What was captured."""
        return [rounds for rounds in self.rounds.values() if isinstance(rounds, GraphedRounds)]

    def drop_graphs(self) -> None:
        """Free what was captured."""
        for rounds in self.graphs():
            rounds.close()
        self.rounds.clear()

    def forget(self) -> None:
        """Drop what was built on weights that are no longer where they were."""
        self.drop_graphs()
        self.target = self.drafter = None


def bucket(tokens: int, device: torch.device) -> int:
    """Capacity for so many tokens, in steps of an eighth of its size: a growing conversation seldom grows it."""
    if device.type == "cuda":
        tokens = max(tokens, LEAST_CAPACITY)
    step = max(CAPACITY_STEP, 1 << max(tokens.bit_length() - 4, 0))
    return -(-tokens // step) * step


def fits(buffers: Buffers, capacity: int, block: int, gdn_backend: str, eos: int) -> bool:
    """Whether the last request's buffers serve one that needs this much, without holding far more."""
    cache = buffers.cache
    return (
        capacity <= cache.capacity <= max(2 * capacity, KEPT_CAPACITY)
        and cache.block == block
        and cache.gdn.name == gdn_backend
        and eos <= len(buffers.state.eos)
    )
