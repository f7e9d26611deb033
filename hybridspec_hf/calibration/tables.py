"""HybridSpecConfig -> the device tables of an adaptive policy: given, shipped, or measured at first use."""

import json
import warnings
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_generation import AcceptanceTable, DecodeReport, ExpertTable, HybridSpecConfig
from hybridspec_generation.config import CostTable, SelectionTables
from hybridspec_generation.round import Round
from hybridspec_generation.throughput import solve_throughput

from ..engine import Engine
from ..models import SplitTarget
from .latency import device_name, measure_cost

DEFAULTS = "default_tables.json"


class TableSet(NamedTuple):
    """The tables of one request before anything ran: `cost` is None until it is measured.

    Attributes:
        throughput: rho, or None to solve it once the cost is known.
        notes: which of them are shipped defaults or belong to another machine.
    """

    acceptance: AcceptanceTable
    experts: ExpertTable
    cost: CostTable | None
    throughput: float | None
    notes: list[str]


def choose_tables(config: HybridSpecConfig, target: SplitTarget, block: int) -> TableSet:
    """Given and shipped tables for this pair, all checks made.

    Args:
        config: an adaptive policy. target: the pair's target. block: W, the drafter's block size.

    Raises:
        ValueError: if a given table belongs to another target or block size.
    """
    _check_blocks(config, block)
    acceptance = config.acceptance or fit_acceptance(default_tables()[0], block)
    experts = config.experts or fit_experts(default_tables()[1], block, target.top_k, target.num_moe_layers)
    if (experts.top_k, experts.num_moe_layers) != (target.top_k, target.num_moe_layers):
        raise ValueError(
            f"The experts table was counted on a target with top_k={experts.top_k} and {experts.num_moe_layers} MoE "
            f"layers, this one has top_k={target.top_k} and {target.num_moe_layers}. Calibrate on this target, or "
            "leave experts out to use the shipped default."
        )
    notes = []
    cost, throughput = config.cost, config.throughput
    if cost is not None and cost.device and cost.device != (here := device_name(target.cache_shape.device)):
        notes.append(
            f"the cost table was measured on {cost.device}, this is {here}: it is measured again here, and rho solved "
            "with it; the other tables are kept"
        )
        _warn_once(notes[0])
        cost = throughput = None
    if throughput is None and not acceptance.reference_rounds:
        raise ValueError(
            "The acceptance table has no reference_rounds, so rho cannot be solved. "
            "Set HybridSpecConfig(throughput=tokens_per_second), or calibrate again."
        )
    if config.acceptance is None:
        notes.append(f"acceptance: shipped default ({acceptance.source})")
    if config.experts is None:
        notes.append(f"experts: shipped default ({experts.source})")
    return TableSet(acceptance, experts, cost, throughput, notes)


@lru_cache
def _warn_once(text: str) -> None:
    warnings.warn(f"HybridSpec: {text}.", stacklevel=3)


def _check_blocks(config: HybridSpecConfig, block: int) -> None:
    for name in ("acceptance", "experts", "cost"):
        table = getattr(config, name)
        if table is not None and table.block != block:
            raise ValueError(
                f"The {name} table of hybridspec_config is for a block of {table.block} tokens (anchor included), the "
                f"drafter's has {block}. Calibrate with this drafter, or leave {name} out."
            )


def selection_tables(
    tables: TableSet, engine: Engine, r: Round, text: Tensor, report: DecodeReport, graphs: bool = False
) -> SelectionTables:
    """The tables on the device; the cost is measured by the pair's first request and kept with its engine.

    Args:
        r: a prefilled round, and text `[T]`, int64, of its prompt, to measure on.
        graphs: whether rounds will run as graphs.
    """
    report.notes.extend(tables.notes)
    cost = tables.cost
    if cost is None:
        key = f"{report.gdn}, {'graphs' if graphs else report.launches}"
        cost = engine.costs.get(key) or measure_cost(r, text, graphs=graphs)
        engine.costs[key] = cost
        report.notes.append(f"cost: {cost.source}")
    throughput = tables.throughput or pooled_throughput(tables.acceptance, cost)
    return SelectionTables.build(tables.acceptance, cost, tables.experts, throughput, r.state.remaining.device)


def pooled_throughput(acceptance: AcceptanceTable, cost: CostTable) -> float:
    """rho over the acceptance table's reference rounds."""
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
        return ExpertTable(
            mean_new_pairs=(0.0,) * (block + 1), mean_new_pairs_given=((0.0,),) * (block + 1),
            num_moe_layers=num_moe_layers, top_k=0, source="no router in Layer 0",
        )  # fmt: skip
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
