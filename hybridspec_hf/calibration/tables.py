"""HybridSpecConfig -> the device tables of an adaptive policy: given, shipped, or measured at first use."""

import json
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from hybridspec_generation import AcceptanceTable, DecodeReport, ExpertTable, HybridSpecConfig
from hybridspec_generation.config import CostTable, SelectionTables
from hybridspec_generation.round import Round
from hybridspec_generation.throughput import solve_throughput

from .latency import measure_cost

DEFAULTS = "default_tables.json"


def selection_tables(
    config: HybridSpecConfig, engine: Any, r: Round, text: torch.Tensor, report: DecodeReport
) -> SelectionTables:
    """Resolve every table of the config for this pair and note in the report what was assumed or measured.

    Args:
        config: an adaptive policy. engine: holds the pair's measured cost.
        r: a prefilled round, and text `[T]`, int64, of its prompt, to measure on.

    Raises:
        ValueError: if a given table belongs to another target or block size.
    """
    block, target = r.state.block, engine.target
    acceptance = config.acceptance or fit_acceptance(default_tables()[0], block)
    experts = config.experts or fit_experts(default_tables()[1], block, target.top_k, target.num_moe_layers)
    if (experts.top_k, experts.num_moe_layers) != (target.top_k, target.num_moe_layers):
        raise ValueError(
            f"The experts table was counted on a target with top_k={experts.top_k} and {experts.num_moe_layers} MoE "
            f"layers, this one has top_k={target.top_k} and {target.num_moe_layers}. Calibrate on this target, or "
            "leave experts out to use the shipped default."
        )
    cost = config.cost or measured_cost(engine, r, text)
    throughput = config.throughput or pooled_throughput(acceptance, cost)
    for name, given, table in (("acceptance", config.acceptance, acceptance), ("experts", config.experts, experts)):
        if given is None:
            report.notes.append(f"{name}: shipped default ({table.source})")
    if config.cost is None:
        report.notes.append(f"cost: {cost.source}")
    return SelectionTables.build(acceptance, cost, experts, throughput, r.state.remaining.device)


def measured_cost(engine: Any, r: Round, text: torch.Tensor) -> CostTable:
    """The pair's cost table, measured by its first request and kept with the engine."""
    if engine.cost is None:
        engine.cost = measure_cost(r, text)
    return engine.cost


def pooled_throughput(acceptance: AcceptanceTable, cost: CostTable) -> float:
    """rho over the acceptance table's reference rounds.

    Raises:
        ValueError: if the table has none.
    """
    if not acceptance.reference_rounds:
        raise ValueError(
            "The acceptance table has no reference_rounds, so rho cannot be solved. "
            "Set HybridSpecConfig(throughput=tokens_per_second), or calibrate again."
        )
    rounds = torch.tensor(acceptance.reference_rounds, dtype=torch.float64)
    return solve_throughput(rounds, torch.tensor(cost.target_cost, dtype=torch.float64), cost.fixed_cost)


@lru_cache(maxsize=1)
def default_tables() -> tuple[AcceptanceTable, ExpertTable]:
    """The shipped tables, fitted on the tiny pair's calibration prompts."""
    text = resources.files("hybridspec_hf.assets").joinpath(DEFAULTS).read_text(encoding="utf-8")
    tables = json.loads(text)
    return AcceptanceTable.from_dict(tables["acceptance"]), ExpertTable.from_dict(tables["experts"])


def fit_acceptance(table: AcceptanceTable, block: int) -> AcceptanceTable:
    """The shipped table for another block: shorter ones drop positions, longer ones repeat the last."""
    draft = block - 1
    reference = tuple(_resize(row, draft) for row in table.reference_rounds)
    if draft == table.num_draft_tokens:
        return table
    return replace(
        table,
        confidence_knots=_resize(table.confidence_knots, draft),
        acceptance_knots=_resize(table.acceptance_knots, draft),
        reference_rounds=reference,
    )


def fit_experts(table: ExpertTable, block: int, top_k: int, num_moe_layers: int) -> ExpertTable:
    """The shipped table for another target: counts scale with its MoE layers and experts per token.

    A rough default: the share of a token's experts that are new is taken from the tiny pair.
    """
    if not top_k:
        zeros = (0.0,) * (block + 1)
        return ExpertTable(mean_new_pairs=zeros, mean_new_pairs_given=((0.0,),) * (block + 1), num_moe_layers=0,
                           top_k=0, source="dense target")  # fmt: skip
    scale = (num_moe_layers * top_k) / (table.num_moe_layers * table.top_k)
    mean = [scale * value for value in _resize(table.mean_new_pairs, block + 1)]
    # row w0: nbar_all at n = 0..topk of the tiny pair, read at the same share of the token's experts
    shares = torch.linspace(0, table.top_k, top_k + 1, dtype=torch.float64)
    given = []
    for row in _resize(table.mean_new_pairs_given, block + 1):
        low = shares.floor().long().clamp_max(table.top_k - 1)
        values = torch.tensor(row, dtype=torch.float64)
        between = values[low] + (shares - low) * (values[low + 1] - values[low])
        given.append(tuple((scale * between).tolist()))
    return ExpertTable(
        mean_new_pairs=tuple(mean), mean_new_pairs_given=tuple(given), num_moe_layers=num_moe_layers, top_k=top_k,
        source=table.source,
    )  # fmt: skip


def _resize(rows: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    return rows[:size] + (rows[-1],) * (size - len(rows))
