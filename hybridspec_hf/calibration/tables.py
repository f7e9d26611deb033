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
from hybridspec_generation.round import Round
from hybridspec_generation.tables import CalibratedFor, CostTable, SelectionTables, cost_at
from hybridspec_generation.throughput import solve_throughput

from ..drafters.dflash import DFlashDrafter
from ..engine import Engine
from ..identity import PairIdentity
from ..models import SplitTarget
from .cost_files import cost_facts, read_cost, write_cost
from .latency import device_name, measure_cost

DEFAULTS = "default_tables.json"


class TableSet(NamedTuple):
    """The tables of one request before anything ran: without `costs`, a curve is measured.

    Attributes:
        throughput: rho, or None to take the cost curve's or solve it.
        notes: which of them are shipped defaults, or belong to another pair or machine.
    """

    acceptance: AcceptanceTable
    experts: ExpertTable
    costs: tuple[CostTable, ...]
    throughput: float | None
    notes: list[str]

    def measured_again(self, why: str) -> "TableSet":
        """Without the costs, and without the rho that goes with them if another can be solved; warns once of it."""
        note = f"{why}: it is measured again here, and rho solved with it; the other tables are kept"
        _warn_once(note)
        throughput = self.throughput or max(cost.throughput for cost in self.costs) or None
        return self._replace(
            costs=(),
            throughput=None if self.acceptance.reference_rounds else throughput,
            notes=[note, *self.notes],
        )


def choose_tables(
    config: HybridSpecConfig, target: SplitTarget, block: int, pair: PairIdentity | None = None
) -> TableSet:
    """Given and shipped tables for this pair, all checks made.

    Args:
        config: an adaptive policy. target: the pair's target. block: W, the drafter's block size.
        pair: the pair's identity, to compare with what the config was calibrated for.

    Raises:
        ValueError: if a given table has another block size; or is another target's, unless the config says whose.
    """
    check_blocks(config, block)
    acceptance = config.acceptance or fit_acceptance(default_tables()[0], block)
    notes = []
    if config.acceptance is None:
        notes.append(f"acceptance: shipped default ({acceptance.source})")
    stranger = another_pair(config.calibrated_for, pair)
    here = (
        ""
        if pair is None
        else f"this is another pair, or another dtype of it (target {pair.target}, drafter {pair.drafter})"
    )
    experts = config.experts
    if experts is None or (stranger and not fits_target(experts, target)):
        # a target without routers has counted nothing that could be scaled
        counted = experts if experts and experts.top_k else default_tables()[1]
        if counted is not experts and target.top_k:
            notes.append(f"experts: shipped default ({counted.source})")
        experts = fit_experts(counted, block, target.top_k, target.num_moe_layers)
    if not fits_target(experts, target):
        raise ValueError(
            f"The experts table was counted on a target with top_k={experts.top_k} and {experts.num_moe_layers} MoE "
            f"layers, this one has top_k={target.top_k} and {target.num_moe_layers}. Calibrate on this target, or "
            "leave experts out to use the shipped default."
        )
    tables = TableSet(acceptance, experts, config.costs, config.throughput, notes)
    device = tables.costs[0].device if tables.costs else ""
    if tables.costs and stranger:
        tables = tables.measured_again(f"the cost table was measured with {stranger}, {here}")
    elif device and device != (gpu := device_name(target.cache_shape.device)):
        tables = tables.measured_again(f"the cost table was measured on {device}, this is {gpu}")
    elif stranger:
        _warn_once(note := f"the tables were calibrated for {stranger}, {here}: they are kept")
        notes.insert(0, note)
    known = tables.throughput or (tables.costs and all(cost.throughput for cost in tables.costs))
    if not known and not acceptance.reference_rounds:
        raise ValueError(
            "The acceptance table has no reference_rounds, so rho cannot be solved. "
            "Set HybridSpecConfig(throughput=tokens_per_second), or calibrate again."
        )
    return tables


