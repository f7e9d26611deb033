"""What a round works on, in one flat object, and the one place where a length becomes a host integer."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..cache import TargetCache
from ..policies import FixedLength, LengthPolicy
from ..protocols import Drafter, Target
from ..state import RoundState

# runs `body(length)` for the length held by a `[1]` tensor
Switch = Callable[[Tensor, Callable[[int], None]], None]


def eager_switch(length: Tensor, body: Callable[[int], None]) -> None:
    """Read the length on the host and run the body for it: the only host read inside a round."""
    body(int(length))


@dataclass(frozen=True)
class Round:
    """One request's target, drafter (None decodes autoregressively), cache, buffers and length policy."""

    target: Target
    drafter: Drafter | None
    cache: TargetCache
    state: RoundState
    policy: LengthPolicy = field(default_factory=lambda: FixedLength(1))
    switch: Switch = eager_switch
