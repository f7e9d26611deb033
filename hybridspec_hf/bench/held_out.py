"""A pair's prompts in two halves -> tables fitted on the rounds of one, every policy judged on those of the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridspec_generation import HybridSpecConfig
from hybridspec_generation.config import ADAPTIVE_POLICIES
from hybridspec_generation.policies import DCutPolicy
from hybridspec_generation.tables import SelectionTables

from ..calibration.acceptance import predict_acceptance
from ..calibration.calibrate import Names, capture_missing, fit_tables, model_eos
from ..calibration.capture import CaptureRounds, merge_rounds
from ..calibration.store import CAPTURE_NAME, CaptureStore, capture_header
from ..calibration.tables import rho_of
from ..engine import get_engine
from ..pair import Pair
from .analysis import (
    ORACLE,
    Analysis,
    Modelled,
    Tables,
    analyse,
    checked_tables,
    modelled,
    oracle_lengths,
    outcomes,
    round_seconds,
    to_dict,
)
from .choices import Lengths, choose_lengths, lengths_of
from .example_cost import example_cost
from .pair_prompts import BenchPrompt

HYBRIDSPEC, NOMINAL = "hybridspec", "nominal"
OTHER_DCUT = "dcut, anchor_tokens=0"
RESAMPLINGS, SEED = 2000, 0


class Halves(NamedTuple):
    """Rounds of each prompt of the two halves."""

    calibration: list[CaptureRounds]
    held_out: list[CaptureRounds]


class Ratio(NamedTuple):
    """HybridSpec's throughput over a policy's, and 95 % of its resamplings of the prompts."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """A policy on the held-out rounds, and HybridSpec over it."""

    found: Modelled
    over: Ratio


class Behind(NamedTuple):
    """The tokens behind w0 that add `new_experts` Layer-0 experts.

    Attributes:
        rounds: how many. extended: for how many of them the correction verified the token.
        expected, came: the mean probability by the table that it is accepted, and the share that was.
    """

    new_experts: int
    rounds: int
    extended: int
    expected: float
    came: float


class Correction(NamedTuple):
    """What the routing correction did.

    Attributes:
        extended: rounds that it extended by the token behind w0.
        expected, came: accepted tokens that it counted on in each of these, and those that came: means.
        extra_us: modelled time that the token took in each of these, in microseconds: mean.
        worth: accepted tokens that this time is worth at rho.
        behind: by new Layer-0 experts, over all rounds that a token is left in behind w0.
    """

    extended: int
    expected: float
    came: float
    extra_us: float
    worth: float
    behind: list[Behind]


@dataclass(frozen=True)
class HeldOut:
    """Policies on rounds that no table was fitted to.

    Attributes:
        rows: adaptive policies, D-Cut's other reading, the best fixed length, "full" and the oracle, fastest first.
        over_static: HybridSpec over each fixed length.
        analysis: with every fixed length, calibration errors and the routing correlation.
    """

    rows: list[Row]
    over_static: dict[int, float]
    correction: Correction
    analysis: Analysis

    def row(self, policy: str) -> Row:
        """A policy's row."""
        return next(row for row in self.rows if row.found.policy == policy)


def split_prompts(prompts: Sequence[BenchPrompt]) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids `[1, T]` of every second prompt of a category, for calibration, and of the others.

    Raises:
        ValueError: if a category has one prompt only.
    """
    categories: dict[str, list[Tensor]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt.input_ids)
    if lonely := [name for name, mine in categories.items() if len(mine) < 2]:
        raise ValueError(f"One prompt of a category ({', '.join(lonely)}) leaves none to hold out. Take two or more.")
    calibration, held_out = ([ids for mine in categories.values() for ids in mine[half::2]] for half in (0, 1))
    return calibration, held_out


def capture_halves(pair: Pair, prompts: Sequence[BenchPrompt], folder: Path, *, max_new_tokens: int) -> Halves:
    """Decode both halves of the prompts with the whole block verified; what `folder` holds already is kept.

    Raises:
        ValueError: if a category has one prompt only, if no whole block fits into `max_new_tokens`, or if the folder
            holds other rounds.
    """
    model, drafter = pair.model, pair.drafter
    assert drafter is not None
    block = int(drafter.config.block_size or 0)
    if max_new_tokens <= block:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no round a whole block of {block} tokens. Allow more."
        )
    eos, found = model_eos(model), []
    for name, mine in zip(Halves._fields, split_prompts(prompts), strict=True):
        target, draft = (Path(module.config.name_or_path).name for module in (model, drafter))
        names = Names(target, draft, f"{name} half")._asdict()
        header = capture_header(model, drafter, mine, max_new_tokens=max_new_tokens, eos=eos, names=names)
        store = CaptureStore(folder / name / CAPTURE_NAME, header)
        found.append(capture_missing(model, drafter, mine, store, max_new_tokens=max_new_tokens, eos=eos))
    return Halves(*found)


def fit_config(captured: Sequence[CaptureRounds], pair: Pair) -> HybridSpecConfig:
    """All tables from the rounds of each calibration prompt, with the example's latency curve."""
    assert pair.drafter is not None
    rounds = merge_rounds(captured)
    target = get_engine(pair.model, pair.drafter).target
    acceptance, experts = fit_tables(rounds, target, f"{len(rounds.accepted)} rounds of {len(captured)} prompts")
    cost = example_cost(experts)
    rho = rho_of(predict_acceptance(rounds, acceptance).cumprod(1), cost)
    return HybridSpecConfig(acceptance=acceptance, experts=experts, cost=replace(cost, throughput=rho))


