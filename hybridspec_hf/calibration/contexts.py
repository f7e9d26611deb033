"""A pair and prompts -> latency of generate's rounds here, behind several numbers of context tokens (Appendix A.2)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import CostTable, DecodeReport, HybridSpecConfig

from ..drafters.dflash import DFlashDrafter
from ..engine import get_engine
from ..planning import choose_target, note_gdn
from ..validation import check_drafter
from .capture import start_round
from .cost_files import UnfinishedCosts
from .latency import cost_table, some_lengths, text_windows
from .tables import describe_runtime

# on a GPU, contexts besides the prompts' own
CONTEXTS = (1024, 8192, 32768)
# of each answer at one length
ROUND_TOKENS = 128
# answers at one length behind different texts, as far as their prompts stay below so many tokens: which experts tokens
# choose differs from one text to the next, and the model's own prefill of a long one takes seconds
TEXTS, PROMPT_TOKENS = 4, 65536


def measure_contexts(
    model: Any,
    drafter: DFlashDrafter,
    prompts: Sequence[Tensor],
    contexts: Sequence[int],
    say: Callable[[str], object],
    unfinished: UnfinishedCosts | None = None,
) -> list[CostTable]:
    """A latency curve behind each number of tokens, in ascending order; what a GPU has no memory for is left out.

    Args:
        unfinished: curves of an interrupted call, which are not measured again; it gets those that are measured now.

    Raises:
        RuntimeError: if memory does not suffice even for the first.
    """
    costs: list[CostTable] = []
    for context in contexts:
        known = unfinished and unfinished.costs.get(context)
        if known:
            say(f"The latency behind {context} tokens is already measured: skipped.")
            costs.append(known)
            continue
        try:
            cost = measure_pair(model, drafter, texts_of(prompts, context))
            if costs and cost.runtime != costs[0].runtime:
                raise FellBack(f"rounds ran in {cost.runtime} there, not in {costs[0].runtime}")
        except RuntimeError as error:
            if not costs or not (isinstance(error, FellBack) or is_out_of_memory(error)):
                raise
            say(f"No latency behind {context} tokens, nor behind more: {error}")
            break
        costs.append(cost)
        if unfinished:
            unfinished.add(cost)
    if unfinished:
        unfinished.remove()
    return costs


class FellBack(RuntimeError):
    """Rounds ran otherwise than the rest of the calibration's: memory may suffice behind fewer tokens."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the GPU's memory is full: torch's own error, or the engine's for its static cache, caused by it."""
    return any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__))


@torch.no_grad()
def measure_pair(model: Any, drafter: DFlashDrafter, texts: Sequence[Tensor]) -> CostTable:
    """The latency curve behind a number of tokens: of whole rounds that decode at fixed lengths, in kernels and graphs
    where they can; s and eta of the stages alone.

    Args:
        texts: `[T]` each, int64, of one length, decoded behind one after the other.
    """
    check_drafter(drafter, model)
    engine, texts = get_engine(model, drafter), [text.to(model.device) for text in texts]
    text, block, report = texts[0], int(drafter.config.block_size or 0), DecodeReport(policy="full")
    try:
        answers = decode_all(model, drafter, texts, some_lengths(block))
    finally:
        # their graphs serve no other request
        engine.close()
    buffers = engine.borrow(drafter, len(text) + block)
    note_gdn(buffers.cache.gdn, report)
    try:
        r = start_round(model, engine, buffers, drafter, text[None], budget=block, eos=[])
        r, _ = choose_target(engine, buffers, drafter, r, HybridSpecConfig().graphs, report)
        report.launches = way_of(answers)
        graphs = report.launches == "graphs"
        how = f"whole rounds, {ROUND_TOKENS} tokens decoded behind each of {len(texts)} texts at each length"
        (last,) = text_windows(text, block, 1)
        return cost_table(r, list(map(mean_round, answers)), last, graphs, describe_runtime(report, graphs), how)
    finally:
        engine.give_back(buffers)


def decode_all(
    model: Any, drafter: DFlashDrafter, texts: Sequence[Tensor], lengths: Sequence[int]
) -> list[list[DecodeReport]]:
    """For each of `lengths`, the answers behind all `texts`.

    Every length captures graphs of its own, which takes longer than decoding with them: hence a few lengths, several
    texts.
    """
    answers: list[list[DecodeReport]] = []
    with tqdm(total=len(lengths) * len(texts), desc=f"latency behind {len(texts[0])} tokens", unit="request") as bar:
        for w in lengths:
            bar.set_postfix_str(f"w = {w}")
            answers.append([])
            for text in texts:
                answers[-1].append(decode_at(model, drafter, text, w))
                bar.update()
    return answers


def mean_round(answers: Sequence[DecodeReport]) -> tuple[float, float]:
    """(mean tokens verified, mean seconds) over all rounds of answers at one length.

    The output budget shortens the last rounds of an answer, so the first is not the length itself.
    """
    rounds = sum(answer.rounds for answer in answers)
    verified = sum(answer.verified_tokens for answer in answers)
    return verified / rounds, sum(answer.decode_seconds for answer in answers) / rounds


def way_of(answers: Sequence[Sequence[DecodeReport]]) -> str:
    """How all rounds were launched: "graphs", or what their reports say.

    Raises:
        FellBack: if they differ.
    """
    every = [answer for of_length in answers for answer in of_length]
    ways = {"graphs" if "graph" in answer.launches else answer.launches for answer in every}
    if len(ways) > 1:
        notes = "; ".join(dict.fromkeys(note for answer in every for note in answer.notes))
        raise FellBack(f"some rounds ran as {', others as '.join(sorted(ways))}: {notes}")
    return ways.pop()


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


def texts_of(prompts: Sequence[Tensor], length: int) -> list[Tensor]:
    """At most `TEXTS` texts of `length` tokens `[length]`: the prompts in a circle, from starts evenly apart."""
    circle = torch.cat([ids[0].cpu() for ids in prompts])
    count = max(1, min(TEXTS, PROMPT_TOKENS // length, len(circle)))
    return [circle[(len(circle) * i // count + torch.arange(length)) % len(circle)] for i in range(count)]
