"""Tokens -> their embeddings, the residual stream's first rows, and the norm that Layer 0 reads."""

from functools import partial

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..tiles import within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .add_rms import MAX_SIZE, add_rms_norm_ref, norm_warps, rms_norm


def embed_rms_norm_ref(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    residual: Tensor,
    out: Tensor,
    *,
    eps: float,
    zero_centered: bool,
    filler: int | None = None,
) -> None:
    """Look up a block's embeddings, and norm each row.

    Args:
        tokens: `[n]`, int64, in [0, V); n = w, or less with a filler.
        table: `[V, H]`, model dtype.
        weight: `[H]`.
        residual: `[w, H]`, model dtype, written: the embeddings.
        out: `[w, H]`, model dtype, written: their norms.
        eps, zero_centered: see `add_rms_norm_ref`.
        filler: the token of the rows behind `tokens`: a drafter's block is the anchor, then mask tokens.
    """
    residual[: len(tokens)] = table[tokens]
    if filler is not None:
        residual[len(tokens) :] = table[filler]
    add_rms_norm_ref(residual, None, weight, out, eps=eps, zero_centered=zero_centered)


@partial(jit, do_not_specialize=["N", "V", "filler"])
def _embed_rms_norm_kernel(
    tokens, table, weight, residual, out, eps, N, V, filler,
    H: tl.constexpr, BH: tl.constexpr, ZERO_CENTERED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    i_t, o_h = tl.program_id(0), tl.arange(0, BH)
    m_h, o_row = within(o_h, H, BH), i_t * H + o_h
    b_w = tl.load(weight + o_h, mask=m_h, other=0.0)
    await_previous(USE_PDL)
    token = tl.load(tokens + i_t, mask=i_t < N, other=filler).to(tl.int64)
    # a row of equal numbers: Triton 3.9's interpreter joins no single mask to one of a row
    b_t = token + tl.zeros((BH,), tl.int64)
    known = (b_t >= 0) & (b_t < V)
    # int64: a table may have more than 2^31 elements
    b_r = tl.load(table + b_t * H + o_h, mask=m_h & known, other=tl.where(known, 0.0, float("nan")))
    start_next(USE_PDL)
    tl.store(residual + o_row, b_r, mask=m_h)
    tl.store(out + o_row, rms_norm(b_r, b_w, H, eps, ZERO_CENTERED), mask=m_h)


@launcher
def embed_rms_norm(
    tokens: Tensor,
    table: Tensor,
    weight: Tensor,
    residual: Tensor,
    out: Tensor,
    *,
    eps: float,
    zero_centered: bool,
    filler: int | None = None,
    overlap: bool = False,
) -> None:
    """`embed_rms_norm_ref` in one launch.

    Args:
        tokens: `[n]`, int64. The caller vouches that they are in [0, V), as those of a head over the same vocabulary
            are: the host does not read them. The rows of any other are NaN, and nothing is read for it.
        table, weight, residual, out, eps, zero_centered, filler: see `embed_rms_norm_ref`; w <= 16, H <= 8192.
            `weight` has out's dtype unless it is zero-centred.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not write
            `weight`.

    Raises:
        ValueError: for more tokens or columns, rows without a token, a filler outside of the table, what the kernel
            does not read, or a device without it.
    """
    check_embed_rms_norm(tokens, table, weight, residual, out, zero_centered, filler)
    (w, H), V = out.shape, len(table)
    block = triton.next_power_of_2(H)
    _embed_rms_norm_kernel[(w,)](
        tokens, table, weight, residual, out, eps, len(tokens), V, 0 if filler is None else filler,
        H=H, BH=block, ZERO_CENTERED=zero_centered,
        num_warps=norm_warps(block), **launch_options(out.device, overlap),
    )  # fmt: skip


def check_embed_rms_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, residual: Tensor, out: Tensor, zero_centered: bool,
    filler: int | None,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the kernel would read wrongly."""
    if out.ndim != 2:
        raise ValueError(f"out is {list(out.shape)}; embed_rms_norm takes [w, H], one sequence.")
    (w, H), dtype = out.shape, out.dtype
    if not (1 <= w <= MAX_TOKENS and 1 <= H <= MAX_SIZE):
        raise ValueError(
            f"embed_rms_norm takes 1 to {MAX_TOKENS} tokens of 1 to {MAX_SIZE} columns, got {w} of {H}. "
            "Use embed_rms_norm_ref for more."
        )
    check_input_dtype("out", out)
    check_tensor("out", out, (w, H))
    check_tensor("residual", residual, (w, H), dtype)
    check_tensor("table", table, (len(table), H), dtype)
    check_input_dtype("weight", weight)
    check_tensor("weight", weight, (H,), None if zero_centered else dtype)
    check_tensor("tokens", tokens, (tokens.numel(),), torch.int64)
    if not 1 <= len(tokens) <= w or (len(tokens) < w and filler is None):
        raise ValueError(
            f"tokens has {len(tokens)} entries for {w} rows. Pass one for each row, or at least one and a filler."
        )
    if filler is not None and not 0 <= filler < len(table):
        raise ValueError(f"filler is {filler}; the table has {len(table)} rows. Pass the token of one of them.")
