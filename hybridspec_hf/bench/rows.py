"""Names of benchmark rows: a length policy, the GDN backend that it runs on (as the paper's tables combine them), and
whether rho is estimated anew in each request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridspec_generation import HybridSpecConfig
from hybridspec_generation.gdn import GDN_BACKENDS

from ..calibration.tables import check_blocks
from ..lengths import READ_RHO

AUTOREGRESSIVE = "ar"
DEFAULT_BACKEND = "block"
HYBRIDSPEC = "hybridspec"
ONLINE = "online"
STATIC = "static:"


@dataclass(frozen=True)
class BenchRow:
    """One way to decode.

    Attributes:
        policy: "ar", or a policy of `HybridSpecConfig`.
        gdn_backend: how the GDN layers verify.
        online: whether the config's `online_throughput` is set.
    """

    policy: str
    gdn_backend: str = DEFAULT_BACKEND
    online: bool = False

    @property
    def name(self) -> str:
        """What the command line calls it: the policy, "+backend" unless that is the default, "+online" if it is."""
        backend = "" if self.is_default else f"+{self.gdn_backend}"
        return f"{self.policy}{backend}{f'+{ONLINE}' if self.online else ''}"

    @property
    def label(self) -> str:
        """The paper's name of it, else the row's own."""
        return LABELS.get(self.name, self.name)

    @property
    def is_default(self) -> bool:
        """Whether it verifies with HybridSpec's own GDN backend."""
        return self.gdn_backend == DEFAULT_BACKEND

    @property
    def drafts(self) -> bool:
        """Whether it needs the drafter."""
        return self.policy != AUTOREGRESSIVE

    def config(self, tables: HybridSpecConfig | None = None) -> HybridSpecConfig:
        """The config that generate takes.

        Args:
            tables: calibrated on the default backend. Its cost and rho do not hold for another one, where they are
                left out and so measured at first use, as the paper calibrates each system on its own runtime. AR takes
                how rounds are launched. The row says whether rho is online, whatever the config does.
        """
        tables = tables or HybridSpecConfig(gdn_backend=self.gdn_backend)
        if not self.drafts:
            return HybridSpecConfig(
                gdn_backend=self.gdn_backend, graphs=tables.graphs, rounds_per_launch=tables.rounds_per_launch
            )
        if self.gdn_backend != tables.gdn_backend:
            tables = replace(tables, cost=None, throughput=None)
        return replace(tables, policy=self.policy, gdn_backend=self.gdn_backend, online_throughput=self.online)


# the paper's names; "vanilla" is without any component of HybridSpec, so its GDN layers verify token by token
LABELS = {
    "ar": "AR",
    "full+recurrent": "vanilla DFlash",
    "dcut+recurrent": "D-Cut",
    "evict+recurrent": "EVICT",
    "full+replay": "ReplaySSM",
    "evict+replay": "EVICT + ReplaySSM",
    "hybridspec": "HybridSpec",
    "hybridspec+online": "HybridSpec, online rho",
    "nominal": "nominal only",
    "full": "whole block",
    "hybridspec+recurrent": "recurrent GDN kernels",
}
# Table 1: the systems
SYSTEMS = ("ar", "full+recurrent", "dcut+recurrent", "evict+recurrent", "full+replay", "evict+replay", "hybridspec")
# Table 3: what HybridSpec is without a component; fixed lengths go between
ABLATIONS = ("ar", "hybridspec", "full", "nominal", "hybridspec+recurrent", "full+recurrent")
# around the paper's best, 7
STATIC_LENGTHS = (4, 6, 7, 8)


def parse_row(name: str) -> BenchRow:
    """A row by its name: "full", "full+recurrent", "evict+replay", "static:4", "ar", "hybridspec+online", ...

    Raises:
        ValueError: for an unknown policy or backend, or an online rho of a policy that reads none.
    """
    online = name.endswith(f"+{ONLINE}")
    policy, plus, backend = name.removesuffix(f"+{ONLINE}").partition("+")
    if plus and backend not in GDN_BACKENDS:
        raise ValueError(
            f"Unknown GDN backend {backend!r} in {name!r}. Use one of {', '.join(GDN_BACKENDS)}; +{ONLINE} goes last."
        )
    row = BenchRow(policy, backend or DEFAULT_BACKEND, online)
    # the config refuses what it does not know
    row.config()
    if online and policy not in READ_RHO:
        raise ValueError(f"{name!r}: {policy!r} reads no rho. Use +{ONLINE} with {' or '.join(READ_RHO)}.")
    return row


def parse_rows(names: Sequence[str]) -> list[BenchRow]:
    """Rows in order, each once, AR in front: every other row is measured against it.

    Raises:
        ValueError: for an unknown name.
    """
    rows = dict.fromkeys(parse_row(name) for name in names)
    known = [row for row in rows if not row.drafts] or [BenchRow(AUTOREGRESSIVE)]
    return known + [row for row in rows if row.drafts]


def check_block(rows: Sequence[BenchRow], tables: HybridSpecConfig | None, block: int) -> None:
    """Refuse what does not fit a drafter's block of W tokens, before any model is loaded.

    Raises:
        ValueError: for a fixed length above W, or a table of another block.
    """
    for row in rows:
        if row.drafts and not row.config().is_adaptive:
            row.config().fixed_length(block)
    if tables is not None:
        check_blocks(tables, block)


def ablation_names(lengths: Sequence[int] = STATIC_LENGTHS) -> list[str]:
    """The rows of Table 3 with these fixed lengths."""
    return [*ABLATIONS[:2], *(f"{STATIC}{length}" for length in lengths), *ABLATIONS[2:]]
