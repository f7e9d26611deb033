"""First u tokens of the target input -> router boundary of Layer 0 (Algorithm 1, step 5)."""

from .context import Round


def stage0(r: Round, u: int) -> None:
    """Run Layer 0 through its router on u tokens; retain what Stage 1 needs to resume there."""
    r.target.stage0(r.state.target_input[:u], r.cache, r.state.boundary)
