"""Captured rounds + tables -> what each policy would have emitted per modelled second, beside an oracle's.

The modelled time of a round is the cost table's for its length, what Stage 0 did for tokens that were then left out
(s each), and eta for every (layer, expert) pair that the round's own routing has more or less than the average. The
same rule judges every policy.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import AcceptanceTable, CostTable, ExpertTable, HybridSpecConfig
from hybridspec_generation.config import ADAPTIVE_POLICIES
from hybridspec_generation.throughput import solve_throughput

from ..calibration.acceptance import fit_acceptance_table, leave_out, predict_acceptance, reached_positions
from ..calibration.capture import CaptureRounds, merge_rounds
from ..calibration.experts import fit_expert_table, routing_correlation
from ..calibration.tables import pooled_throughput
from .captured import check_sizes
from .choices import Lengths, choose_lengths
from .reliability import Reliability, reliability

ORACLE = "oracle"


@dataclass(frozen=True)
class Modelled:
    """A policy on the rounds.

    Attributes:
        tokens_per_second: emitted tokens over modelled seconds, pooled.
        acceptance_length, mean_verify_length, round_ms: means of a round.
        of_oracle: share of the oracle's throughput; 1 minus it is the regret.
        lengths: rounds by verification length.
    """

    policy: str
    tokens_per_second: float
    acceptance_length: float
    mean_verify_length: float
    round_ms: float
    of_oracle: float
    lengths: dict[int, int]


@dataclass(frozen=True)
class Analysis:
    """What a capture says.

    Attributes:
        rounds, prompts: how many. unseen: whether tables were fitted without the prompts that they are judged on.
        policies: adaptive policies, "full", every "static:N", and the oracle.
        reliability: of the drafter's confidence and of the fitted table.
        routing_correlation: of new Layer-0 with new later experts, position means removed; None without routers.
        distinct_pairs: mean distinct (layer, expert) pairs of the first w tokens, w = 1..W.
        round_ms: the cost table's milliseconds of a round of w tokens, w = 2..W.
        cost: the cost table. throughput: rho that the policies used, of each fold; a single one without a refit.
    """

    rounds: int
    prompts: int
    unseen: bool
    policies: list[Modelled]
    reliability: dict[str, Reliability]
    routing_correlation: float | None
    distinct_pairs: list[float]
    round_ms: list[float]
    cost: CostTable
    throughput: list[float]

    def policy(self, name: str) -> Modelled:
        """A policy's figures."""
        return next(found for found in self.policies if found.policy == name)

    def best_static(self) -> Modelled:
        """The fixed length with the highest throughput, chosen on these very rounds."""
        fixed = [found for found in self.policies if found.policy.startswith("static:")]
        return max(fixed, key=lambda found: found.tokens_per_second)

    def cost_line(self) -> str:
        """Which cost table was used: context, rho and source."""
        behind = f"behind {self.cost.context} tokens" if self.cost.context else "of unknown context"
        rho = " to ".join(dict.fromkeys(f"{value:.4g}" for value in (min(self.throughput), max(self.throughput))))
        return f"Cost table {behind}, rho {rho} tokens/s, from: {self.cost.source or 'unknown'}"


