"""A pair and prompts -> HybridSpecConfig with every table of the length policy (Appendices A.2 and E.3).

Five steps: a capture run at full length, the acceptance model, the target's latency curve on this machine, new experts
by position, and the pooled throughput rho over the captured rounds.
"""

import datetime
import importlib.util
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import AcceptanceTable, CalibratedFor, CostTable, ExpertTable, HybridSpecConfig, cost_at

from ..drafters.dflash import DFlashDrafter
from ..engine import get_engine
from ..models import SplitTarget
from ..validation import check_drafter
from .acceptance import (
    calibration_error,
    error_by_position,
    fit_acceptance_table,
    predict_acceptance,
    predict_unseen,
    reached_positions,
)
from .capture import CaptureRounds, capture_prompt, merge_rounds
from .contexts import check_contexts, default_contexts, measure_contexts, typical_context
from .cost_files import UNFINISHED_NAME, UnfinishedCosts, cost_facts
from .experts import fit_expert_table, routing_correlation
from .gains import interpolation_gain
from .latency import device_name
from .prompts import prompt_hash
from .store import CAPTURE_NAME, CaptureStore, capture_header
from .tables import fit_experts, rho_of


class Names(NamedTuple):
    """What the tables say that they belong to."""

    target: str
    drafter: str
    prompts: str


class Calibration(NamedTuple):
    """A calibrated config, and what was found on the way as JSON types (see `describe_rounds`)."""

    config: HybridSpecConfig
    report: dict[str, Any]


def calibrate(
    model: Any,
    drafter: DFlashDrafter,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    output: str | Path,
    names: Names | None = None,
    eos: Sequence[int] | None = None,
    context: int | Sequence[int] | None = None,
    say: Callable[[str], object] = print,
) -> Calibration:
    """Calibrate the length policy for a pair and save it to a folder. Needs scikit-learn.

    An interrupted call goes on where it stopped: the folder keeps the rounds of every prompt, and the latency curves
    until the last one is measured.

    Args:
        model, drafter: the pair, in eval mode and on the device that the latency curve is for.
        prompts: token ids `[1, T]` each; leave them out of every evaluation.
        max_new_tokens: of each prompt, more than one block.
        output: folder for the config's two files, which `HybridSpecConfig.from_pretrained` reads.
        names: for the tables' `source`; None takes the names that the pair was loaded by.
        eos: token ids that end an answer; None takes those of the model's generation config.
        context: tokens before the rounds whose latency is measured, one number or several; None takes those of a
            round half way through an answer and, on a GPU, 1,024, 8,192 and 32,768 as far as the model and the memory
            allow.
        say: told what is done.

    Raises:
        ImportError: without scikit-learn.
        ValueError: for prompts or contexts of another form; if the folder holds a capture run of another pair or other
            prompts; if too few rounds are captured.
    """
    require_sklearn()
    if drafter is None:
        raise ValueError("Calibration needs a drafter, got None. Load one with DFlashDrafter.from_pretrained(...).")
    check_drafter(drafter, model)
    check_prompts(prompts)
    block, output = int(drafter.config.block_size or 0), Path(output)
    if max_new_tokens <= block:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no round a whole block of {block} tokens. Allow "
            "several blocks, such as 256 or more."
        )
    typical = typical_context(prompts, max_new_tokens)
    contexts = default_contexts(model, typical, block) if context is None else check_contexts(model, context, block)
    names = names or Names(model.config.name_or_path, drafter.config.name_or_path, f"{len(prompts)} prompts")
    eos = model_eos(model) if eos is None else list(eos)

    header = capture_header(model, drafter, prompts, max_new_tokens=max_new_tokens, eos=eos, names=names._asdict())
    store = CaptureStore(output / CAPTURE_NAME, header)
    if store.captured:
        say(f"{len(store.captured)} of {len(prompts)} prompts are already captured in {store.path}: skipped.")
    captured = capture_missing(model, drafter, prompts, store, max_new_tokens=max_new_tokens, eos=eos)
    rounds = merge_rounds(captured)

    engine = get_engine(model, drafter)
    target = engine.target
    pair = f"target {names.target}, drafter {names.drafter}"
    where = f"captured on {device_name(model.device)}, torch {torch.__version__}, {versions()}"
    source = f"{pair}, {len(rounds.accepted)} rounds of {len(prompts)} prompts ({names.prompts}), {where}"
    acceptance, experts = fit_tables(rounds, target, source)
    facts = cost_facts(engine, drafter, "whole rounds") | {"prompt_tokens": header["prompt_tokens"]}
    unfinished = UnfinishedCosts(output / UNFINISHED_NAME, facts)
    if unfinished.dropped:
        say(f"{unfinished.path}: {unfinished.dropped} lines are damaged or of something else, and measured again.")
    prefix = predict_acceptance(rounds, acceptance).cumprod(1)
    costs = tuple(
        replace(cost, source=f"{pair}, {cost.source}, {versions()}", throughput=rho_of(prefix, cost))
        for cost in measure_contexts(model, drafter, prompts, contexts, say, unfinished)
    )
    identity = engine.identity(drafter)
    made_for = CalibratedFor(
        **names._asdict(), target_weights=identity.target, drafter_weights=identity.drafter,
        hardware=device_name(model.device), versions=f"torch {torch.__version__}, {versions()}",
        date=datetime.date.today().isoformat(), prompt_hashes=tuple(map(prompt_hash, prompts)),
    )  # fmt: skip
    config = HybridSpecConfig(acceptance=acceptance, experts=experts, cost=costs, calibrated_for=made_for)
    config.save_pretrained(output)
    report = {**describe_rounds(captured, acceptance, target.top_k), **describe_cost(cost_at(costs, typical))}
    report["contexts"] = {str(cost.context): describe_cost(cost) for cost in costs}
    report["interpolation_gain"] = interpolation_gain(prefix, costs, cost_at(costs, typical))
    return Calibration(config, report)


