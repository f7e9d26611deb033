"""HybridSpecConfig: the length policy and its calibrated tables, JSON in and out, all checks."""

import json
import math
import re
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .gdn import GDN_BACKENDS

CONFIG_NAME = "hybridspec_config.json"
POLICIES = '"hybridspec", "nominal", "dcut", "evict", "dspark", "full" or "static:N" (N >= 2, e.g. "static:4")'
ADAPTIVE_POLICIES = ("hybridspec", "nominal", "dcut", "evict", "dspark")
# a launch cannot be stopped from the CPU
MOST_ROUNDS = 256
GRAPHS = ("auto", "parent", "per-length", "off")

Row = tuple[float, ...]
Table = TypeVar("Table", bound="_Table")


class _Table:
    """A frozen dataclass of finite numbers and text that travels as JSON: lists become tuples, nothing else passes."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value, is_text = getattr(self, f.name), f.type is str
            if not (isinstance(value, str) if is_text else _finite(value)):
                kind = "be text" if is_text else "hold finite numbers only"
                raise ValueError(f"{type(self).__name__}.{f.name} must {kind}. Calibrate again.")

    @classmethod
    def from_dict(cls: type[Table], values: dict[str, Any]) -> Table:
        """The table from JSON types; unknown and missing keys raise ValueError."""
        known = {f.name: f.default is MISSING for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - set(known))
        missing = sorted(name for name, needed in known.items() if needed and name not in values)
        if unknown or missing:
            raise ValueError(
                f"{cls.__name__} got unknown keys {unknown} and misses {missing}; it knows {sorted(known)}. "
                "The file may come from another version of hybridspec_hf: update, or calibrate again."
            )
        return cls(**{name: _tuples(value) for name, value in values.items()})


def _finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_finite(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class AcceptanceTable(_Table):
    """Drafter signals -> acceptance (Appendix A.2), and the rounds it was fitted on.

    Attributes:
        confidence_knots, acceptance_knots: D rows of N ascending confidences and their calibrated values.
        weights: 6 logistic weights (intercept, confidence, position, interaction, log(1+h), entropy change).
        reference_rounds: prefix probabilities (D each) of calibration rounds; rho is solved over them.
        source: the pair and data it was fitted on.
    """

    confidence_knots: tuple[Row, ...]
    acceptance_knots: tuple[Row, ...]
    weights: Row
    reference_rounds: tuple[Row, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {len(row) for row in (*self.confidence_knots, *self.acceptance_knots)}
        if len(self.confidence_knots) != len(self.acceptance_knots) or len(sizes) != 1 or min(sizes) < 2:
            raise ValueError(
                f"confidence_knots and acceptance_knots need D rows of one length >= 2, got "
                f"{len(self.confidence_knots)} and {len(self.acceptance_knots)} rows with lengths {sorted(sizes)}."
            )
        if len(self.weights) != 6:
            raise ValueError(f"weights needs 6 numbers (see AcceptanceTable), got {len(self.weights)}.")
        ascending = all(a <= b for row in self.confidence_knots for a, b in zip(row, row[1:], strict=False))
        within = all(0 <= value <= 1 for row in self.acceptance_knots for value in row)
        if not ascending or not within:
            raise ValueError("confidence_knots must ascend and acceptance_knots lie in [0, 1]. Calibrate again.")
        if any(len(row) != self.num_draft_tokens for row in self.reference_rounds):
            raise ValueError(f"reference_rounds needs rows of D = {self.num_draft_tokens} values. Calibrate again.")

    @property
    def num_draft_tokens(self) -> int:
        """D, the draft tokens of a block."""
        return len(self.confidence_knots)

    @property
    def block(self) -> int:
        """W, the block size it was made for."""
        return self.num_draft_tokens + 1


@dataclass(frozen=True, kw_only=True)
class CostTable(_Table):
    """Target latency by verification length, in seconds, on one machine.

    Attributes:
        target_cost: C_tgt(w) at index w = 0..W (0 and 1 are not used by the selector), fixed cost removed.
        fixed_cost: the cost of a round that does not depend on w (drafting, selection, launches).
        stage0_token_cost: s, one more token through Layer 0's token mixer and router.
        expert_cost: eta, one more distinct expert in one MoE layer.
        source: hardware, versions and how it was measured.
        device: name of the GPU it belongs to ("cpu" without one); on another, generate measures anew. "": any.
    """

    target_cost: Row
    fixed_cost: float
    stage0_token_cost: float
    expert_cost: float
    source: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = (*self.target_cost, self.fixed_cost, self.stage0_token_cost, self.expert_cost)
        if len(self.target_cost) < 3 or min(seconds) < 0:
            raise ValueError(
                f"target_cost needs W+1 >= 3 values (index = length), fixed_cost and all other times must be >= 0; "
                f"got {len(self.target_cost)} values and a smallest time of {min(seconds)} seconds. Measure it again."
            )

    @property
    def block(self) -> int:
        """W, the block size it was measured for."""
        return len(self.target_cost) - 1


@dataclass(frozen=True, kw_only=True)
class ExpertTable(_Table):
    """Average new (layer, expert) pairs of the token at position w0 + 1, by w0 and by its new Layer-0 experts.

    Attributes:
        mean_new_pairs: nbar_all(w0) at index w0 = 0..W.
        mean_new_pairs_given: nbar_all(w0 | n), W+1 rows of topk+1.
        num_moe_layers, top_k: of the target it was counted on.
        source: the pair and data it was counted on.
    """

    mean_new_pairs: Row
    mean_new_pairs_given: tuple[Row, ...]
    num_moe_layers: int
    top_k: int
    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = {len(row) for row in self.mean_new_pairs_given}
        if len(self.mean_new_pairs_given) != len(self.mean_new_pairs) or widths != {self.top_k + 1}:
            raise ValueError(
                f"mean_new_pairs_given needs one row of top_k + 1 = {self.top_k + 1} values for each of the "
                f"{len(self.mean_new_pairs)} lengths, got {len(self.mean_new_pairs_given)} rows of {sorted(widths)}."
            )

    @property
    def block(self) -> int:
        """W, the block size it was counted for."""
        return len(self.mean_new_pairs) - 1


@dataclass(frozen=True, kw_only=True)
class HybridSpecConfig:
    """How a round chooses its verification length.

    Args:
        policy: "hybridspec" (selector and routing correction), "nominal" (selector only), "static:N" (always N
            tokens) or "full" (the whole block: vanilla DFlash); for comparison the rules "dcut" (D-Cut), "evict" (our
            reconstruction of EVICT) and "dspark" (DSpark-style).
        acceptance, experts: calibrated tables; None uses the shipped ones, fitted on the tiny pair.
        cost: the target's latency curve; None measures it at first use (a few seconds, kept for the model's life).
        throughput: rho, tokens per second; None solves it over the acceptance table's reference rounds.
        gdn_backend: how the GDN layers verify: "block" (in parallel, compact factors), or for comparison "recurrent"
            (a state stored after every token) or "replay" (a ring of recent updates). Same tokens, another speed.
        graphs: how rounds are launched on a GPU. "parent": one CUDA graph in which the GPU chooses the lengths;
            "per-length": a graph a length, chosen by the CPU; "off": operation by operation. "auto" takes the first
            that the machine can run, and the report says which.
        rounds_per_launch: with "parent", rounds that the GPU runs before the CPU looks at their tokens; streams come
            in larger pieces, and up to so many rounds are wasted where a stopping criterion ends the text.

    Raises:
        ValueError: for an unknown policy or a malformed table.
    """

    policy: str = "hybridspec"
    acceptance: AcceptanceTable | None = None
    experts: ExpertTable | None = None
    cost: CostTable | None = None
    throughput: float | None = None
    gdn_backend: str = "block"
    graphs: str = "auto"
    rounds_per_launch: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.gdn_backend, str) or self.gdn_backend not in GDN_BACKENDS:
            raise ValueError(
                f"Unknown gdn_backend {self.gdn_backend!r}. Use one of {', '.join(map(repr, GDN_BACKENDS))}."
            )
        if self.graphs not in GRAPHS:
            raise ValueError(f"Unknown graphs {self.graphs!r}. Use one of {', '.join(map(repr, GRAPHS))}.")
        if type(self.rounds_per_launch) is not int or not 1 <= self.rounds_per_launch <= MOST_ROUNDS:
            raise ValueError(
                f"rounds_per_launch must be a whole number from 1 to {MOST_ROUNDS}, got {self.rounds_per_launch!r}."
            )
        if self.policy not in (*ADAPTIVE_POLICIES, "full"):
            self._check_static()
        if self.throughput is not None and not (_finite(self.throughput) and self.throughput > 0):
            raise ValueError(f"throughput (rho) must be positive tokens per second, got {self.throughput!r}.")
        for name, kind in (("acceptance", AcceptanceTable), ("experts", ExpertTable), ("cost", CostTable)):
            value = getattr(self, name)
            if isinstance(value, dict):
                object.__setattr__(self, name, kind.from_dict(value))
            elif value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__} or its dict, got {type(value).__name__}.")

    def _check_static(self) -> None:
        if not re.fullmatch(r"static:([2-9]|[1-9][0-9]+)", str(self.policy), re.ASCII):
            raise ValueError(f"Unknown policy {self.policy!r}. Use {POLICIES}.")

    @property
    def is_adaptive(self) -> bool:
        """Whether the policy needs the calibrated tables."""
        return self.policy in ADAPTIVE_POLICIES

    def fixed_length(self, block: int) -> int:
        """The length of "full" and "static:N" in a target input of `block` tokens.

        Raises:
            ValueError: if N is longer than the block.
        """
        length = block if self.policy == "full" else int(self.policy.partition(":")[2])
        if length > block:
            raise ValueError(
                f"policy={self.policy!r} verifies {length} tokens, but the drafter's block has {block} (anchor "
                f'included). Use "static:N" with N <= {block}, or "full".'
            )
        return length

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; fields that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "HybridSpecConfig":
        """Inverse of `to_dict`.

        Raises:
            ValueError: for unknown keys or values that `HybridSpecConfig` refuses.
        """
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(
                f"hybridspec_config got unknown keys {unknown}; it knows {[f.name for f in fields(cls)]}. Remove them."
            )
        return cls(**values)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `hybridspec_config.json` into `folder` (created if missing)."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "HybridSpecConfig":
        """Read what `save_pretrained` wrote.

        Raises:
            FileNotFoundError: if the folder has no `hybridspec_config.json`.
        """
        path = Path(folder) / CONFIG_NAME
        if not path.is_file():
            raise FileNotFoundError(f"No {CONFIG_NAME} in {folder}. Save one with HybridSpecConfig.save_pretrained.")
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))


class SelectionTables(NamedTuple):
    """The tables of an adaptive policy as device tensors (fp32), for one block size D = W - 1.

    Attributes:
        confidence_knots, acceptance_knots: `[D, N]`. acceptance_weights: `[6]`.
        target_cost: `[W+1]` seconds, fixed_cost removed. fixed_cost, stage0_token_cost, expert_cost: `[1]` seconds.
        throughput: `[1]` tokens/s.
        mean_new_pairs: `[W+1]`. mean_new_pairs_given: `[W+1, topk+1]`.
    """

    confidence_knots: Tensor
    acceptance_knots: Tensor
    acceptance_weights: Tensor
    target_cost: Tensor
    fixed_cost: Tensor
    stage0_token_cost: Tensor
    expert_cost: Tensor
    throughput: Tensor
    mean_new_pairs: Tensor
    mean_new_pairs_given: Tensor

    @classmethod
    def build(
        cls,
        acceptance: AcceptanceTable,
        cost: CostTable,
        experts: ExpertTable,
        throughput: float,
        device: torch.device,
    ) -> "SelectionTables":
        """Tables of one block size as tensors on `device`."""
        values = (
            acceptance.confidence_knots, acceptance.acceptance_knots, acceptance.weights, cost.target_cost,
            [cost.fixed_cost], [cost.stage0_token_cost], [cost.expert_cost], [throughput], experts.mean_new_pairs,
            experts.mean_new_pairs_given,
        )  # fmt: skip
        with torch.inference_mode(False):
            return cls(*(torch.tensor(v, dtype=torch.float32, device=device) for v in values))
