"""Calibration prompts -> full-length rounds with signals, acceptance and routing (Appendix E.3, capture run)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from hybridspec_generation import decode
from hybridspec_generation.policies import FixedLength, LengthPolicy
from hybridspec_generation.round import Round
from hybridspec_kernels import new_experts_ref

from ..buffers import Buffers
from ..drafters.dflash import DFlashDrafter
from ..engine import Engine, get_engine
from ..prefill import prefill
from ..validation import check_drafter


class CaptureRounds(NamedTuple):
    """N rounds at full length, none of them cut by EOS or the output budget.

    Attributes:
        confidence, entropy: `[N, D]`, fp32, of the draft tokens.
        accepted: `[N]`, int64, A.
        new_layer0: `[N, W]`, int64, new Layer-0 experts that each target-input token adds.
        new_later: `[N, W]`, int64, new (layer, expert) pairs that it adds in the other MoE layers.
    """

    confidence: Tensor
    entropy: Tensor
    accepted: Tensor
    new_layer0: Tensor
    new_later: Tensor


def capture_rounds(
    model: Any, drafter: DFlashDrafter, prompts: Iterable[Tensor], *, max_new_tokens: int, eos: list[int]
) -> CaptureRounds:
    """Decode every prompt with all D draft tokens verified and record each round.

    Args:
        prompts: token ids `[1, T]`, one prompt each; wrap the iterable in a progress bar if it is long.
        eos: token ids that end a request.
    """
    return merge_rounds([capture_prompt(model, drafter, p, max_new_tokens=max_new_tokens, eos=eos) for p in prompts])


def merge_rounds(parts: Sequence[CaptureRounds]) -> CaptureRounds:
    """The rounds of several prompts, one after the other."""
    return CaptureRounds(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def capture_prompt(
    model: Any, drafter: DFlashDrafter, input_ids: Tensor, *, max_new_tokens: int, eos: list[int]
) -> CaptureRounds:
    """The uncut rounds of one prompt `[1, T]`, on the CPU; there may be none."""
    check_drafter(drafter, model)
    engine = get_engine(model, drafter)
    buffers = engine.borrow(drafter, input_ids.shape[1] + max_new_tokens, eos=len(eos))
    try:
        r = start_round(model, engine, buffers, drafter, input_ids, budget=max_new_tokens, eos=eos)
        rows: list[tuple[Tensor, ...]] = []
        with routed_experts(r.target) as chosen:
            for readout in decode(r):
                cut = readout.finished or len(readout.tokens) <= readout.num_accepted
                # a target input shorter than W: the budget's last rounds
                if not cut and readout.verify_length == r.state.block:
                    rows.append((r.state.confidence.clone(), r.state.entropy.clone(),
                                 torch.tensor(readout.num_accepted), *new_pairs(chosen, r)))  # fmt: skip
                chosen.clear()
    finally:
        engine.give_back(buffers)
    if not rows:
        draft, counts = torch.empty(0, r.state.block - 1), torch.empty(0, r.state.block, dtype=torch.int64)
        return CaptureRounds(draft, draft, counts[:, 0], counts, counts)
    return CaptureRounds(*(torch.stack(column).cpu() for column in zip(*rows, strict=True)))


def new_pairs(chosen: list[Tensor], r: Round) -> tuple[Tensor, Tensor]:
    """`new_layer0` and `new_later` of one round, `[W]` each, from its layers' expert ids; 0 without a router first."""
    target: Any = r.target
    if not target.top_k:
        none = torch.zeros(r.state.block, dtype=torch.int64)
        return none, none
    new = torch.stack([new_experts_ref(ids) for ids in chosen]).long()
    return new[0], new[1:].sum(0)


@torch.no_grad()
def open_round(
    model: Any,
    drafter: DFlashDrafter,
    input_ids: Tensor,
    *,
    budget: int,
    eos: list[int],
    policy: LengthPolicy | None = None,
) -> Round:
    """A prefilled request outside generate, on buffers of its own; full length unless `policy` says otherwise.

    Args:
        input_ids: `[1, T]`. budget: new tokens, the prefill's included. eos: token ids that end the request.
    """
    check_drafter(drafter, model)
    engine = get_engine(model, drafter)
    buffers = engine.borrow(drafter, input_ids.shape[1] + budget, eos=len(eos))
    return start_round(model, engine, buffers, drafter, input_ids, budget=budget, eos=eos, policy=policy)


def start_round(
    model: Any,
    engine: Engine,
    buffers: Buffers,
    drafter: DFlashDrafter,
    input_ids: Tensor,
    *,
    budget: int,
    eos: list[int],
    policy: LengthPolicy | None = None,
) -> Round:
    """`open_round` on borrowed buffers."""
    target = engine.target
    # modules, whose routers can be watched
    bound, buffers.cache.clear_rejected = engine.bind(drafter, buffers), True
    cache = DynamicCache(config=model.config.get_text_config())
    kwargs = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
    anchor = prefill(model, input_ids, model.generation_config, kwargs, target, buffers.cache, bound)
    buffers.state.start(anchor, eos, budget - 1)
    return Round(target, bound, buffers.cache, buffers.state, policy or FixedLength(buffers.cache.block))


@contextmanager
def routed_experts(target: Any) -> Iterator[list[Tensor]]:
    """Collect the expert ids `[w, topk]` that every MoE layer's router chooses, in layer order."""
    chosen: list[Tensor] = []
    gates = [layer.mlp.gate for layer in target.layers if hasattr(layer.mlp, "experts")]
    hooks = [gate.register_forward_hook(lambda module, args, output: chosen.append(output[2])) for gate in gates]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
