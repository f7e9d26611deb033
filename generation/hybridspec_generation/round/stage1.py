"""Router boundary + first w tokens -> the target's next token after each of them (Algorithm 1, step 12)."""

from .context import Round


def stage1(r: Round, w: int) -> None:
    """Resume Layer 0 at its experts for w tokens, run the remaining layers and the head."""
    features = None if r.drafter is None else r.state.features
    hidden = r.target.stage1(w, r.cache, r.state.boundary, features)
    r.target.next_tokens(hidden, r.state.target_tokens[:w])
