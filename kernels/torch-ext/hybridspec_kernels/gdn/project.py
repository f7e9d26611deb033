"""Hidden states of w tokens -> a GDN layer's convolved q | k | v, output gate and raw gates: the joint producer."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..conv.verify import conv_verify_ref
from ..tiles import convolve, dot_precision, input_dot, load_taps
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

# outputs and inputs per step of a program: 16 kB of weights, four steps in flight
BLOCK_N, BLOCK_D = 64, 128


class GDNProjection(NamedTuple):
    """Weights of a layer's four input projections, in the order in which the model stores their rows.

    Attributes:
        qkv, gate, b, a: `[rows, D]`, linear weights; two of them may be the same tensor.
        row: `[C + HV*V + HV + HV]`, int32: the row of `qkv` that makes convolution channel c, then the rows of `gate`,
            `b` and `a` that make their outputs.
    """

    qkv: Tensor
    gate: Tensor
    b: Tensor
    a: Tensor
    row: Tensor


def gdn_project_ref(
    hidden: Tensor,
    projection: GDNProjection,
    conv_weight: Tensor,
    rows: Tensor,
    x: Tensor,
    gate: Tensor,
    a: Tensor,
    b: Tensor,
) -> None:
    """Run the four projections on w tokens, and the convolution with its SiLU on q | k | v.

    Args:
        hidden: `[w, D]`. projection: the layer's weights.
        conv_weight: `[taps, C]`.
        rows: `[taps-1+w, C]`: the convolution's inputs of the last `taps-1` tokens are read, those of the w tokens
            written.
        x: `[w, C]`, written: convolved q | k | v. gate: `[w, HV*V]`, a, b: `[w, HV]`, written.
    """
    w, taps = hidden.shape[0], conv_weight.shape[0]
    parts = projection.row.split([x.shape[1], gate.shape[1], b.shape[1], a.shape[1]])
    for weight, row, out in zip(projection[:4], parts, (rows[taps - 1 : taps - 1 + w], gate, b, a), strict=True):
        out.copy_(F.linear(hidden, weight[row.long()]))
    x.copy_(conv_verify_ref(rows, conv_weight))


@partial(jit, do_not_specialize=["W"])
def _gdn_project_kernel(
    hidden, qkv, gate_weight, b_weight, a_weight, row, conv_weight, rows, x, gate, a, b, W,
    D: tl.constexpr, C: tl.constexpr, G: tl.constexpr, HV: tl.constexpr, TAPS: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of one projection: programs of q | k | v first, then of the output gate, b and a."""
    i_n = tl.program_id(0)
    NC: tl.constexpr = (C + BN - 1) // BN
    NG: tl.constexpr = (G + BN - 1) // BN
    NH: tl.constexpr = (HV + BN - 1) // BN
    weight, out, first, count, offset = qkv, rows + (TAPS - 1) * C, 0, C, 0
    if i_n >= NC + NG + NH:
        weight, out, first, count, offset = a_weight, a, NC + NG + NH, HV, C + G + HV
    elif i_n >= NC + NG:
        weight, out, first, count, offset = b_weight, b, NC + NG, HV, C + G
    elif i_n >= NC:
        weight, out, first, count, offset = gate_weight, gate, NC, G, C
    o_n, o_t, o_d = (i_n - first) * BN + tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BD)
    m_n, m_t = o_n < count, o_t < W
    p_w = weight + tl.load(row + offset + o_n, mask=m_n, other=0).to(tl.int64)[:, None] * D + o_d[None, :]
    p_h = hidden + o_t[:, None] * D + o_d[None, :]
    # of q | k | v only
    m_c = i_n * BN + tl.arange(0, BN) < C
    weights = load_taps(conv_weight + o_n, m_c, C, TAPS)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    # tap i of token t is the window's row t + i, if there is one: else the block's token t + i - (TAPS - 1)
    window = ()
    for i in tl.static_range(TAPS - 1):
        p_x, m_x = rows + (o_t + i)[:, None] * C + o_n[None, :], (o_t < TAPS - 1 - i)[:, None] & m_c[None, :]
        window = window + (tl.load(p_x, mask=m_x, other=0.0),)  # type: ignore[assignment]
    acc = tl.zeros((16, BN), tl.float32)
    for i_d in range(0, D, BD):
        b_h = tl.load(p_h + i_d, mask=m_t[:, None] & (o_d < D - i_d)[None, :], other=0.0)
        b_w = tl.load(p_w + i_d, mask=m_n[:, None] & (o_d < D - i_d)[None, :], other=0.0)
        acc += input_dot(b_h, tl.trans(b_w), PRECISION)
    m_o = m_t[:, None] & m_n[None, :]
    b_x = acc.to(out.dtype.element_ty)
    tl.store(out + o_t[:, None] * count + o_n[None, :], b_x, mask=m_o)
    if i_n < NC:
        taps = with_block(window, b_x, o_t, BN, TAPS)
        tl.store(x + o_t[:, None] * C + o_n[None, :], convolve(taps, as_rows(weights, TAPS), TAPS), mask=m_o)


