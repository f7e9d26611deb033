"""A pair and prompts -> latency of generate's rounds here, behind several numbers of context tokens (Appendix A.2)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import CostTable, DecodeReport, HybridSpecConfig

from ..drafters.dflash import DFlashDrafter
from ..engine import get_engine
from ..strategy import choose_target, note_gdn
from ..validation import check_drafter
from .capture import start_round
from .latency import cost_table, some_lengths, text_windows
from .tables import describe_runtime

# on a GPU, contexts besides the prompts' own
CONTEXTS = (1024, 8192, 32768)
# of an answer at one length
ROUND_TOKENS = 128


def measure_contexts(
    model: Any,
    drafter: DFlashDrafter,
    prompts: Sequence[Tensor],
    contexts: Sequence[int],
    say: Callable[[str], object],
) -> list[CostTable]:
    """A latency curve behind each number of tokens, in ascending order; what does not fit in memory is left out.

    Raises:
        RuntimeError: if not even the first fits.
    """
    costs: list[CostTable] = []
    for context in tqdm(contexts, desc="latency", unit="context"):
        try:
            costs.append(measure_pair(model, drafter, text_of(prompts, context)))
        except RuntimeError as error:
            if not costs:
                raise
            say(f"No latency behind {context} tokens, nor behind more: {error}")
            break
    return costs


@torch.no_grad()
def measure_pair(model: Any, drafter: DFlashDrafter, text: Tensor) -> CostTable:
    """The latency curve behind `text` `[T]`: of whole rounds that decode at fixed lengths, in kernels and graphs where
    they can; s and eta of the stages alone."""
    check_drafter(drafter, model)
    engine, text = get_engine(model, drafter), text.to(model.device)
    block, report = int(drafter.config.block_size or 0), DecodeReport(policy="full")
    rounds = [decode_at(model, drafter, text, w) for w in some_lengths(block)]
    # their graphs serve no other request
    engine.close()
    buffers = engine.borrow(drafter, len(text) + block)
    note_gdn(buffers.cache.gdn, report)
    try:
        r = start_round(model, engine, buffers, drafter, text[None], budget=block, eos=[])
        r, kind = choose_target(engine, buffers, drafter, r, HybridSpecConfig().graphs, report)
        graphs = kind != "off"
        seconds = [each.decode_seconds / each.rounds for each in rounds]
        # the output budget shortens the last rounds
        lengths = [each.mean_verify_length for each in rounds]
        how = f"whole rounds, {ROUND_TOKENS} tokens decoded at each length"
        (last,) = text_windows(text, block, 1)
        return cost_table(r, seconds, lengths, last, graphs, describe_runtime(report, graphs), how)
    finally:
        engine.give_back(buffers)


def decode_at(model: Any, drafter: DFlashDrafter, text: Tensor, w: int) -> DecodeReport:
    """Greedy decoding behind `text` `[T]`, w tokens verified a round; what was captured for it is not in its time."""
    ids = text[None]
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, generation_mode="hybridspec",
        hybridspec_config=HybridSpecConfig(policy=f"static:{w}"), do_sample=False, max_new_tokens=ROUND_TOKENS,
        eos_token_id=None, return_dict_in_generate=True,
    )  # fmt: skip
    report: DecodeReport = out.report
    return report


def default_contexts(model: Any, typical: int, block: int) -> list[int]:
    """A typical context, and on a GPU, where a long prompt takes no time, some longer and shorter ones."""
    if model.device.type != "cuda":
        return [typical]
    longest = longest_context(model, block)
    return sorted({typical, *(context for context in CONTEXTS if context <= longest)})


def check_contexts(model: Any, context: int | Sequence[int], block: int) -> list[int]:
    """The asked contexts in ascending order.

    Raises:
        ValueError: for one that is no number of tokens, or that leaves the model no positions for an answer.
    """
    listed = list(context) if isinstance(context, Sequence) and not isinstance(context, str) else [context]
    if not all(type(each) is int for each in listed):
        raise ValueError(f"context must be a whole number of tokens, or several, got {context!r}.")
    contexts = sorted(set(listed))
    longest = longest_context(model, block)
    if not contexts or contexts[0] < 1 or contexts[-1] > longest:
        raise ValueError(
            f"context must be 1 to {longest} tokens (the model's positions less an answer's), got {contexts}."
        )
    return contexts


def longest_context(model: Any, block: int) -> int:
    """Tokens behind which an answer of `ROUND_TOKENS` and a block have positions."""
    return int(model.config.get_text_config().max_position_embeddings) - ROUND_TOKENS - block


def typical_context(prompts: Sequence[Tensor], max_new_tokens: int) -> int:
    """Tokens before a round half way through the answer to a prompt of middle length."""
    return sorted(ids.shape[1] for ids in prompts)[len(prompts) // 2] + max_new_tokens // 2


def text_of(prompts: Sequence[Tensor], length: int) -> Tensor:
    """`[length]` tokens of the prompts, repeated where they are too short."""
    text = torch.cat([ids[0].cpu() for ids in prompts])
    return text.repeat(-(-length // len(text)))[:length]
