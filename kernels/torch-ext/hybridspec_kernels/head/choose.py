"""Final hidden states of w tokens -> the most probable next token of each: head and argmax, no logits in memory."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..tiles import dot_precision, input_dot, within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

# vocabulary entries of a program and inputs per step: 16 kB of weights, four steps in flight
BLOCK_N, BLOCK_D = 64, 128
# of the programs that reduce a row's tiles
REDUCE_WARPS = 8


class HeadScratch(NamedTuple):
    """What a tile of BLOCK_N vocabulary entries leaves of its logits x, all `[rows, tiles]`.

    Attributes:
        maximum: fp32, m = max x. entry: int32, the lowest vocabulary entry that has it.
        total: fp32, sum of e^(x - m). moment: fp32, sum of (x - m) e^(x - m). Only `head_draft` writes these two.
    """

    maximum: Tensor
    entry: Tensor
    total: Tensor
    moment: Tensor

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, device: torch.device) -> "HeadScratch":
        """Room for up to `rows` tokens; each of a head's launches overwrites what it reads."""
        tiles = -(-vocabulary // BLOCK_N)
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
        return cls(*(torch.empty(rows, tiles, dtype=dtype, device=device) for dtype in dtypes))


def head_argmax_ref(hidden: Tensor, weight: Tensor, tokens: Tensor) -> None:
    """The entry with the largest logit, logits rounded to the weight's dtype; the lowest among equals.

    Args:
        hidden: `[w, H]`. weight: `[N, H]`, same dtype.
        tokens: `[w]`, int64, written.
    """
    logits = F.linear(hidden, weight)
    # argmax returns any maximum
    tokens.copy_((logits == logits.amax(-1, keepdim=True)).to(torch.int32).argmax(-1))


@partial(jit, do_not_specialize=["W"])
def _head_argmax_kernel(
    hidden, weight, maximum, index, W,
    H: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Maximum and index over BN vocabulary entries, for all rows."""
    TILES: tl.constexpr = (N + BN - 1) // BN
    i_n, o_t = tl.program_id(0), tl.arange(0, 16)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    x, o_n = tile_logits(hidden, weight, i_n, W, H, N, BN, BD, PRECISION)
    b_m, b_i = row_maximum(x, o_n, N)
    tl.store(maximum + o_t * TILES + i_n, b_m, mask=o_t < W)
    tl.store(index + o_t * TILES + i_n, b_i, mask=o_t < W)


@jit
def _head_argmax_reduce_kernel(
    maximum, index, tokens, N: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr, USE_PDL: tl.constexpr
):
    """One row: the maximum of its tiles."""
    i_t = tl.program_id(0)
    await_previous(USE_PDL)
    b_m, b_i = load_tiles(maximum + i_t * TILES, index + i_t * TILES, N, TILES, BT)
    start_next(USE_PDL)
    _, b_i = row_maximum(b_m, b_i, N)
    tl.store(tokens + i_t + tl.arange(0, 1), b_i.to(tl.int64))


@jit
def tile_logits(
    hidden, weight, i_n, W, H: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of tile `i_n` `[16, BN]`, fp32 after rounding to the weight's dtype, and their entries `[1, BN]`.

    -inf stands for entries beyond the vocabulary, and +inf for NaN, which is a maximum in PyTorch and equals nothing.
    """
    o_n, o_t, o_d = i_n * BN + tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BD)
    m_n, m_t = within(o_n, N, BN), o_t < W
    p_w = weight + o_n.to(tl.int64)[:, None] * H + o_d[None, :]
    p_h = hidden + o_t[:, None] * H + o_d[None, :]
    acc = tl.zeros((16, BN), tl.float32)
    for i_d in range(0, H, BD):
        m_d = within(i_d + o_d, H, BD)
        b_h = tl.load(p_h + i_d, mask=m_t[:, None] & m_d[None, :], other=0.0)
        b_w = tl.load(p_w + i_d, mask=m_n[:, None] & m_d[None, :], other=0.0)
        acc += input_dot(b_h, tl.trans(b_w), PRECISION)
    x = acc.to(weight.dtype.element_ty).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    return tl.where(m_n[None, :], x, float("-inf")), o_n[None, :]


@jit
def load_tiles(maximum, index, N: tl.constexpr, TILES: tl.constexpr, BT: tl.constexpr):
    """A row's maxima and indices, each `[1, BT]`; -inf and the last entry stand for tiles that do not exist."""
    o_n = tl.arange(0, BT)[None, :]
    return (
        tl.load(maximum + o_n, mask=o_n < TILES, other=float("-inf")),
        tl.load(index + o_n, mask=o_n < TILES, other=N - 1),
    )


@jit
def row_maximum(x, entries, N: tl.constexpr):
    """Maximum of each row and the lowest entry that has it, an entry of the vocabulary whatever the numbers are."""
    b_m = tl.max(x, 1)
    return b_m, tl.min(tl.where(x == b_m[:, None], entries, N - 1), 1)


@launcher
def head_argmax(
    hidden: Tensor, weight: Tensor, tokens: Tensor, scratch: HeadScratch, *, overlap: bool = False
) -> None:
    """`head_argmax_ref` in two launches that read the weight once and never write the logits.

    NaN counts as +inf: every token is one of the vocabulary, whatever the logits are.

    Args:
        hidden: `[w, H]`, w <= 16. weight: `[N, H]`, same dtype.
        tokens: `[w]`, int64, written.
        scratch: of at least w rows; written.
        overlap: let the launches overlap with the kernels in front of them in the stream (SM90 on).

    Raises:
        ValueError: for more than 16 tokens, a layout or dtype that the kernel does not read, or a device without it.
    """
    check_head("head_argmax", hidden, weight, scratch)
    w, N = len(hidden), len(weight)
    check_tensor("tokens", tokens, (w,), torch.int64)
    tiles, options = scratch.maximum.shape[1], launch_options(hidden.device, overlap)
    _head_argmax_kernel[(tiles,)](
        hidden, weight, scratch.maximum, scratch.entry, w, **tile_options(weight), **options
    )  # fmt: skip
    _head_argmax_reduce_kernel[(w,)](
        scratch.maximum, scratch.entry, tokens, N=N, TILES=tiles, BT=triton.next_power_of_2(tiles),
        num_warps=REDUCE_WARPS, **options,
    )  # fmt: skip


def tile_options(weight: Tensor) -> dict[str, int | str]:
    """Keyword arguments of a launch over the head's tiles."""
    N, H = weight.shape
    return {
        "H": H,
        "N": N,
        "BN": BLOCK_N,
        "BD": min(BLOCK_D, max(16, triton.next_power_of_2(H))),
        "PRECISION": dot_precision(weight.dtype),
        "num_warps": 4,
        # fp32 weights: shared memory of the smaller GPUs
        "num_stages": 4 if weight.element_size() == 2 else 2,
    }


def check_head(operation: str, hidden: Tensor, weight: Tensor, scratch: HeadScratch) -> None:
    """Raise ValueError for inputs that a head's kernels would read wrongly."""
    if hidden.ndim != 2 or weight.ndim != 2:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; {operation} takes [w, H] and [N, H]."
        )
    (w, H), N = hidden.shape, len(weight)
    if not 1 <= w <= MAX_TOKENS:
        raise ValueError(f"{operation} takes 1 to {MAX_TOKENS} tokens, got {w}. Use {operation}_ref for more.")
    check_input_dtype("weight", weight)
    check_tensor("hidden", hidden, (w, H), weight.dtype)
    check_tensor("weight", weight, (N, H))
    rows, tiles = len(scratch.maximum), triton.cdiv(N, BLOCK_N)
    if rows < w:
        raise ValueError(f"scratch has {rows} rows for {w} tokens. Allocate it with HeadScratch.allocate({w}, ...).")
    for name, tensor in scratch._asdict().items():
        check_tensor(f"scratch.{name}", tensor, (rows, tiles), torch.int32 if name == "entry" else torch.float32)