def judge(captured: Sequence[CaptureRounds], config: HybridSpecConfig) -> HeldOut:
    """Judge every policy by a config's tables.

    Args:
        captured: the rounds of each prompt; no table was fitted to them.

    Raises:
        ValueError: see `analyse`.
    """
    # of a prompt without a whole block nothing can be said
    captured = [part for part in captured if len(part.accepted)]
    analysis, tables = analyse(captured, config, refit=False), checked_tables(captured, config)
    rounds = merge_rounds(captured)
    seconds = round_seconds(rounds, tables)
    best = oracle_lengths(rounds, seconds)
    names = (*ADAPTIVE_POLICIES, "full", analysis.best_static().policy)
    chosen = {name: choose_lengths(tables.config(name), rounds) for name in names}
    chosen |= {OTHER_DCUT: lengths_of(other_dcut(tables), rounds), ORACLE: Lengths(best, best)}
    sizes = [len(part.accepted) for part in captured]
    # of each prompt and policy: tokens and seconds
    totals = {
        name: torch.stack([column_sums(column, sizes) for column in outcomes(rounds, lengths, seconds, tables.cost)])
        for name, lengths in chosen.items()
    }
    oracle = analysis.policy(ORACLE).tokens_per_second
    rows = [
        Row(modelled(name, rounds, lengths, seconds, tables.cost, oracle), ratio(totals[HYBRIDSPEC], totals[name]))
        for name, lengths in chosen.items()
    ]
    mine = analysis.policy(HYBRIDSPEC).tokens_per_second
    return HeldOut(
        rows=sorted(rows, key=lambda row: -row.found.tokens_per_second),
        over_static={
            w: mine / analysis.policy(f"static:{w}").tokens_per_second for w in range(2, tables.cost.block + 1)
        },
        correction=judge_correction(rounds, chosen[NOMINAL].verify, chosen[HYBRIDSPEC].verify, seconds, tables),
        analysis=analysis,
    )


def other_dcut(tables: Tables) -> DCutPolicy:
    """D-Cut by the other reading of its printed sum."""
    built = SelectionTables.build(
        tables.acceptance, tables.cost, tables.experts, tables.throughput, torch.device("cpu")
    )
    return DCutPolicy(built, anchor_tokens=0)


def column_sums(values: Tensor, sizes: list[int]) -> Tensor:
    """`[P]`: sums of `[N]` values over each of P prompts."""
    return torch.stack([part.sum() for part in values.split(sizes)])


def ratio(mine: Tensor, other: Tensor) -> Ratio:
    """One throughput over another, with its interval.

    Args:
        mine, other: `[2, P]`, tokens and seconds of each prompt.
    """
    prompts = mine.shape[1]
    draws = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLINGS)
    counts = torch.cat([torch.ones(1, prompts, dtype=torch.float64), torch.from_numpy(draws).double()])
    rates = [(tokens / spent) for tokens, spent in ((counts @ total.T).unbind(1) for total in (mine, other))]
    value, *resampled = (rates[0] / rates[1]).tolist()
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Ratio(value, float(low), float(high))


def judge_correction(
    rounds: CaptureRounds, nominal: Tensor, corrected: Tensor, seconds: Tensor, tables: Tables
) -> Correction:
    """What the correction expected of the rounds that it extended, and what they gave.

    Args:
        nominal, corrected: `[N]`, int64, w0 and w. seconds: `[N, W-1]`, what `round_seconds` returned.
    """
    there = nominal < tables.cost.block
    kept = CaptureRounds(*(column[there] for column in rounds))
    w0, extended, seconds = nominal[there], (corrected > nominal)[there], seconds[there]
    prefix = predict_acceptance(kept, tables.acceptance).cumprod(1)
    # draft token w0 is the target input's token with the index w0
    expected = prefix.gather(1, (w0 - 1)[:, None])[:, 0]
    came = (kept.accepted >= w0).double()
    new = kept.new_layer0.gather(1, w0[:, None])[:, 0]
    extra = (seconds.gather(1, (w0 - 1)[:, None]) - seconds.gather(1, (w0 - 2)[:, None]))[:, 0]
    extra_us = mean_of(1e6 * extra, extended)
    return Correction(
        extended=int(extended.sum()),
        expected=mean_of(expected, extended),
        came=mean_of(came, extended),
        extra_us=extra_us,
        worth=1e-6 * extra_us * tables.throughput,
        behind=[
            Behind(n, int(those.sum()), int(extended[those].sum()), mean_of(expected, those), mean_of(came, those))
            for n in range(tables.experts.top_k + 1) if (those := new == n).any()
        ],
    )  # fmt: skip


def mean_of(values: Tensor, chosen: Tensor) -> float:
    """The mean of some values; 0 of none."""
    return float(values[chosen].mean()) if chosen.any() else 0.0


def report(result: HeldOut) -> dict[str, Any]:
    """JSON types."""
    return {
        "rows": [vars(row.found) | {"hybridspec_over_it": row.over._asdict()} for row in result.rows],
        "over_static": {str(w): value for w, value in result.over_static.items()},
        "correction": result.correction._asdict() | {"behind": [b._asdict() for b in result.correction.behind]},
        "analysis": to_dict(result.analysis),
    }
