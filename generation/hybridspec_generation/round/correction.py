"""Layer-0 expert assignments -> executed verification length w (Algorithm 1, steps 6-11, Eq. 6)."""

from .context import Round


def correct(r: Round) -> None:
    """Write `verify_length`: w0, or w0 + 1 when the policy keeps the extra Stage-0 token, within the budget."""
    r.policy.correct(r.state)
