"""Output budget -> the tokens that Stage 0 runs on (Algorithm 1, step 4), and both lengths of a fixed policy."""

from functools import partial

import torch
from torch import Tensor

from ..checks import check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl


def limit_length_ref(wanted: Tensor, remaining: Tensor, block: int) -> Tensor:
    """`wanted`, or what the output budget and the block allow, but at least 2 (1 in a block of one token).

    Args:
        wanted: `[1]`, integer, tokens to process. remaining: `[1]`, integer, tokens that the request may still emit.
        block: W.

    Returns:
        `[1]`, int32.
    """
    return torch.minimum(wanted, remaining.clamp(min(2, block), block)).to(torch.int32)


def fix_length_ref(
    length: int, remaining: Tensor, nominal_length: Tensor, stage0_length: Tensor, *, block: int
) -> None:
    """The same nominal length in every round.

    Args:
        length: w0. remaining: `[1]`, integer, tokens that the request may still emit. block: W.
        nominal_length, stage0_length: `[1]`, int32, written: w0 and u.
    """
    nominal_length.fill_(length)
    stage0_length.copy_(limit_length_ref(nominal_length, remaining, block))


@partial(jit, do_not_specialize=["length"])
def _fix_length_kernel(length, remaining, nominal_length, stage0_length, W: tl.constexpr, USE_PDL: tl.constexpr):
    start_next(USE_PDL)
    await_previous(USE_PDL)
    tl.store(nominal_length, length)
    tl.store(stage0_length, limited(length, tl.load(remaining), W))


@jit
def limited(wanted, remaining, W: tl.constexpr):
    """`limit_length_ref` of numbers."""
    SHORTEST: tl.constexpr = 2 if W > 1 else 1
    return tl.minimum(wanted, tl.minimum(tl.maximum(remaining, SHORTEST), W)).to(tl.int32)


@launcher
def fix_length(
    length: int, remaining: Tensor, nominal_length: Tensor, stage0_length: Tensor, *, block: int, overlap: bool = False
) -> None:
    """`fix_length_ref` in one launch.

    Args:
        length, nominal_length, stage0_length, block: see `fix_length_ref`. remaining: `[1]`, int64.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on).

    Raises:
        ValueError: if a tensor has another shape or dtype, or if there is no kernel for the device.
    """
    check_lengths(remaining, nominal_length, stage0_length)
    options = launch_options(remaining.device, overlap)
    _fix_length_kernel[(1,)](length, remaining, nominal_length, stage0_length, W=block, num_warps=1, **options)


def check_lengths(remaining: Tensor, nominal_length: Tensor, stage0_length: Tensor) -> None:
    """Raise ValueError for a budget or lengths that the kernels would read or write wrongly."""
    check_tensor("remaining", remaining, (1,), torch.int64)
    check_tensor("nominal_length", nominal_length, (1,), torch.int32)
    check_tensor("stage0_length", stage0_length, (1,), torch.int32)
