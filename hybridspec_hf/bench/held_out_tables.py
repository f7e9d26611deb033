"""Policies on held-out rounds -> Markdown."""

from collections.abc import Iterator

from .analysis import ORACLE
from .held_out import HYBRIDSPEC, RESAMPLINGS, Behind, Correction, HeldOut, Row
from .markdown import table
from .pair_tables import calibration_lines


def held_out_lines(result: HeldOut) -> Iterator[str]:
    """Policies, calibration errors and what the routing correction did."""
    analysis, cost = result.analysis, result.analysis.cost
    yield "## Policies by modelled cost\n"
    yield (
        f"{analysis.rounds} rounds of {analysis.prompts} prompts that no table was fitted to. "
        f"{analysis.cost_line()}; eta {1e6 * cost.expert_cost:.1f} us, s {1e6 * cost.stage0_token_cost:.2f} us.\n"
    )
    best = analysis.best_static().policy
    yield from table(
        ["policy", "tokens per modelled second", "of the oracle", "HybridSpec over it", "AL", "mean w"],
        [policy_row(row, best) for row in result.rows],
    )
    over = ", ".join(f"{w}: {value:.3f}" for w, value in result.over_static.items())
    yield f"\nIn brackets: 95 % of {RESAMPLINGS} resamplings of the prompts."
    yield f"HybridSpec over each fixed length: {over}.\n"
    yield from calibration_lines(analysis)
    yield "\n## Routing correction\n"
    yield from correction_lines(result.correction, analysis.rounds)


def policy_row(row: Row, best: str) -> list[str]:
    """The cells of one policy."""
    found, over = row
    name = f"`{found.policy}`" if found.policy != ORACLE else ORACLE
    shown = f"{over.value:.3f} ({over.low:.3f} to {over.high:.3f})" if found.policy != HYBRIDSPEC else ""
    return [
        f"{name}, the best fixed length here" if found.policy == best else name,
        f"{found.tokens_per_second:.1f}", f"{found.of_oracle:.3f}", shown, f"{found.acceptance_length:.2f}",
        f"{found.mean_verify_length:.2f}",
    ]  # fmt: skip


def correction_lines(found: Correction, rounds: int) -> Iterator[str]:
    """Rounds that it extended, and the token behind w0 by its new experts."""
    yield f"It extended {found.extended} of {rounds} rounds."
    yield f"In each it counted on {found.expected:.3f} accepted tokens, and {found.came:.3f} came."
    yield f"The token took {found.extra_us:.0f} us, in which rho has {found.worth:.3f} tokens.\n"
    if not found.behind:
        return
    yield "The token behind w0 in every round that has one, by the new experts that it needs in Layer 0:\n"
    yield from table(
        ["new experts", "rounds", "extended", "accepted by the table", "accepted"],
        [behind_row(behind) for behind in found.behind],
    )


def behind_row(found: Behind) -> list[str]:
    """The cells of one number of new experts."""
    return [
        str(found.new_experts), str(found.rounds), str(found.extended), f"{found.expected:.3f}", f"{found.came:.3f}"
    ]  # fmt: skip
