"""A trace and a target's known text -> a drafter of true cost that is right as often as the trace says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridspec_generation.protocols import Draft, Drafter

from ..drafters.dflash import DFlashDrafter
from ..engine import Buffers, Engine, get_engine
from .decode_traces import Trace


class Script:
    """Overwrites proposals, on the device and without a host read, so that a CUDA graph can hold it.

    Row r of the trace is played in round r (the trace repeats): its first draft tokens are the target's own next
    tokens, as many as the row accepts, the others are wrong; confidence and entropy are the row's.

    Attributes:
        turn: `[1]`, int64, rounds played.
        next_tokens: `[V, D]`, int64, the D tokens after each token.
        spoiled: `[N, D]`, int64, 1 where a round's draft token is wrong.
        confidence, entropy: `[N, D]`, fp32.
        drafter: who plays it.

    Args:
        trace: at least D draft tokens wide. successor: `[V]`, int64, V even. draft_tokens: D.
    """

    def __init__(self, trace: Trace, successor: Tensor, draft_tokens: int) -> None:
        if len(successor) % 2:
            raise ValueError(f"The vocabulary has {len(successor)} tokens; a script needs an even number.")
        device = successor.device
        tokens = [successor]
        for _ in range(draft_tokens - 1):
            tokens.append(successor[tokens[-1]])
        self.next_tokens = torch.stack(tokens, dim=1)
        rows = len(trace.accepted)
        self.spoiled = torch.zeros(rows, draft_tokens, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(rows, draft_tokens, device=device)
        self.entropy = torch.zeros_like(self.confidence)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.drafter: ScriptedDrafter | None = None
        self.load(trace)

    def load(self, trace: Trace) -> None:
        """Play another trace, of as many rounds, from its first row: in place, as captured graphs need it."""
        draft_tokens = self.spoiled.shape[1]
        if draft_tokens > trace.block - 1 or len(trace.accepted) != len(self.spoiled):
            raise ValueError(
                f"The trace {trace.name!r} has {len(trace.accepted)} rounds of {trace.block - 1} draft tokens; the "
                f"script plays {len(self.spoiled)} rounds of {draft_tokens}."
            )
        self.spoiled.copy_((torch.arange(draft_tokens) >= trace.accepted[:, None]).long())
        self.confidence.copy_(trace.confidence[:, :draft_tokens])
        self.entropy.copy_(trace.entropy[:, :draft_tokens])
        self.reset()

    def mean_emitted(self) -> float:
        """Tokens that a round of the loaded trace emits when all of it is verified."""
        return float((1 - self.spoiled).cumprod(1).sum(1).float().mean()) + 1

    def reset(self) -> None:
        """Play from the first row again."""
        self.turn.zero_()

    def rewrite(self, anchor: Tensor, tokens: Tensor, confidence: Tensor, entropy: Tensor) -> None:
        """Play the next row into the proposal after `anchor` `[1]`, all in place.

        Args:
            tokens: `[D]`, int64. confidence, entropy: `[D]`, fp32.
        """
        row = self.turn % len(self.spoiled)
        # the other token of the pair (0, 1), (2, 3), ...: in the vocabulary and never the right one
        tokens.copy_((self.next_tokens.index_select(0, anchor) ^ self.spoiled.index_select(0, row))[0])
        confidence.copy_(self.confidence.index_select(0, row)[0])
        entropy.copy_(self.entropy.index_select(0, row)[0])
        self.turn += 1


class ScriptedDrafter:
    """Implements `hybridspec_generation.protocols.Drafter`: the wrapped drafter, its proposals overwritten.

    Attributes:
        inner: the wrapped drafter, which keeps its context and proposes as ever.
    """

    def __init__(self, inner: Drafter, script: Script) -> None:
        self.inner, self.script, self.block_size = inner, script, inner.block_size

    def append(self, features: Tensor, start: Tensor) -> None:
        """Write the wrapped drafter's context."""
        self.inner.append(features, start)

    def propose(self, anchor: Tensor, length: Tensor) -> Draft:
        """Let the wrapped drafter propose, and overwrite what it says."""
        draft = self.inner.propose(anchor, length)
        self.script.rewrite(anchor, *draft)
        return draft


@contextmanager
def scripted(model: Any, drafter: DFlashDrafter, script: Script) -> Iterator[None]:
    """Within the block, every request of this pair drafts by the script."""
    engine = get_engine(model, drafter)

    def bind(drafter: DFlashDrafter | None, buffers: Buffers) -> Drafter | None:
        bound = Engine.bind(engine, drafter, buffers)
        if bound is None:
            return None
        # one object for one bound drafter, because its graphs are kept with it
        if script.drafter is None or script.drafter.inner is not bound:
            script.drafter = ScriptedDrafter(bound, script)
        return script.drafter

    # on the instance, so that no other pair's engine drafts by it
    vars(engine)["bind"] = bind
    try:
        yield
    finally:
        del vars(engine)["bind"]
