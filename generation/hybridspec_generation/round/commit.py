"""Committed tokens -> caches, GDN states, drafter context and anchor of the next round (Algorithm 1, steps 15-16)."""

import torch

from .context import Round


def commit(r: Round, w: int) -> None:
    """Advance everything through the m committed tokens; the last emitted token becomes the anchor."""
    s = r.state
    if r.drafter is not None:
        # rows past the committed ones land behind the context's end and are overwritten next round
        r.drafter.append(s.features[:w], r.cache.length)
    r.cache.commit(s.num_committed)
    # a round launched ahead, behind the request's end, commits nothing
    s.anchor.copy_(s.emitted.index_select(0, (s.num_committed.long() - 1).clamp_min(0)))
    header = (s.finished, s.num_committed, s.num_accepted, s.nominal_length, s.stage0_length, s.verify_length)
    torch.cat([part.long() for part in (*header, s.emitted)], out=s.readout)
