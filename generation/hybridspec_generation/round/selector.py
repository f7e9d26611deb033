"""Confidence, entropy and output budget -> nominal length w0 and Stage-0 length u (Algorithm 1, steps 2-4)."""

from .context import Round


def select(r: Round) -> None:
    """Write `nominal_length` and `stage0_length`; a policy that estimates acceptance also writes `prefix_prob`."""
    r.policy.select(r.state)
