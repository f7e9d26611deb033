"""Committed tokens -> caches, GDN states, drafter context and the host's readout (Algorithm 1, steps 15-16)."""

from .context import Round


def commit(r: Round, w: int) -> None:
    """Advance everything through the m committed tokens."""
    s = r.state
    if r.drafter is not None:
        # rows past the committed ones land behind the context's end and are overwritten next round
        r.drafter.append(s.features[:w], r.cache.length)
    r.cache.commit(s.num_committed)
