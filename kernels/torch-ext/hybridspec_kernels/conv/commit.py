"""The convolution windows of all layers move through the m committed tokens, in place."""

import torch
from torch import Tensor

from ..checks import check_count, check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

# channels per program
BLOCK = 1024


def conv_commit_ref(rows: Tensor, taps: int, num_committed: Tensor) -> None:
    """Make the window end at the last committed token.

    Args:
        rows: `[L, taps-1+W, C]`, per layer the window before the round, then the inputs of the round's tokens.
            The first `taps-1` rows are overwritten.
        taps: convolution width.
        num_committed: `[1]`, integer, on the rows' device, 0..W. Never read by the host.
    """
    window = torch.arange(taps - 1, device=rows.device) + num_committed
    rows[:, : taps - 1] = rows.index_select(1, window)


@jit
def move_window(rows, o_c, m, C: tl.constexpr, TAPS: tl.constexpr):
    """Move the channels `o_c` of one layer's window `rows` through m tokens."""
    m_c = o_c < C
    # each thread moves its channels in order, so row m + t is read before anything is written to it
    for t in tl.static_range(TAPS - 1):
        tl.store(rows + t * C + o_c, tl.load(rows + (m + t) * C + o_c, mask=m_c), mask=m_c)


@jit
def _conv_commit_kernel(
    rows, num_committed, R: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr, USE_PDL: tl.constexpr
):
    o_c, i_l = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1).to(tl.int64)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    move_window(rows + i_l * (R * C), o_c, tl.load(num_committed).to(tl.int32), C, TAPS)


@launcher
def conv_commit(rows: Tensor, taps: int, num_committed: Tensor, *, overlap: bool = False) -> None:
    """`conv_commit_ref` in one launch; `gdn_commit` can do the same in its own.

    Args:
        rows, taps, num_committed: see `conv_commit_ref`.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on).

    Raises:
        ValueError: if a tensor has another shape or layout, or there is no kernel for the device.
    """
    L, R, C = rows.shape
    check_tensor("rows", rows, (L, R, C))
    check_count("num_committed", num_committed)
    check_window(R, taps)
    options = launch_options(rows.device, overlap)
    _conv_commit_kernel[(triton.cdiv(C, BLOCK), L)](rows, num_committed, R=R, C=C, TAPS=taps, BC=BLOCK, **options)


def check_window(rows: int, taps: int) -> None:
    """Raise ValueError if `rows` of a layer cannot hold a window of `taps - 1` and a token."""
    if not 1 <= taps <= rows:
        raise ValueError(f"rows has {rows} rows a layer for a convolution of {taps} taps; it needs taps - 1 + W.")
