"""The decoding method that generate calls for generation_mode="hybridspec": inputs -> rounds -> output classes."""

import time
import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hybridspec_generation import DecodeReport, HybridSpecConfig, decode
from hybridspec_generation.decode import RoundReadout
from hybridspec_generation.gdn import GDNBackend
from hybridspec_generation.gdn.base import MAX_KERNEL_WIDTH
from hybridspec_generation.policies import (
    DCutPolicy,
    DSparkPolicy,
    EvictPolicy,
    FixedLength,
    HybridSpecPolicy,
    LengthPolicy,
    NominalPolicy,
)
from hybridspec_generation.round import Round
from hybridspec_kernels import MAX_TOKENS

from .calibration.tables import TableSet, choose_tables, selection_tables
from .drafters import kernel_drafter
from .drafters.dflash import DFlashDrafter
from .drafters.kernel_drafter import KernelDrafter
from .emission import Emitter
from .engine import Buffers, Engine, NotCaptured, get_engine
from .graphs.capture import CaptureError
from .graphs.conditional import supported
from .graphs.rounds import GraphedRounds
from .models.kernel_target import KernelTarget
from .prefill import prefill, prompt_length
from .validation import as_config, check_drafter, check_options

ADAPTIVE: dict[str, Any] = {
    "hybridspec": HybridSpecPolicy,
    "nominal": NominalPolicy,
    "dcut": DCutPolicy,
    "evict": EvictPolicy,
    "dspark": DSparkPolicy,
}

READ_RHO = ("hybridspec", "nominal")


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
    if drafter is None and generation_config.hybridspec_config is not None:
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
            rounds = plan_rounds(engine, buffers, drafter, plan, round_, prompt, config, report)
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


def choose_target(
    engine: Engine, buffers: Buffers, drafter: DFlashDrafter | None, round_: Round, graphs: str, report: DecodeReport
) -> tuple[Round, str]:
    """The prefilled round with the target that runs rounds, in kernels or module by module; and by which graphs."""
    target, reason = engine.round_target(buffers)
    round_ = replace(round_, target=target)
    on_gpu = round_.state.remaining.is_cuda
    if not isinstance(target, KernelTarget):
        if on_gpu or graphs in ("parent", "per-length"):
            note(report, f"rounds run the model's modules one by one, without graphs: {reason}")
        return round_, "off"
    target.start_request()
    report.launches = "kernels"
    if drafter is not None and not isinstance(buffers.drafter, KernelDrafter):
        reason = kernel_drafter.why_not(drafter, engine.target.embed_tokens, engine.target.lm_head)
        note(report, f"the drafter runs in PyTorch: {reason}")
    if graphs == "auto" and on_gpu:
        reason = supported(round_.state.remaining.device)
        graphs = "per-length" if reason else "parent"
        if reason and drafter is not None:
            note(report, f"the CPU chooses among the graphs: {reason}")
    return round_, graphs if on_gpu else "off"


def plan_rounds(
    engine: Engine, buffers: Buffers, drafter: DFlashDrafter | None, plan: int | TableSet, round_: Round,
    prompt: Prompt, config: HybridSpecConfig, report: DecodeReport,
) -> Generator[RoundReadout]:  # fmt: skip
    """The prefilled request's rounds, in kernels and graphs where they run; where one fails, by modules."""
    state = round_.state
    begin = partial(state.start, state.anchor.clone(), state.eos.tolist(), int(state.remaining))
    in_kernels, graphs = choose_target(engine, buffers, drafter, round_, config.graphs, report)
    try:
        policy = length_policy(plan, engine, buffers, drafter, in_kernels, prompt, config, report, graphs != "off")
        return prepare_rounds(buffers, replace(in_kernels, policy=policy), begin, config, graphs, report)
    except Exception as error:
        if report.launches == "modules":
            raise
        # a kernel that does not compile, or does not fit on this GPU; memory may be there the next time
        reason = f"a kernel failed with {type(error).__name__}: {error}"
        if not isinstance(error, torch.OutOfMemoryError):
            buffers.broken = reason
        note(report, f"rounds run the model's modules one by one, without graphs: {reason}")
    report.launches = "modules"
    begin()
    round_ = engine.by_modules(drafter, buffers, round_)
    policy = length_policy(plan, engine, buffers, drafter, round_, prompt, config, report, False)
    return decode(replace(round_, policy=policy))


