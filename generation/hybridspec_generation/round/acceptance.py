"""Draft tokens against the target's choices -> accepted prefix, emitted tokens (Algorithm 1, steps 13-14)."""

import torch

from .context import Round


def accept(r: Round, w: int) -> None:
    """Greedy acceptance of w - 1 draft tokens, truncated at the first EOS and at the output budget.

    Writes `num_accepted` (A, before truncation), `emitted`, `num_committed` (= emitted tokens), `remaining` and
    `finished`. The emitted tokens are the target's own choices, so they equal d_1..d_A, x_new.
    """
    s = r.state
    chosen = s.target_tokens[:w]
    matches = s.target_input[1:w] == chosen[: w - 1]
    s.num_accepted.copy_(matches.int().cumprod(0).sum(0, keepdim=True))
    s.emitted[:w] = chosen

    row = torch.arange(w, device=chosen.device)
    is_eos = (chosen[:, None] == s.eos).any(1) & (row <= s.num_accepted)
    until_eos = torch.where(is_eos, row + 1, w + 1).amin(0, keepdim=True)
    emitted = torch.minimum(torch.minimum(s.num_accepted + 1, until_eos), s.remaining)
    s.num_committed.copy_(emitted)
    s.remaining -= emitted
    s.finished.copy_((emitted == until_eos) | (s.remaining == 0))
