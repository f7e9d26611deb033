"""HybridSpecConfig: the length policy and its calibrated tables, checked; a folder or a Hub repository keeps it."""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .gdn import GDN_BACKENDS
from .storage import find_folder, read_folder, upload, write_folder
from .tables import AcceptanceTable, CalibratedFor, CostTable, ExpertTable, is_finite

POLICIES = '"hybridspec", "nominal", "dcut", "evict", "dspark", "full" or "static:N" (N >= 2, e.g. "static:4")'
ADAPTIVE_POLICIES = ("hybridspec", "nominal", "dcut", "evict", "dspark")
# a launch cannot be stopped from the CPU
MOST_ROUNDS = 256
TABLES = {
    "acceptance": AcceptanceTable, "experts": ExpertTable, "cost": CostTable, "calibrated_for": CalibratedFor,
}  # fmt: skip
GRAPHS = ("auto", "parent", "per-length", "off")


@dataclass(frozen=True, kw_only=True)
class HybridSpecConfig:
    """How a round chooses its verification length.

    Args:
        policy: "hybridspec" (selector and routing correction), "nominal" (selector only), "static:N" (always N
            tokens) or "full" (the whole block: vanilla DFlash); for comparison the rules "dcut" (D-Cut), "evict" (our
            reconstruction of EVICT) and "dspark" (DSpark-style).
        acceptance, experts: calibrated tables; None uses the shipped ones, fitted on the tiny pair.
        cost: the target's latency curve, or several in ascending context, between which a request interpolates; None
            measures one at first use (a few seconds, kept in the user's cache folder).
        throughput: rho, tokens per second; None takes the cost curve's, or solves it over the acceptance table's
            reference rounds.
        online_throughput: re-estimate rho within a request, from its own rounds; for "hybridspec" and "nominal".
        calibrated_for: the pair that the tables were fitted to; another pair keeps them with a warning, and measures
            its own cost.
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
    cost: CostTable | tuple[CostTable, ...] | None = None
    throughput: float | None = None
    online_throughput: bool = False
    calibrated_for: CalibratedFor | None = None
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
        if self.throughput is not None and not (is_finite(self.throughput) and self.throughput > 0):
            raise ValueError(f"throughput (rho) must be positive tokens per second, got {self.throughput!r}.")
        if type(self.online_throughput) is not bool:
            raise ValueError(f"online_throughput must be True or False, got {self.online_throughput!r}.")
        for name, kind in TABLES.items():
            value = getattr(self, name)
            if name == "cost" and isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(_as_table(name, kind, each) for each in value))
            elif value is not None:
                object.__setattr__(self, name, _as_table(name, kind, value))
        self._check_costs()

    def _check_costs(self) -> None:
        if self.cost == ():
            raise ValueError("cost needs at least one CostTable. Leave it out to measure one at first use.")
        contexts = [cost.context for cost in self.costs]
        if len(contexts) > 1 and (contexts[0] < 1 or contexts != sorted(set(contexts))):
            raise ValueError(f"Several cost tables need known contexts in ascending order, got {contexts}.")
        if len({(cost.block, cost.device, cost.runtime) for cost in self.costs}) > 1:
            raise ValueError(
                "Several cost tables differ in context only, but these were measured with other blocks, devices or "
                "runtimes. Calibrate again."
            )

    def _check_static(self) -> None:
        if not re.fullmatch(r"static:([2-9]|[1-9][0-9]+)", str(self.policy), re.ASCII):
            raise ValueError(f"Unknown policy {self.policy!r}. Use {POLICIES}.")

    @property
    def costs(self) -> tuple[CostTable, ...]:
        """`cost` as a tuple, empty if it is to be measured."""
        return self.cost if isinstance(self.cost, tuple) else (self.cost,) if self.cost else ()

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
        """Write `hybridspec_config.json` and, with tables, `hybridspec_tables.safetensors` into `folder`."""
        write_folder(folder, self.to_dict())

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, revision: str | None = None, token: str | bool | None = None
    ) -> "HybridSpecConfig":
        """Read what `save_pretrained` wrote, from a folder or a Hub repository.

        Args:
            name: the folder, or the repository's id. revision, token: of the repository, as in transformers.

        Raises:
            FileNotFoundError: if there is no such folder or repository, or a file is missing in it.
            OSError: if a file cannot be read.
            ValueError: if `name` is a file, a newer version wrote it, or a file is damaged or of another calibration.
        """
        return cls.from_dict(read_folder(find_folder(name, revision=revision, token=token)))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes; the repository and the branch are created if they are missing.

        Args:
            repo_id, commit_message, private, token, revision: as in transformers' `push_to_hub`.

        Returns:
            The commit's URL.
        """
        return upload(
            self.save_pretrained,
            repo_id,
            commit_message=commit_message,
            private=private,
            token=token,
            revision=revision,
        )


def _as_table(name: str, kind: type[Any], value: Any) -> Any:
    if isinstance(value, dict):
        return kind.from_dict(value)
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__} or its dict, got {type(value).__name__}.")
    return value
