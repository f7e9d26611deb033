"""Hidden states of w tokens -> the outputs of up to four linear layers side by side, weights read once."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..tiles import dot_precision, input_dot
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

# of a launch; of a sum, whose parts the next kernel has to read
MAX_WEIGHTS, MAX_PARTS = 4, 4


def linear_ref(x: Tensor, weights: tuple[Tensor, ...], out: Tensor) -> None:
    """`x` `[w, D]` times each weight `[N_i, D]`, written side by side.

    Args:
        out: `[w, N]`, N = N_1 + N_2 + ...; or `[P, w, N]`: part p of the sum over D, of D in P runs of equal blocks.
    """
    joint = torch.cat(weights)
    if out.ndim == 2:
        out.copy_(F.linear(x, joint))
        return
    run = part_inputs(x.shape[1], len(out))
    for part, columns in zip(out, range(0, x.shape[1], run), strict=False):
        part.copy_(F.linear(x[:, columns : columns + run], joint[:, columns : columns + run]))
    out[-(-x.shape[1] // run) :] = 0


def part_inputs(inputs: int, parts: int) -> int:
    """Inputs of a part: a multiple of 128, so that the last parts may be short or empty."""
    return -(-inputs // (parts * 128)) * 128


def linear_parts(outputs: int, inputs: int) -> int:
    """Into how many parts to cut a layer's sum, so that a narrow one busies a whole GPU; its consumer adds them up."""
    parts = 1
    while parts < MAX_PARTS and -(-outputs // 64) * parts < 120 and inputs // (2 * parts) >= 256:
        parts *= 2
    return parts


@partial(jit, do_not_specialize=["W"])
def _linear_kernel(
    x, w0, w1, w2, w3, out, W,
    D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    RUN: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of one of the layers, summed over a run of RUN inputs."""
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    T0: tl.constexpr = (N0 + BN - 1) // BN
    T1: tl.constexpr = T0 + (N1 + BN - 1) // BN
    T2: tl.constexpr = T1 + (N2 + BN - 1) // BN
    weight, first, count, offset = w0, 0, N0, 0
    if i_n >= T2:
        weight, first, count, offset = w3, T2, N3, N0 + N1 + N2
    elif i_n >= T1:
        weight, first, count, offset = w2, T1, N2, N0 + N1
    elif i_n >= T0:
        weight, first, count, offset = w1, T0, N1, N0
    o_n, o_t, o_d = (i_n - first) * BN + tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BD)
    m_n, m_t = o_n < count, o_t < W
    size = tl.minimum(D - i_p * RUN, RUN)
    p_w = weight + o_n.to(tl.int64)[:, None] * D + i_p * RUN + o_d[None, :]
    p_x = x + o_t[:, None] * D + i_p * RUN + o_d[None, :]
    start_next(USE_PDL)
    await_previous(USE_PDL)
    acc = tl.zeros((16, BN), tl.float32)
    for i_d in range(0, RUN, BD):
        m_d = (o_d < size - i_d)[None, :]
        b_x = tl.load(p_x + i_d, mask=m_t[:, None] & m_d, other=0.0)
        b_w = tl.load(p_w + i_d, mask=m_n[:, None] & m_d, other=0.0)
        acc += input_dot(b_x, tl.trans(b_w), PRECISION)
    N: tl.constexpr = N0 + N1 + N2 + N3
    o_o = (i_p * W + o_t)[:, None] * N + (offset + o_n)[None, :]
    tl.store(out + o_o, acc.to(out.dtype.element_ty), mask=m_t[:, None] & m_n[None, :])


@launcher
def linear(x: Tensor, weights: tuple[Tensor, ...], out: Tensor, *, overlap: bool = False) -> None:
    """`linear_ref` in one launch.

    Args:
        x: `[w, D]`, w <= 16. weights: one to four `[N_i, D]` of x's dtype.
        out: `[w, N]`, x's dtype, or `[P, w, N]`, fp32, parts that the consumer adds up (see `linear_parts`); written.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on); that kernel must not
            write a weight.

    Raises:
        ValueError: for more than 16 tokens or four weights, a layout that the kernel does not read, or a device
            without it.
    """
    check_linear(x, weights, out)
    (w, D), sizes = x.shape, [len(weight) for weight in weights]
    parts = len(out) if out.ndim == 3 else 1
    block_n, block_d, warps, stages = tile_shape(sum(sizes) * parts, x.dtype)
    padded = (*weights, *(weights[0] for _ in range(MAX_WEIGHTS - len(weights))))
    sizes += [0] * (MAX_WEIGHTS - len(sizes))
    _linear_kernel[(sum(triton.cdiv(size, block_n) for size in sizes), parts)](
        x, *padded, out, w, D=D, N0=sizes[0], N1=sizes[1], N2=sizes[2], N3=sizes[3],
        RUN=D if parts == 1 else part_inputs(D, parts), BN=block_n,
        BD=min(block_d, max(16, triton.next_power_of_2(D))), PRECISION=dot_precision(x.dtype),
        num_warps=warps, num_stages=stages, **launch_options(x.device, overlap),
    )  # fmt: skip


def tile_shape(outputs: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Outputs and inputs per step of a program, its warps and the steps in flight; `outputs` of all parts."""
    if dtype == torch.float32:
        # shared memory of the smaller GPUs
        return 32, 64, 4, 2
    # narrow layers still need a program for every multiprocessor
    if outputs <= 4096:
        return 16, 256, 4, 4
    return (32, 128, 4, 4) if outputs < 8192 else (64, 128, 4, 4)


def check_linear(x: Tensor, weights: tuple[Tensor, ...], out: Tensor) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("x", x)
    if x.ndim != 2 or not 1 <= len(x) <= MAX_TOKENS:
        raise ValueError(f"x is {list(x.shape)}; the kernel takes [w, D] with 1 to {MAX_TOKENS} tokens.")
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"got {len(weights)} weights; the kernel takes 1 to {MAX_WEIGHTS}. Use several launches.")
    (w, D) = x.shape
    check_tensor("x", x, (w, D))
    for i, weight in enumerate(weights):
        check_tensor(f"weights[{i}]", weight, (len(weight), D), x.dtype)
    N = sum(map(len, weights))
    if out.ndim == 3:
        check_tensor("out", out, (len(out), w, N), torch.float32)
    else:
        check_tensor("out", out, (w, N), x.dtype)
