"""Confidence, entropy and output budget -> nominal length w0 and Stage-0 length u (Algorithm 1, steps 2-4)."""

import torch

from .context import Round


def select(r: Round) -> None:
    """Write `length_limit`, `prefix_prob`, `nominal_length` and `stage0_length`.

    The limit is what the output budget allows, but at least 2 (1 without a drafter).
    """
    s = r.state
    s.length_limit.copy_(s.remaining.clamp(min(2, s.block), s.block))
    r.policy.select(s)
    torch.minimum(s.nominal_length + r.policy.extra_tokens, s.length_limit, out=s.stage0_length)
