"""A trace and a target's known text -> a drafter of true cost that is right as often as the trace says."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridspec_generation.protocols import Drafter
from hybridspec_generation.state import Draft

from ..buffers import Buffers
from ..drafters.dflash import DFlashDrafter
from ..engine import Engine, get_engine
from .decode_traces import Trace


class Script:
    """Overwrites proposals, on the device and without a host read, so that a CUDA graph can hold it.

    Row r of the trace is played in round r (the trace repeats): its first draft tokens are the target's own next
    tokens, as many as the row accepts, the others are wrong; confidence and entropy are the row's.

    Attributes:
        row: `[1]`, int64, the row to play.
        next_tokens: `[V, D]`, int64, the D tokens after each token.
        plan: `[N, D+1]`, int64, 1 where a round's draft token is wrong; behind these the row after it.
        step: `[1, D+1]`, int64, the plan's row in play.
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
        self.plan = torch.zeros(rows, draft_tokens + 1, dtype=torch.int64, device=device)
        self.plan[:, -1] = torch.arange(1, rows + 1) % rows
        self.step = torch.zeros_like(self.plan[:1])
        self.confidence = torch.zeros(rows, draft_tokens, device=device)
        self.entropy = torch.zeros_like(self.confidence)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.drafter: ScriptedDrafter | None = None
        self.load(trace)

    def load(self, trace: Trace) -> None:
        """Play another trace, of as many rounds, from its first row: in place, as captured graphs need it."""
        draft_tokens = self.confidence.shape[1]
        if draft_tokens > trace.block - 1 or len(trace.accepted) != len(self.plan):
            raise ValueError(
                f"The trace {trace.name!r} has {len(trace.accepted)} rounds of {trace.block - 1} draft tokens; the "
                f"script plays {len(self.plan)} rounds of {draft_tokens}."
            )
        self.plan[:, :-1] = torch.arange(draft_tokens) >= trace.accepted[:, None]
        self.confidence.copy_(trace.confidence[:, :draft_tokens])
        self.entropy.copy_(trace.entropy[:, :draft_tokens])
        self.reset()

    def mean_emitted(self) -> float:
        """Tokens that a round of the loaded trace emits when all of it is verified."""
        return float((1 - self.plan[:, :-1]).cumprod(1).sum(1).float().mean()) + 1

    def reset(self) -> None:
        """Play from the first row again."""
        self.row.zero_()

    def rewrite(self, anchor: Tensor, draft: Draft) -> None:
        """Play the next row as the draft after `anchor` `[1]`, in six operations: all drafting rounds pay for them."""
        torch.index_select(self.plan, 0, self.row, out=self.step)
        torch.index_select(self.next_tokens, 0, anchor, out=draft.tokens[None])
        # the other token of the pair (0, 1), (2, 3), ...: in the vocabulary and never the right one
        draft.tokens.bitwise_xor_(self.step[0, :-1])
        torch.index_select(self.confidence, 0, self.row, out=draft.confidence[None])
        torch.index_select(self.entropy, 0, self.row, out=draft.entropy[None])
        self.row.copy_(self.step[0, -1:])


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

    def propose(self, anchor: Tensor, length: Tensor, draft: Draft) -> None:
        """Let the wrapped drafter propose, and overwrite what it says."""
        self.inner.propose(anchor, length, draft)
        self.script.rewrite(anchor, draft)


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
