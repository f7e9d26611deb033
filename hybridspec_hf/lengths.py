"""A config and a pair -> who chooses a round's length: a fixed length, or a policy with this pair's tables."""

from typing import Any

import torch
from torch import Tensor

from hybridspec_generation import DecodeReport, HybridSpecConfig
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

from .buffers import Buffers
from .calibration.tables import TableSet, choose_tables, selection_tables
from .drafters.dflash import DFlashDrafter
from .engine import Engine

ADAPTIVE: dict[str, Any] = {
    "hybridspec": HybridSpecPolicy,
    "nominal": NominalPolicy,
    "dcut": DCutPolicy,
    "evict": EvictPolicy,
    "dspark": DSparkPolicy,
}

READ_RHO = ("hybridspec", "nominal")


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
    input_ids: Tensor, config: HybridSpecConfig, report: DecodeReport, graphs: bool,
) -> LengthPolicy:  # fmt: skip
    """The policy object of a plan; a cost table that is not given is measured here, on the prompt `[1, T]`."""
    if config.online_throughput and report.policy not in (*READ_RHO, "ar"):
        report.notes.append(f"online_throughput has no effect on {report.policy!r}, which reads no rho")
    if isinstance(plan, int):
        return FixedLength(plan)
    assert drafter is not None
    # the prompt and the first token: real text to time the target on
    text = torch.cat([input_ids[0].to(round_.state.anchor), round_.state.anchor])
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
