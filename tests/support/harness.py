"""A request set up as `strategy.start` does it, but with every part in the test's hands."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hybridspec_generation import RoundState
from hybridspec_generation.cache import TargetCache
from hybridspec_generation.policies import FixedLength, LengthPolicy
from hybridspec_generation.round import Round
from hybridspec_generation.state import Draft
from hybridspec_hf.drafters.block import BlockDrafter, DraftContext
from hybridspec_hf.models import SplitTarget, split_target
from hybridspec_hf.prefill import prefill

CAPACITY = 256


class ScriptedDrafter:
    """Proposes the target's own continuation, made wrong behind a scripted number of tokens.

    The real drafter underneath runs and keeps its context; only its tokens and signals are replaced.

    Args:
        inner: a bound drafter, or None to script the tokens alone.
        sequence: the target's greedy text, prompt included, by absolute position.
        accepted: tokens to leave right, one number per round (the last one repeats).
        confidence: `[D]` signals of every round, or None for ones.
    """

    def __init__(
        self,
        inner: BlockDrafter | None,
        sequence: list[int],
        accepted: list[int],
        vocab_size: int,
        block_size: int = 16,
        confidence: list[Tensor] | None = None,
    ) -> None:
        self.inner, self.block_size = inner, block_size
        self.sequence, self.accepted, self.vocab_size = sequence, accepted, vocab_size
        self.confidence, self.round = confidence, 0

    def append(self, features: Tensor, start: Tensor) -> None:
        if self.inner is not None:
            self.inner.append(features, start)

    def propose(self, anchor: Tensor, length: Tensor, draft: Draft) -> None:
        draft_size, at = self.block_size - 1, int(length) + 1
        if self.inner is not None:
            self.inner.propose(anchor, length, draft)
        assert int(anchor) == self.sequence[at - 1], "the anchor left the target's greedy text"
        right = self.accepted[min(self.round, len(self.accepted) - 1)]
        tokens = (self.sequence[at : at + draft_size] + [1] * draft_size)[:draft_size]
        tokens = [t if i < right else (t + 1) % self.vocab_size for i, t in enumerate(tokens)]
        ones = torch.ones(draft_size)
        confidence = ones if self.confidence is None else self.confidence[self.round % len(self.confidence)]
        self.round += 1
        draft.tokens.copy_(torch.tensor(tokens))
        draft.confidence.copy_(confidence)
        draft.entropy.copy_(1.0 - 0.9 * confidence)


def plain_text(model: Any, prompt: Tensor, new_tokens: int) -> list[int]:
    """The target's greedy text by plain generate, prompt included, EOS ignored."""
    out = model.generate(input_ids=prompt, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    return out[0].tolist()


def filled_cache(
    model: Any,
    target: SplitTarget,
    tokens: Tensor,
    drafter: BlockDrafter | None,
    block: int = 16,
    gdn_backend: str = "block",
) -> tuple[TargetCache, Tensor]:
    """A cache holding `tokens` `[1, T]` by a fresh prefill through transformers, and the next token `[1]`."""
    cache = TargetCache(target.cache_shape, capacity=CAPACITY, block=block, gdn_backend=gdn_backend)
    kwargs = {"cache": DynamicCache(config=model.config.get_text_config()), "use_cache": True}
    with torch.no_grad():
        return cache, prefill(model, tokens, model.generation_config, kwargs, target, cache, drafter)


def make_round(
    model: Any,
    drafter: Any,
    prompt: Tensor,
    *,
    budget: int,
    policy: LengthPolicy | None = None,
    script: tuple[list[int], list[int]] | None = None,
    confidence: list[Tensor] | None = None,
    eos: tuple[int, ...] = (),
    target: SplitTarget | None = None,
    gdn_backend: str = "block",
) -> Round:
    """A prefilled round. `script` is (greedy text, accepted counts) and wraps the drafter in a `ScriptedDrafter`."""
    layers = tuple(drafter.config.target_layer_ids)
    target = target or split_target(model, layers)
    bound = BlockDrafter(drafter, target.embed_tokens, target.lm_head, DraftContext.allocate(drafter, CAPACITY))
    block = bound.block_size
    cache, anchor = filled_cache(model, target, prompt, bound, block, gdn_backend)
    proposer: Any = bound
    if script is not None:
        vocab = model.config.get_text_config().vocab_size
        proposer = ScriptedDrafter(bound, *script, vocab_size=vocab, block_size=block, confidence=confidence)
    state = RoundState(
        block=block, hidden_size=target.hidden_size, top_k=target.top_k,
        feature_size=len(layers) * target.hidden_size, dtype=target.cache_shape.dtype,
        device=target.cache_shape.device,
    )  # fmt: skip
    state.start(anchor, list(eos), budget)
    return Round(target, proposer, cache, state, policy or FixedLength(block))


def real_drafter(r: Round) -> BlockDrafter:
    """The bound drafter, under a script or not."""
    return r.drafter.inner if isinstance(r.drafter, ScriptedDrafter) else r.drafter  # type: ignore[union-attr,return-value]