def analyse(
    captured: Sequence[CaptureRounds], config: HybridSpecConfig, *, refit: bool = True, context: int = 0
) -> Analysis:
    """Judge all policies on captured rounds.

    Args:
        captured: the rounds of each prompt. config: calibrated on the same pair, with all tables.
        refit: judge each fifth of the prompts by tables fitted to the others, because the config's were fitted to all
            of these prompts. False judges the config's own tables: for rounds of other prompts.
        context: tokens before a typical round; the cost table of the nearest context counts. 0: not known, the first.

    Raises:
        ValueError: if the config lacks a table, there are no rounds, or they are of another block or target.
    """
    tables = checked_tables(captured, config, context)
    folds = unseen_folds(captured, tables) if refit else []
    unseen = bool(folds) or not refit
    folds = folds or [Fold(merge_rounds(captured), tables)]
    # in the order of the folds; no figure depends on it
    rounds = merge_rounds([fold.rounds for fold in folds])
    seconds = torch.cat([round_seconds(fold.rounds, fold.tables) for fold in folds])
    best = oracle_lengths(rounds, seconds)
    oracle = modelled(ORACLE, rounds, Lengths(best, best), seconds, tables.cost)
    found = []
    for name in tqdm(policy_names(rounds.new_layer0.shape[1]), desc="analysis", unit="policy"):
        chosen = [choose_lengths(fold.tables.config(name), fold.rounds) for fold in folds]
        lengths = Lengths(*(torch.cat(column) for column in zip(*chosen, strict=True)))
        found.append(modelled(name, rounds, lengths, seconds, tables.cost, oracle.tokens_per_second))
    reached, labels = reached_positions(rounds)
    fitted = torch.cat([predict_acceptance(fold.rounds, fold.tables.acceptance) for fold in folds])
    scores = {"confidence": rounds.confidence.double(), "table": fitted}
    correlation = routing_correlation(rounds) if tables.experts.top_k else math.nan
    return Analysis(
        rounds=len(rounds.accepted),
        prompts=len(captured),
        unseen=unseen,
        policies=[*found, oracle],
        reliability={name: reliability(s, labels, reached) for name, s in scores.items()},
        routing_correlation=correlation if math.isfinite(correlation) else None,
        distinct_pairs=distinct_pairs(rounds).mean(0).tolist(),
        round_ms=[1e3 * (tables.cost.fixed_cost + seconds) for seconds in tables.cost.target_cost[2:]],
        cost=tables.cost,
        throughput=[fold.tables.throughput for fold in folds],
    )


class Tables(NamedTuple):
    """All that an adaptive policy reads, with one cost table."""

    acceptance: AcceptanceTable
    experts: ExpertTable
    cost: CostTable
    throughput: float

    @classmethod
    def of(cls, config: HybridSpecConfig, context: int = 0) -> "Tables":
        """The tables of a config; of several cost tables that of the context nearest to `context` tokens.

        Raises:
            ValueError: if one is missing.
        """
        if config.acceptance is None or config.experts is None or not config.costs:
            raise ValueError("The analysis needs a config with all tables, as `hybridspec calibrate` writes it.")
        cost = min(config.costs, key=lambda cost: abs(cost.context - context))
        rho = config.throughput or cost.throughput or pooled_throughput(config.acceptance, cost)
        return cls(config.acceptance, config.experts, cost, rho)

    def config(self, policy: str) -> HybridSpecConfig:
        """A config of one policy."""
        return HybridSpecConfig(policy=policy, **self._asdict())


class Fold(NamedTuple):
    """Rounds, and the tables that they are judged by."""

    rounds: CaptureRounds
    tables: Tables


def checked_tables(captured: Sequence[CaptureRounds], config: HybridSpecConfig, context: int = 0) -> Tables:
    """The tables of a config that rounds can be judged by.

    Raises:
        ValueError: if one is missing, there are no rounds, or they are of another block or target.
    """
    tables = Tables.of(config, context)
    blocks = {name: getattr(tables, name).block for name in ("acceptance", "experts", "cost")}
    check_sizes(captured, blocks, tables.experts)
    return tables


def policy_names(block: int) -> list[str]:
    """What is judged, for a block of W tokens."""
    return [*ADAPTIVE_POLICIES, "full", *(f"static:{w}" for w in range(2, block + 1))]