def check_prompts(prompts: Sequence[Tensor]) -> None:
    """Refuse what is no sequence of prompts.

    Raises:
        ValueError: naming the first that is no token ids `[1, T]`, or if there is none.
    """
    if not len(prompts):
        raise ValueError("Calibration needs prompts, got none.")
    for i, ids in enumerate(prompts):
        is_ids = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
        if not is_ids or ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
            got = f"{list(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"prompts[{i}] must be token ids [1, T], int64, T >= 1, one prompt each; got {got}.")


def require_sklearn() -> None:
    """Say so before hours of decoding.

    Raises:
        ImportError: without scikit-learn.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ImportError('calibration needs scikit-learn: pip install "hybridspec-hf[calibration]".')


def capture_missing(
    model: Any,
    drafter: DFlashDrafter,
    prompts: Sequence[Tensor],
    store: CaptureStore,
    *,
    max_new_tokens: int,
    eos: list[int],
) -> list[CaptureRounds]:
    """The rounds of each prompt; those that the store lacks are captured and added to it."""
    with tqdm(total=len(prompts), initial=len(store.captured), desc="capture", unit="prompt") as bar:
        for index, input_ids in enumerate(prompts):
            if index in store.captured:
                continue
            on_device = input_ids.to(model.device)
            store.add(index, capture_prompt(model, drafter, on_device, max_new_tokens=max_new_tokens, eos=eos))
            bar.update()
    return [store.captured[index] for index in range(len(prompts))]


def fit_tables(rounds: CaptureRounds, target: SplitTarget, source: str) -> tuple[AcceptanceTable, ExpertTable]:
    """Both tables that a capture run gives.

    Raises:
        ValueError: if there are too few rounds.
    """
    acceptance = fit_acceptance_table(rounds, source)
    moe = {"top_k": target.top_k, "num_moe_layers": target.num_moe_layers}
    experts = fit_expert_table(rounds, source=source, **moe)
    # without a router in Layer 0 there is nothing to count
    return acceptance, experts if target.top_k else fit_experts(experts, acceptance.block, **moe)


def model_eos(model: Any) -> list[int]:
    """The token ids that end an answer by the model's generation config."""
    eos = model.generation_config.eos_token_id
    return list(eos) if isinstance(eos, list | tuple) else [eos] if eos is not None else []


def versions() -> str:
    """Versions besides torch's, which depends on the device."""
    from .. import __version__

    return f"transformers {transformers.__version__}, hybridspec_hf {__version__}, python {platform.python_version()}"


def describe_rounds(captured: Sequence[CaptureRounds], table: AcceptanceTable, top_k: int) -> dict[str, Any]:
    """What the capture run says of the pair, as JSON types.

    Returns:
        `prompts`, `rounds`, `acceptance_length`. `calibration_error`: expected calibration error of the drafter's
        `confidence` and of the fitted `table`, over all reached draft tokens and `by_position`; `unseen` says whether
        the table was fitted without the prompts it is judged on (always, unless there are too few).
        `routing_correlation`: of new Layer-0 with new later experts (None without routers).
    """
    rounds = merge_rounds(captured)
    try:
        fitted, unseen = predict_unseen(captured), True
    except ValueError:
        fitted, unseen = predict_acceptance(rounds, table), False
    reached, labels = reached_positions(rounds)
    errors: dict[str, Any] = {"unseen": unseen}
    for name, scores in (("confidence", rounds.confidence.double()), ("table", fitted)):
        errors[name] = round(calibration_error(scores[reached], labels[reached].double()), 4)
        positions = error_by_position(scores, labels, reached)
        errors[f"{name}_by_position"] = [None if error is None else round(error, 4) for error in positions]
    correlation = round(routing_correlation(rounds), 4) if top_k else math.nan
    return {
        "prompts": len(captured),
        "rounds": len(rounds.accepted),
        "acceptance_length": round(float(rounds.accepted.double().mean()) + 1, 4),
        "calibration_error": errors,
        "routing_correlation": correlation if math.isfinite(correlation) else None,
    }


def describe_cost(cost: CostTable) -> dict[str, Any]:
    """The latency curve in milliseconds a round by length, and rho in tokens per second, as JSON types."""
    lengths = range(2, len(cost.target_cost))
    return {
        "throughput": round(cost.throughput, 3),
        "round_ms": {str(w): round(1e3 * (cost.fixed_cost + cost.target_cost[w]), 4) for w in lengths},
        "fixed_ms": round(1e3 * cost.fixed_cost, 4),
        "stage0_token_us": round(1e6 * cost.stage0_token_cost, 3),
        "expert_us": round(1e6 * cost.expert_cost, 3),
        "cost_source": cost.source,
    }