@jit
def with_block(window, b_x, o_t, BN: tl.constexpr, TAPS: tl.constexpr):
    """The taps of every token `[16, BN]`: the window's rows, and the block's where the window has none."""
    taps = ()
    for i in tl.static_range(TAPS - 1):
        source = o_t + i - (TAPS - 1)
        b_b = tl.gather(b_x, tl.broadcast_to(tl.maximum(source, 0)[:, None], (16, BN)), 0)
        taps = taps + (tl.where((source < 0)[:, None], window[i], b_b),)  # type: ignore[assignment]
    return taps + (b_x,)


@jit
def as_rows(vectors, N: tl.constexpr):
    """Each vector `[n]` of a tuple as `[1, n]`."""
    rows = ()
    for i in tl.static_range(N):
        rows = rows + (vectors[i][None, :],)  # type: ignore[assignment]
    return rows


@launcher
def gdn_project(
    hidden: Tensor,
    projection: GDNProjection,
    conv_weight: Tensor,
    rows: Tensor,
    x: Tensor,
    gate: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """`gdn_project_ref` in one launch: every weight is read once, and the convolution needs no launch of its own.

    Args:
        hidden, projection, conv_weight, rows, x, gate, a, b: see `gdn_project_ref`; w <= 16.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on).

    Raises:
        ValueError: for more than 16 tokens, a layout that the kernel does not read, or a device without it.
    """
    if hidden.ndim != 2:
        raise ValueError(f"hidden is {list(hidden.shape)}; gdn_project takes [w, D], one sequence.")
    w, D = hidden.shape
    if not 1 <= w <= MAX_TOKENS:
        raise ValueError(f"gdn_project takes 1 to {MAX_TOKENS} tokens, got {w}. Use gdn_project_ref for more.")
    check_project(hidden, projection, conv_weight, rows, x, gate, a, b)
    C, G, HV = x.shape[1], gate.shape[1], a.shape[1]
    tiles = triton.cdiv(C, BLOCK_N) + triton.cdiv(G, BLOCK_N) + 2 * triton.cdiv(HV, BLOCK_N)
    _gdn_project_kernel[(tiles,)](
        hidden, *projection, conv_weight, rows, x, gate, a, b, w,
        D=D, C=C, G=G, HV=HV, TAPS=conv_weight.shape[0],
        BN=BLOCK_N, BD=min(BLOCK_D, max(16, triton.next_power_of_2(D))),
        PRECISION=dot_precision(hidden.dtype), num_warps=4,
        # fp32 weights: shared memory of the smaller GPUs
        num_stages=4 if hidden.element_size() == 2 else 2, **launch_options(hidden.device, overlap),
    )  # fmt: skip


def check_project(
    hidden: Tensor, projection: GDNProjection, conv_weight: Tensor, rows: Tensor, x: Tensor, gate: Tensor, a: Tensor,
    b: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the producer would read wrongly."""
    check_input_dtype("hidden", hidden)
    (w, D), C, G, HV, taps = hidden.shape, x.shape[1], gate.shape[1], a.shape[1], len(conv_weight)
    for name, weight in zip(("qkv", "gate", "b", "a"), projection[:4], strict=True):
        check_tensor(f"projection.{name}", weight, (len(weight), D), hidden.dtype)
    check_tensor("projection.row", projection.row, (C + G + 2 * HV,), torch.int32)
    check_tensor("hidden", hidden, (w, D))
    check_tensor("conv_weight", conv_weight, (taps, C))
    check_tensor("rows", rows, (taps - 1 + w, C), hidden.dtype)
    check_tensor("x", x, (w, C), hidden.dtype)
    for name, out, size in (("gate", gate, G), ("a", a, HV), ("b", b, HV)):
        check_tensor(name, out, (w, size), hidden.dtype)
