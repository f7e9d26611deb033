"""Drafter context + anchor -> proposal block with top-1 confidence and entropy (Algorithm 1, step 1)."""

from .context import Round


def propose(r: Round) -> None:
    """Fill `target_input[1:]`, `confidence` and `entropy`; without a drafter there is nothing to propose."""
    if r.drafter is not None:
        r.drafter.propose(r.state.anchor, r.cache.length, r.state.draft)
