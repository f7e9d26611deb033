"""Draft tokens against the target's choices -> accepted prefix, emitted tokens (Algorithm 1, steps 13-14)."""

from hybridspec_kernels import Emission, accept_greedy, accept_greedy_ref

from .context import Round


def accept(r: Round, w: int) -> None:
    """Greedy acceptance of w - 1 draft tokens, truncated at the first EOS and at the output budget.

    Writes `num_accepted` (A, before truncation), `emitted`, `num_committed` (= emitted tokens), `remaining` and
    `finished`; the last emitted token becomes the anchor. The emitted tokens are the target's own choices, so they
    equal d_1..d_A, x_new.
    """
    s = r.state
    emission = Emission(s.num_accepted, s.num_committed, s.emitted, s.remaining, s.finished)
    accept_tokens = accept_greedy if s.kernels else accept_greedy_ref
    accept_tokens(s.target_input, s.target_tokens[:w], s.eos, emission)
