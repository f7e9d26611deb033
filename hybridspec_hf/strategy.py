"""The decoding method that generate calls for generation_mode="hybridspec": inputs -> rounds -> output classes."""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hybridspec_generation import DecodeReport, HybridSpecConfig
from hybridspec_generation.decode import RoundReadout
from hybridspec_generation.round import Round

from .buffers import Buffers
from .drafters.dflash import DFlashDrafter
from .emission import Emitter
from .engine import Engine, get_engine
from .lengths import plan_lengths
from .planning import note, note_gdn, plan_rounds
from .prefill import prefill, prompt_length
from .validation import as_config, check_drafter, check_options


@dataclass
class HybridSpecOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the report of the call; per-token tensors and the cache are None."""

    report: DecodeReport | None = None


def hybridspec_decoding(
    self: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> HybridSpecOutput | Tensor:
    """Decode greedily with HybridSpec; called by generate like `_sample`, which has the same arguments.

    Args:
        input_ids: `[1, T]`, int64.
        assistant_model: a `DFlashDrafter`, or None to decode autoregressively in the same engine.

    Returns:
        `[1, T + new]` token ids, or with return_dict_in_generate a `HybridSpecOutput` whose `report` says what it did.

    Raises:
        ValueError: for anything that is not supported, before a token is generated.
    """
    config = as_config(generation_config.hybridspec_config)
    check_options(generation_config, logits_processor, input_ids, model_kwargs, synced_gpus)
    drafter = check_drafter(assistant_model, self, assistant_tokenizer)
    engine = get_engine(self, drafter)
    plan = plan_lengths(config, engine, drafter)

    prompt = Prompt(input_ids, generation_config, model_kwargs)
    emitter = Emitter(input_ids, generation_config, stopping_criteria, streamer)
    report = DecodeReport(policy="ar" if drafter is None else config.policy)
    if drafter is None and config.policy != HybridSpecConfig.policy:
        note(report, f"policy={config.policy!r} has no effect without assistant_model: decoding autoregressively")
    elif drafter is None and generation_config.hybridspec_config is not None:
        report.notes.append(
            "without assistant_model, of hybridspec_config only gdn_backend, graphs and "
            "rounds_per_launch have an effect"
        )
    tokens = prompt_length(input_ids, model_kwargs) + emitter.budget
    buffers = engine.borrow(drafter, tokens, config.gdn_backend, len(emitter.eos))
    note_gdn(buffers.cache.gdn, report)
    try:
        round_ = start(self, engine, buffers, drafter, prompt, emitter, report)
        if not emitter.finished:
            rounds = plan_rounds(engine, buffers, drafter, plan, round_, input_ids, config, report)
            run_rounds(rounds, emitter, report)
    finally:
        engine.give_back(buffers)
    sequences = emitter.finish()
    report.new_tokens = emitter.new_tokens
    if not generation_config.return_dict_in_generate:
        return sequences
    return HybridSpecOutput(sequences=sequences, report=report)


class Prompt(NamedTuple):
    """A request as generate prepared it: `input_ids` `[1, T]`, its config and the model's keyword arguments."""

    input_ids: Tensor
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]


def start(
    model: Any,
    engine: Engine,
    buffers: Buffers,
    drafter: DFlashDrafter | None,
    prompt: Prompt,
    emitter: Emitter,
    report: DecodeReport,
) -> Round:
    """Prefill, emit the first token and set up the first round behind it."""
    started = time.perf_counter()
    target, cache, bound = engine.target, buffers.cache, engine.bind(drafter, buffers)
    anchor = prefill(model, *prompt, target, cache, bound)
    emitter.emit(anchor.tolist())
    report.prompt_tokens, report.block = int(cache.length), cache.block
    report.prefill_seconds = time.perf_counter() - started
    buffers.state.start(anchor, emitter.eos, emitter.budget - emitter.new_tokens)
    return Round(target, bound, cache, buffers.state)


def run_rounds(rounds: Generator[RoundReadout], emitter: Emitter, report: DecodeReport) -> None:
    """Decode until EOS, the output budget or a stopping criterion."""
    started = time.perf_counter()
    # closed before the buffers are given back, whatever a streamer or a criterion raises
    with closing(rounds):
        for readout in rounds:
            report.add(readout)
            if emitter.emit(readout.tokens):
                break
        report.decode_seconds = time.perf_counter() - started
