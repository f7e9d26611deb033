"""A drafter's hidden states of w tokens -> draft tokens, their probabilities and the entropies: head and softmax."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import check_tensor
from ..gdn.gates import compute_dtype
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .choose import (
    REDUCE_WARPS,
    HeadScratch,
    check_head,
    head_argmax_ref,
    load_tiles,
    row_maximum,
    tile_logits,
    tile_options,
)


def head_draft_ref(hidden: Tensor, weight: Tensor, tokens: Tensor, confidence: Tensor, entropy: Tensor) -> None:
    """The most probable entries, and what the softmax over the logits says of them.

    Args:
        hidden: `[w, H]`. weight: `[N, H]`, same dtype; the logits are rounded to it.
        tokens: `[w]`, int64, written: as `head_argmax_ref` chooses them.
        confidence: `[w]`, written: probabilities of the tokens.
        entropy: `[w]`, written: of the distributions, in nats.
    """
    head_argmax_ref(hidden, weight, tokens)
    logits = F.linear(hidden, weight)
    probabilities = logits.to(compute_dtype(logits)).softmax(-1)
    confidence.copy_(probabilities.amax(-1))
    # its limit 0 at probability 0
    entropy.copy_(torch.special.entr(probabilities).sum(-1))


@partial(jit, do_not_specialize=["W"])
def _head_draft_kernel(
    hidden, weight, maximum, index, total, moment, W,
    H: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Maximum, index and the two sums over BN vocabulary entries, for all rows."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    i_n, o_t = tl.program_id(0), tl.arange(0, 16)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    x, o_n = tile_logits(hidden, weight, i_n, W, H, N, BN, BD, PRECISION)
    b_m, b_i = row_maximum(x, o_n, N)
    d = distance(x, b_m)
    e = tl.exp(d)
    o_o, m_t = o_t * TILES + i_n, o_t < W
    tl.store(maximum + o_o, b_m, mask=m_t)
    tl.store(index + o_o, b_i, mask=m_t)
    tl.store(total + o_o, tl.sum(e, 1), mask=m_t)
    tl.store(moment + o_o, tl.sum(d * e, 1), mask=m_t)


@jit
def _head_draft_reduce_kernel(
    maximum, index, total, moment, tokens, confidence, entropy,
    N: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One row: its tiles' sums, about the maximum of all."""
    i_t, o_n, o_1 = tl.program_id(0), tl.arange(0, BT)[None, :], tl.arange(0, 1)
    await_previous(USE_PDL)
    b_m, b_i = load_tiles(maximum + i_t * TILES, index + i_t * TILES, N, TILES, BT)
    b_s = tl.load(total + i_t * TILES + o_n, mask=o_n < TILES, other=0.0)
    b_t = tl.load(moment + i_t * TILES + o_n, mask=o_n < TILES, other=0.0)
    start_next(USE_PDL)
    row_m, row_i = row_maximum(b_m, b_i, N)
    d = distance(b_m, row_m)
    e = tl.exp(d)
    row_s, row_t = tl.sum(b_s * e, 1), tl.sum((b_t + b_s * d) * e, 1)
    tl.store(tokens + i_t + o_1, row_i.to(tl.int64))
    tl.store(confidence + i_t + o_1, 1.0 / row_s)
    tl.store(entropy + i_t + o_1, tl.log(row_s) - row_t / row_s)


@jit
def distance(x, m):
    """`x - m` from each row's maximum; where x is -inf, a number whose exponential is 0: 0 * -inf would be NaN."""
    return tl.where(x == float("-inf"), -1e4, x - m[:, None])


@launcher
def head_draft(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    confidence: Tensor,
    entropy: Tensor,
    scratch: HeadScratch,
    *,
    overlap: bool = False,
) -> None:
    """`head_draft_ref` in two launches that read the weight once and never write the logits.

    NaN counts as +inf: every token is one of the vocabulary, whatever the logits are; the other two are NaN then.

    Args:
        hidden: `[w, H]`, w <= 16. weight: `[N, H]`, same dtype.
        tokens: `[w]`, int64, written. confidence, entropy: `[w]`, fp32, written.
        scratch: of at least w rows; written.
        overlap: let the launches overlap with the kernels in front of them in the stream (SM90 on).

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_head("head_draft", hidden, weight, scratch)
    w, N = len(hidden), len(weight)
    check_tensor("tokens", tokens, (w,), torch.int64)
    check_tensor("confidence", confidence, (w,), torch.float32)
    check_tensor("entropy", entropy, (w,), torch.float32)
    tiles, options = scratch.maximum.shape[1], launch_options(hidden.device, overlap)
    _head_draft_kernel[(tiles,)](hidden, weight, *scratch, w, **tile_options(weight), **options)
    _head_draft_reduce_kernel[(w,)](
        *scratch, tokens, confidence, entropy, N=N, TILES=tiles, BT=triton.next_power_of_2(tiles),
        num_warps=REDUCE_WARPS, **options,
    )  # fmt: skip