def prepare_rounds(
    buffers: Buffers, round_: Round, begin: Callable[[], None], config: HybridSpecConfig, graphs: str,
    report: DecodeReport,
) -> Generator[RoundReadout]:  # fmt: skip
    """The request's rounds; their graphs are captured by the first request that needs them, then `begin` is called."""
    if graphs == "off":
        return decode(round_)
    policy, drafter = round_.policy, round_.drafter
    longest = policy.length if isinstance(policy, FixedLength) else round_.state.block
    at_once = config.rounds_per_launch if graphs == "parent" else 1
    kind = type(policy).__name__, getattr(policy, "online", False)
    key = (*kind, longest, graphs, at_once, id(drafter))
    if key not in buffers.rounds:
        started = time.perf_counter()
        try:
            buffers.rounds[key] = GraphedRounds(round_, range(min(2, longest), longest + 1), graphs, at_once)
        except CaptureError as error:
            buffers.rounds[key] = NotCaptured(str(error), drafter)
        finally:
            begin()
        report.capture_seconds = time.perf_counter() - started
    rounds = buffers.rounds[key]
    if isinstance(rounds, NotCaptured):
        note(report, f"rounds run without graphs: {rounds.reason}")
        return decode(round_)
    if at_once < config.rounds_per_launch:
        note(report, "rounds_per_launch has no effect without a parent graph")
    report.launches = rounds.launches
    return rounds.decode()


def note(report: DecodeReport, text: str) -> None:
    """Report a fallback, and warn of it."""
    report.notes.append(text)
    warnings.warn(f"HybridSpec: {text}.", stacklevel=2)


def note_gdn(gdn: GDNBackend, report: DecodeReport) -> None:
    """Report how the GDN layers run; on a GPU, PyTorch in place of the kernels is worth a warning."""
    report.gdn = f"{gdn.name}, {'Triton kernels' if gdn.kernels else 'PyTorch'}"
    if gdn.shape.device.type == "cuda" and not gdn.kernels:
        text = (
            "the GDN layers run in PyTorch, several times slower than the Triton kernels: these need triton, an "
            "NVIDIA GPU from SM80 on, bf16, fp16 or fp32 weights, keys at most "
            f"{MAX_KERNEL_WIDTH} wide, and blocks of at most {MAX_TOKENS} tokens "
            f"(here {gdn.shape.dtype}, {gdn.shape.key_dim} and {gdn.block})"
        )
        note(report, text)


def plan_lengths(config: HybridSpecConfig, engine: Engine, drafter: DFlashDrafter | None) -> int | TableSet:
    """What the config asks for on this pair, all its errors raised: a fixed length, or the tables of a selector."""
    if drafter is None:
        return 1
    block = int(drafter.config.block_size or 0)
    if not config.is_adaptive:
        return config.fixed_length(block)
    # looked at only where there is something to compare with
    pair = engine.identity(drafter) if config.calibrated_for else None
    return choose_tables(config, engine.target, block, pair)


def length_policy(
    plan: int | TableSet, engine: Engine, buffers: Buffers, drafter: DFlashDrafter | None, round_: Round,
    prompt: Prompt, config: HybridSpecConfig, report: DecodeReport, graphs: bool,
) -> LengthPolicy:  # fmt: skip
    """The policy object of a plan; a cost table that is not given is measured here, on the prompt."""
    if config.online_throughput and report.policy not in (*READ_RHO, "ar"):
        report.notes.append(f"online_throughput has no effect on {report.policy!r}, which reads no rho")
    if isinstance(plan, int):
        return FixedLength(plan)
    assert drafter is not None
    # the prompt and the first token: real text to time the target on
    text = torch.cat([prompt.input_ids[0].to(round_.state.anchor), round_.state.anchor])
    tables = selection_tables(plan, engine, drafter, round_, text, report, graphs)
    # without a router in Layer 0 there is no boundary to correct at
    kind = ADAPTIVE["nominal" if report.policy == "hybridspec" and not engine.target.top_k else report.policy]
    online = config.online_throughput and report.policy in READ_RHO
    name = kind.__name__ + " online" * online
    known = buffers.policies.get(name)
    if known is None or any(a.shape != b.shape for a, b in zip(known.tables, tables, strict=True)):
        if known is not None:
            buffers.drop_graphs()
        known = buffers.policies[name] = kind(tables, online=True) if online else kind(tables)
    # graphs read the tables where they are
    for mine, theirs in zip(known.tables, tables, strict=True):
        mine.copy_(theirs)
    policy: LengthPolicy = known
    return policy
