"""A prefilled request -> the rounds that decode it: in kernels and graphs where these run, and what takes over."""

import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybridspec_generation import DecodeReport, HybridSpecConfig, decode
from hybridspec_generation.decode import RoundReadout
from hybridspec_generation.gdn import GDNBackend
from hybridspec_generation.gdn.base import MAX_KERNEL_WIDTH
from hybridspec_generation.policies import FixedLength
from hybridspec_generation.round import Round
from hybridspec_kernels import MAX_TOKENS

from .buffers import Buffers, NotCaptured
from .calibration.tables import TableSet
from .drafters import kernel_drafter
from .drafters.dflash import DFlashDrafter
from .drafters.kernel_drafter import KernelDrafter
from .engine import Engine
from .graphs.capture import CaptureError
from .graphs.conditional import supported
from .graphs.rounds import GraphedRounds
from .lengths import length_policy
from .models.kernel_target import KernelTarget


def plan_rounds(
    engine: Engine, buffers: Buffers, drafter: DFlashDrafter | None, plan: int | TableSet, round_: Round,
    input_ids: Tensor, config: HybridSpecConfig, report: DecodeReport,
) -> Generator[RoundReadout]:  # fmt: skip
    """The prefilled request's rounds, in kernels and graphs where they run; where one fails, by modules.

    Args:
        plan: of `plan_lengths`. input_ids: `[1, T]`, the prompt.
    """
    state = round_.state
    begin = partial(state.start, state.anchor.clone(), state.eos.tolist(), int(state.remaining))
    in_kernels, graphs = choose_target(engine, buffers, drafter, round_, config.graphs, report)
    try:
        policy = length_policy(plan, engine, buffers, drafter, in_kernels, input_ids, config, report, graphs != "off")
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
    policy = length_policy(plan, engine, buffers, drafter, round_, input_ids, config, report, False)
    return decode(replace(round_, policy=policy))


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
