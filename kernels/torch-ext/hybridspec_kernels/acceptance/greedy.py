"""Draft tokens and the target's choices -> accepted prefix, emitted tokens, next anchor (Algorithm 1, steps 13-14)."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_tensor
from ..triton_support import jit, launcher, tl


class Emission(NamedTuple):
    """What acceptance writes.

    Attributes:
        num_accepted, num_committed: `[1]`, int32: A before, m after the cut at EOS and budget.
        emitted: `[W]`, int64, the target's choices; rows from m on are not emitted.
        remaining: `[1]`, int64, output budget, counted down; 0 behind the end.
        finished: `[1]`, int32, 1 at EOS or without budget.
    """

    num_accepted: Tensor
    num_committed: Tensor
    emitted: Tensor
    remaining: Tensor
    finished: Tensor


def accept_greedy_ref(target_input: Tensor, chosen: Tensor, eos: Tensor, emission: Emission) -> None:
    """Accept the draft tokens that are the target's own choices, and emit these and the choice behind them.

    Args:
        target_input: `[W]`, int64: anchor, draft tokens; the last emitted token becomes the next anchor.
        chosen: `[w]`, int64, the target's choice after each of the first w. eos: `[E]`, int64.
        emission: written; with no budget left nothing is emitted, and nothing committed.
    """
    w, e = len(chosen), emission
    matches = target_input[1:w] == chosen[: w - 1]
    e.num_accepted.copy_(matches.int().cumprod(0).sum(0, keepdim=True))
    e.emitted[:w] = chosen
    row = torch.arange(w, device=chosen.device)
    is_eos = (chosen[:, None] == eos).any(1) & (row <= e.num_accepted)
    until_eos = torch.where(is_eos, row + 1, w + 1).amin(0, keepdim=True)
    emitted = torch.minimum(torch.minimum(e.num_accepted + 1, until_eos), e.remaining)
    e.num_committed.copy_(emitted)
    finished = (emitted == until_eos) | (e.remaining == emitted)
    e.remaining.copy_(torch.where(finished, 0, e.remaining - emitted))
    e.finished.copy_(finished)
    target_input[:1] = chosen.index_select(0, (emitted - 1).clamp_min(0))


@partial(jit, do_not_specialize=["W"])
def _accept_greedy_kernel(
    target_input, chosen, eos, num_accepted, num_committed, emitted, remaining, finished, W,
    E: tl.constexpr,
):  # fmt: skip
    o_t = tl.arange(0, 16)
    m_t = o_t < W
    y = tl.load(chosen + o_t, mask=m_t, other=-1)
    d = tl.load(target_input + 1 + o_t, mask=o_t + 1 < W, other=-2)
    budget = tl.load(remaining)
    accepted = tl.min(tl.where(d == y, 16, o_t), 0)
    is_eos = o_t < 0
    for i in tl.static_range(E):
        is_eos = is_eos | (y == tl.load(eos + i))
    until_eos = tl.min(tl.where(is_eos & (o_t <= accepted) & m_t, o_t + 1, W + 1), 0)
    count = tl.minimum(tl.minimum(accepted + 1, until_eos).to(tl.int64), budget)
    tl.store(num_accepted, accepted)
    tl.store(num_committed, count.to(tl.int32))
    tl.store(emitted + o_t, y, mask=m_t)
    over = ((count == until_eos) | (budget == count)).to(tl.int32)
    tl.store(remaining, (budget - count) * (1 - over))
    tl.store(finished, over)
    last = tl.maximum(count - 1, 0)
    tl.store(target_input, tl.sum(tl.where(o_t == last, y, 0), 0))


@launcher
def accept_greedy(target_input: Tensor, chosen: Tensor, eos: Tensor, emission: Emission) -> None:
    """`accept_greedy_ref` in one launch; w <= 16.

    Raises:
        ValueError: for more than 16 tokens, another layout or dtype, or a device without the kernel.
    """
    w, W = len(chosen), len(target_input)
    if not 1 <= w <= min(W, MAX_TOKENS):
        raise ValueError(f"chosen has {w} tokens for {W} inputs; the kernel takes 1 to {MAX_TOKENS}. Use the _ref.")
    check_tensor("target_input", target_input, (W,), torch.int64)
    check_tensor("chosen", chosen, (w,), torch.int64)
    check_tensor("eos", eos, (len(eos),), torch.int64)
    check_tensor("emission.num_accepted", emission.num_accepted, (1,), torch.int32)
    check_tensor("emission.num_committed", emission.num_committed, (1,), torch.int32)
    check_tensor("emission.emitted", emission.emitted, (W,), torch.int64)
    check_tensor("emission.remaining", emission.remaining, (1,), torch.int64)
    check_tensor("emission.finished", emission.finished, (1,), torch.int32)
    _accept_greedy_kernel[(1,)](target_input, chosen, eos, *emission, w, E=len(eos), num_warps=1)
