"""The calibrated tables of the length policy, with all checks; and as the tensors that a round reads."""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

# what an online rho trusts the calibrated one for
PRIOR_TOKENS = 128.0

Row = tuple[float, ...]
# by how deep a field's tuples are nested
NUMBERS = ("be a finite number", "be a row of finite numbers only", "hold rows of finite numbers only")
Table = TypeVar("Table", bound="_Table")


class _Table:
    """A frozen dataclass of finite numbers and text that travels as JSON: lists become tuples, nothing else passes."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value, depth = getattr(self, f.name), depth_of(f.type)
            if f.type is str:
                good, kind = isinstance(value, str), "be text"
            elif f.type is int:
                good, kind = type(value) is int and value >= 0, "be a whole number >= 0"
            else:
                good, kind = is_finite(value, depth), NUMBERS[depth]
            if not good:
                raise ValueError(f"{type(self).__name__}.{f.name} must {kind}. Calibrate again.")

    def to_dict(self) -> dict[str, Any]:
        """Plain types; tuples become JSON's lists."""
        return asdict(self)  # type: ignore[call-overload]

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


def depth_of(kind: Any) -> int:
    """How deep the tuples of a field's type are nested; 0 for a number."""
    return 1 + depth_of(get_args(kind)[0]) if get_args(kind) else 0


def is_finite(value: Any, depth: int = 0) -> bool:
    """Whether a value is a finite number, or with `depth` a tuple of such, or of tuples of such."""
    if depth:
        return isinstance(value, tuple) and all(is_finite(v, depth - 1) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _tuples(value: Any, depth: int = 2) -> Any:
    # no table is deeper: what is stays a list, and is refused
    return tuple(_tuples(v, depth - 1) for v in value) if depth and isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class AcceptanceTable(_Table):
    """Drafter signals -> acceptance (Appendix A.2), and the rounds it was fitted on.

    Attributes:
        confidence_knots, acceptance_knots: D rows of N ascending confidences and their calibrated values.
        weights: 6 logistic weights (intercept, confidence, position, interaction, log(1+h), entropy change).
        reference_rounds: prefix probabilities (D each) of calibration rounds; rho is solved over them.
        source: the pair and data it was fitted on.
    """

    confidence_knots: tuple[Row, ...] = field(repr=False)
    acceptance_knots: tuple[Row, ...] = field(repr=False)
    weights: Row
    reference_rounds: tuple[Row, ...] = field(default=(), repr=False)
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
        if not all(0 <= value <= 1 for row in self.reference_rounds for value in row):
            raise ValueError("reference_rounds are probabilities, in [0, 1]. Calibrate again.")

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
    """Target latency by verification length, in seconds, on one machine, behind one number of context tokens.

    Attributes:
        target_cost: C_tgt(w) at index w = 0..W (0 and 1 are not used by the selector), fixed cost removed.
        fixed_cost: the cost of a round that does not depend on w (drafting, selection, launches).
        stage0_token_cost: s, one more token through Layer 0's token mixer and router.
        expert_cost: eta, one more distinct expert in one MoE layer.
        source: hardware, versions and how it was measured.
        device: name of the GPU it belongs to ("cpu" without one). "": any.
        runtime: what ran the rounds: GDN backend, kernels or PyTorch, how they were launched. "": any. On another
            device or runtime generate measures anew.
        context: tokens in the cache before the timed rounds; 0: not known, for any context.
        throughput: rho of the calibration rounds at these costs, tokens per second; 0: not solved yet.
        measured: what the curve was fitted to, (mean tokens verified, seconds) of a round at each measured length; no
            policy reads it. Empty: not kept.
    """

    target_cost: Row
    fixed_cost: float
    stage0_token_cost: float
    expert_cost: float
    source: str = ""
    device: str = ""
    runtime: str = ""
    context: int = 0
    throughput: float = 0.0
    measured: tuple[Row, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.throughput < 0:
            raise ValueError(f"throughput must be tokens per second, >= 0, got {self.throughput!r}. Measure it again.")
        seconds = (*self.target_cost, self.fixed_cost, self.stage0_token_cost, self.expert_cost)
        if len(self.target_cost) < 3 or min(seconds) < 0:
            raise ValueError(
                f"target_cost needs W+1 >= 3 values (index = length), fixed_cost and all other times must be >= 0; "
                f"got {len(self.target_cost)} values and a smallest time of {min(seconds)} seconds. Measure it again."
            )
        if not all(len(row) == 2 and 1 <= row[0] <= self.block and row[1] >= 0 for row in self.measured):
            raise ValueError(
                f"measured needs pairs of a length from 1 to W = {self.block} and the seconds of a round, >= 0. "
                "Measure it again."
            )

    @property
    def block(self) -> int:
        """W, the block size it was measured for."""
        return len(self.target_cost) - 1


def cost_at(costs: Sequence[CostTable], context: int) -> CostTable:
    """The latency curve behind `context` tokens: linear between two measured contexts, constant beyond the last.

    Args:
        costs: at least one, in ascending context.
    """
    if len(costs) == 1:
        return costs[0]
    context = min(max(context, costs[0].context), costs[-1].context)
    right = next(i for i in range(1, len(costs)) if context <= costs[i].context)
    low, high = costs[right - 1], costs[right]
    share = (context - low.context) / (high.context - low.context)

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    return replace(
        low,
        context=context,
        target_cost=tuple(map(between, low.target_cost, high.target_cost)),
        fixed_cost=between(low.fixed_cost, high.fixed_cost),
        stage0_token_cost=between(low.stage0_token_cost, high.stage0_token_cost),
        expert_cost=between(low.expert_cost, high.expert_cost),
        throughput=between(low.throughput, high.throughput) if low.throughput and high.throughput else 0.0,
        # of neither end
        measured=(),
    )


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
    mean_new_pairs_given: tuple[Row, ...] = field(repr=False)
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
class CalibratedFor(_Table):
    """What a calibration belongs to.

    Attributes:
        target, drafter, prompts: names for people.
        target_weights, drafter_weights: short hashes of the weights, as loaded; another pair has others.
        hardware, versions, date: where, with what and when it was made.
        prompt_hashes: a 48-bit hash of each prompt's token ids, so that no evaluation uses them unnoticed. Empty: not
            known.
    """

    target: str
    drafter: str
    prompts: str
    target_weights: str
    drafter_weights: str
    hardware: str
    versions: str
    date: str
    prompt_hashes: Row = field(default=(), repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= value < 2**48 and value == int(value) for value in self.prompt_hashes):
            raise ValueError("prompt_hashes must be whole numbers of 48 bits. Calibrate again.")


class SelectionTables(NamedTuple):
    """The tables of an adaptive policy as device tensors (fp32), for one block size D = W - 1.

    Attributes:
        confidence_knots, acceptance_knots: `[D, N]`. acceptance_weights: `[6]`.
        target_cost: `[W+1]` seconds, fixed_cost removed. fixed_cost, stage0_token_cost, expert_cost: `[1]` seconds.
        throughput: `[1]` tokens/s.
        mean_new_pairs: `[W+1]`. mean_new_pairs_given: `[W+1, topk+1]`.
        observed: `[2]`, tokens and seconds that an online rho is the ratio of; before the first round they stand for
            PRIOR_TOKENS at the given rho.
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
    observed: Tensor

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
            experts.mean_new_pairs_given, [PRIOR_TOKENS, PRIOR_TOKENS / throughput],
        )  # fmt: skip
        with torch.inference_mode(False):
            return cls(*(torch.tensor(v, dtype=torch.float32, device=device) for v in values))