def another_pair(made_for: CalibratedFor | None, pair: PairIdentity | None) -> str | None:
    """The pair that tables were made for, in words, if it is not this one."""
    if made_for is None or pair is None or (made_for.target_weights, made_for.drafter_weights) == pair:
        return None
    target, drafter = (made_for.target, made_for.target_weights), (made_for.drafter, made_for.drafter_weights)
    return "target {} ({}), drafter {} ({})".format(*target, *drafter)


def fits_target(experts: ExpertTable, target: SplitTarget) -> bool:
    """Whether experts were counted on a target of this size."""
    return (experts.top_k, experts.num_moe_layers) == (target.top_k, target.num_moe_layers)


@lru_cache
def _warn_once(text: str) -> None:
    warnings.warn(f"HybridSpec: {text}.", stacklevel=3)


def check_blocks(config: HybridSpecConfig, block: int) -> None:
    """Refuse tables of another block than the drafter's W tokens.

    Raises:
        ValueError: naming the table.
    """
    first = {"acceptance": config.acceptance, "experts": config.experts, "cost": next(iter(config.costs), None)}
    for name, table in first.items():
        if table is not None and table.block != block:
            raise ValueError(
                f"The {name} table of hybridspec_config is for a block of {table.block} tokens (anchor included), the "
                f"drafter's has {block}. Calibrate with this drafter, or leave {name} out."
            )


def selection_tables(
    tables: TableSet, engine: Engine, drafter: DFlashDrafter, r: Round, text: Tensor, report: DecodeReport,
    graphs: bool = False,
) -> SelectionTables:  # fmt: skip
    """The tables on the device, with the costs behind this request's middle; a curve that is missing is measured.

    The context grows by at most the output budget, so a round's own cost differs little from the middle's, and the
    kernels read one curve.

    Args:
        r: a prefilled round, and text `[T]`, int64, of its prompt, to measure on.
        graphs: whether rounds will run as graphs.
    """
    runtime = describe_runtime(report, graphs)
    report.cost = "given"
    if tables.costs and tables.costs[0].runtime not in ("", runtime):
        was = tables.costs[0].runtime
        tables = tables.measured_again(f"the cost table was measured with {was}, rounds run here with {runtime}")
    report.notes.extend(tables.notes)
    costs = tables.costs or (first_cost(engine, drafter, r, text, runtime, report, graphs),)
    cost = cost_at(costs, report.prompt_tokens + int(r.state.remaining) // 2)
    throughput = tables.throughput or cost.throughput or pooled_throughput(tables.acceptance, cost)
    return SelectionTables.build(tables.acceptance, cost, tables.experts, throughput, r.state.remaining.device)


def first_cost(
    engine: Engine, drafter: DFlashDrafter, r: Round, text: Tensor, runtime: str, report: DecodeReport, graphs: bool
) -> CostTable:
    """The pair's own curve: of an earlier request, of the cache folder, or measured now."""
    # drops the costs of weights that have been written since
    engine.identity(drafter)
    cost, report.cost = engine.costs.get(runtime), "kept from an earlier request"
    if cost is None:
        facts = cost_facts(engine, drafter, runtime)
        cost, report.cost = read_cost(facts), "from the cache folder"
        if cost is None:
            cost, report.cost = measure_cost(r, text, graphs=graphs, runtime=runtime), "measured now"
            if trouble := write_cost(facts, cost):
                report.notes.append(f"cost: {trouble}")
        engine.costs[runtime] = cost
    report.notes.append(f"cost: {report.cost}, {cost.source}")
    return cost


def describe_runtime(report: DecodeReport, graphs: bool) -> str:
    """What runs the rounds, as far as it decides their time."""
    return f"{report.gdn}, {'graphs' if graphs else report.launches}"


def pooled_throughput(acceptance: AcceptanceTable, cost: CostTable) -> float:
    """rho over the acceptance table's reference rounds."""
    return rho_of(torch.tensor(acceptance.reference_rounds, dtype=torch.float64), cost)


def rho_of(prefix: Tensor, cost: CostTable) -> float:
    """rho of rounds with prefix probabilities `[N, D]` at these costs."""
    return solve_throughput(prefix, torch.tensor(cost.target_cost, dtype=torch.float64), cost.fixed_cost)


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