def unseen_folds(captured: Sequence[CaptureRounds], tables: Tables) -> list[Fold]:
    """Each fold's rounds with tables and rho that were fitted to the other prompts; none if those are too few."""
    folds, cost, experts = [], tables.cost, tables.experts
    if len(captured) < 2:
        return []
    for fold, others in leave_out(captured):
        mine = merge_rounds([captured[i] for i in fold])
        if not len(mine.accepted):
            continue
        try:
            acceptance = fit_acceptance_table(others, "")
        except (ValueError, RuntimeError):
            return []
        if experts.top_k:
            sizes = {"top_k": experts.top_k, "num_moe_layers": experts.num_moe_layers}
            experts = fit_expert_table(others, source="", **sizes)
        prefix = predict_acceptance(others, acceptance).cumprod(1)
        rho = solve_throughput(prefix, torch.tensor(cost.target_cost, dtype=torch.float64), cost.fixed_cost)
        folds.append(Fold(mine, Tables(acceptance, experts, cost, rho)))
    return folds


def distinct_pairs(rounds: CaptureRounds) -> Tensor:
    """Distinct (layer, expert) pairs of the first w = 1..W tokens of N rounds, `[N, W]`, fp64."""
    return (rounds.new_layer0 + rounds.new_later).double().cumsum(1)


def round_seconds(rounds: CaptureRounds, tables: Tables) -> Tensor:
    """Modelled seconds of N rounds at w = 2..W, `[N, W-1]`, fp64, of which Stage 0 wasted nothing."""
    cost = tables.cost
    average = torch.tensor(tables.experts.mean_new_pairs[:-1], dtype=torch.float64).cumsum(0)
    curve = cost.fixed_cost + torch.tensor(cost.target_cost, dtype=torch.float64)[2:]
    return curve + cost.expert_cost * (distinct_pairs(rounds) - average)[:, 1:]


def outcomes(rounds: CaptureRounds, lengths: Lengths, seconds: Tensor, cost: CostTable) -> tuple[Tensor, Tensor]:
    """Tokens that each of N rounds emits at these lengths, and its modelled seconds: `[N]` each, fp64.

    Args:
        seconds: `[N, W-1]`, what `round_seconds` returned.
    """
    w = lengths.verify
    emitted = 1 + torch.minimum(rounds.accepted, w - 1).double()
    return emitted, seconds.gather(1, (w - 2)[:, None])[:, 0] + cost.stage0_token_cost * (lengths.stage0 - w)


def modelled(
    name: str, rounds: CaptureRounds, lengths: Lengths, seconds: Tensor, cost: CostTable, oracle: float | None = None
) -> Modelled:
    """The figures of one policy.

    Args:
        lengths: that it chose. seconds: `[N, W-1]`, what `round_seconds` returned.
        oracle: the oracle's tokens per second; None if this is the oracle.
    """
    w = lengths.verify
    emitted, spent = outcomes(rounds, lengths, seconds, cost)
    rate = float(emitted.sum() / spent.sum())
    return Modelled(
        policy=name,
        tokens_per_second=rate,
        acceptance_length=float(emitted.mean()),
        mean_verify_length=float(w.double().mean()),
        round_ms=1e3 * float(spent.mean()),
        of_oracle=1.0 if oracle is None else rate / oracle,
        lengths=dict(sorted(Counter(w.tolist()).items())),
    )


def oracle_lengths(rounds: CaptureRounds, seconds: Tensor) -> Tensor:
    """`[N]`, int64: the lengths with the best pooled throughput, if A and the routing were known (Dinkelbach)."""
    longest = torch.arange(1, seconds.shape[1] + 1)
    gain = 1 + torch.minimum(rounds.accepted[:, None], longest).double()
    rate, choice = -1.0, gain.argmax(1)
    while True:
        tokens, spent = (values.gather(1, choice[:, None]).sum() for values in (gain, seconds))
        if (better := float(tokens / spent)) <= rate:
            return choice + 2
        rate = better
        choice = (gain - rate * seconds).argmax(1)


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """JSON types."""
    return {
        **vars(analysis),
        "policies": [vars(found) for found in analysis.policies],
        "reliability": {name: found._asdict() for name, found in analysis.reliability.items()},
        "best_static": analysis.best_static().policy,
        "cost": analysis.cost.to_dict(),
    }
