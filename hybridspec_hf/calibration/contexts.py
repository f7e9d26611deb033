"""A pair and prompts -> latency curves behind several numbers of context tokens, as generate's rounds run here."""

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
from .latency import measure_cost
from .tables import describe_runtime

# on a GPU, contexts besides the prompts' own
CONTEXTS = (1024, 8192, 32768)


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
    """The latency curve behind `text` `[T]`, as generate's rounds run here: in kernels and graphs where they can."""
    check_drafter(drafter, model)
    engine, text = get_engine(model, drafter), text.to(model.device)
    budget, report = int(drafter.config.block_size or 0), DecodeReport(policy="full")
    buffers = engine.borrow(drafter, len(text) + budget)
    note_gdn(buffers.cache.gdn, report)
    try:
        r = start_round(model, engine, buffers, drafter, text[None], budget=budget, eos=[])
        r, kind = choose_target(engine, buffers, drafter, r, HybridSpecConfig().graphs, report)
        graphs = kind != "off"
        return measure_cost(r, text, graphs=graphs, runtime=describe_runtime(report, graphs))
    finally:
        engine.give_back(buffers)


def default_contexts(model: Any, typical: int, block: int) -> list[int]:
    """A typical context, and on a GPU, where a long prompt takes no time, some longer and shorter ones."""
    if model.device.type != "cuda":
        return [typical]
    longest = int(model.config.get_text_config().max_position_embeddings) - 2 * block
    return sorted({typical, *(context for context in CONTEXTS if context <= longest)})


def check_contexts(model: Any, context: int | Sequence[int], block: int) -> list[int]:
    """The asked contexts in ascending order.

    Raises:
        ValueError: for one that is no number of tokens, or that leaves the model no positions for a block.
    """
    listed = list(context) if isinstance(context, Sequence) and not isinstance(context, str) else [context]
    if not all(type(each) is int for each in listed):
        raise ValueError(f"context must be a whole number of tokens, or several, got {context!r}.")
    contexts = sorted(set(listed))
    longest = int(model.config.get_text_config().max_position_embeddings) - 2 * block
    if not contexts or contexts[0] < 1 or contexts[-1] > longest:
        raise ValueError(
            f"context must be 1 to {longest} tokens (the model's positions less two blocks), got {contexts}."
        )
    return contexts


def typical_context(prompts: Sequence[Tensor], max_new_tokens: int) -> int:
    """Tokens before a round half way through the answer to a prompt of middle length."""
    return sorted(ids.shape[1] for ids in prompts)[len(prompts) // 2] + max_new_tokens // 2


def text_of(prompts: Sequence[Tensor], length: int) -> Tensor:
    """`[length]` tokens of the prompts, repeated where they are too short."""
    text = torch.cat([ids[0].cpu() for ids in prompts])
    return text.repeat(-(-length // len(text)))[:length]
