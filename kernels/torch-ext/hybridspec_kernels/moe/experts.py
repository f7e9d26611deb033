"""Hidden states of w tokens and their expert slots -> every slot's output, each distinct expert read once."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..tiles import dot_precision, input_dot, swiglu, within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .route import NOT_CHOSEN, ExpertSlots


class ExpertWeights(NamedTuple):
    """Weights of an MoE block's experts.

    The shared expert's gate and up projections are computed with the router's, whose launch they fill.

    Attributes:
        gate_up: `[E, 2*M, D]`, gate rows, then up rows. down: `[E, D, M]`. shared_down: `[D, MS]`.
    """

    gate_up: Tensor
    down: Tensor
    shared_down: Tensor


def moe_experts_ref(
    hidden: Tensor, slots: ExpertSlots, weights: ExpertWeights, shared: Tensor, outputs: Tensor
) -> None:
    """Every expert on the tokens that chose it, times its weight.

    Args:
        hidden: `[w, D]`. slots: of these tokens.
        shared: `[w, 2*MS]`, gate and up projections of the shared expert.
        outputs: `[S, 16, D]`, written in a slot's rows of the tokens that chose it.
    """
    for slot in range(int(slots.used) + 1):
        if slot == int(slots.used):
            (gate, up), down = shared.chunk(2, dim=-1), weights.shared_down
        else:
            expert = slots.expert[slot]
            gate, up = F.linear(hidden, weights.gate_up[expert]).chunk(2, dim=-1)
            down = weights.down[expert]
        share = slots.weight[slot, : len(hidden)]
        chosen = share != NOT_CHOSEN
        y = F.linear(F.silu(gate) * up, down) * share[:, None].to(hidden.dtype)
        outputs[slot, : len(hidden)][chosen] = y[chosen]


@partial(jit, do_not_specialize=["W", "SLOTS"])
def _moe_experts_kernel(
    hidden, gate_up, down, shared_down, front, slot_expert, slot_weight, slot_count, slot_ready, act, outputs,
    W, SLOTS,
    D: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, MA: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr,
    BI: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """First the programs of all gate and up projections, slot by slot, then those of the down projections.

    A program of the latter waits until its slot's inner channels are there. Programs start in the order of their
    numbers, so that it waits only for programs that run or have run; and weights are read without a pause between.
    """
    INNER: tl.constexpr = (MA + BI - 1) // BI
    OUTER: tl.constexpr = (D + BN - 1) // BN
    i = tl.program_id(0)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    count = tl.load(slot_count)
    if i < SLOTS * INNER:
        i_s, i_i = i // INNER, i % INNER
        if i_s < count:
            gate_up_tile(hidden, gate_up, slot_expert, act, i_s, i_i, W, D, M, MA, BI, BD, PRECISION)
        elif i_s == count:
            shared_tile(front, act, i_s, i_i, W, MS, MA, ROW, PARTS, BI)
        if i_s <= count:
            # what all threads stored is there before one of them says so
            tl.debug_barrier()
            tl.atomic_add(slot_ready + i_s, 1, sem="release")
    else:
        i_s, i_n = (i - SLOTS * INNER) // OUTER, (i - SLOTS * INNER) % OUTER
        if i_s <= count:
            while tl.atomic_add(slot_ready + i_s, 0, sem="acquire") < INNER:
                pass
            weight, size = shared_down, MS
            if i_s < count:
                weight, size = down + tl.load(slot_expert + i_s).to(tl.int64) * (D * M), M
            down_tile(act, weight, size, slot_weight, outputs, i_s, i_n, W, D, MA, BN, BM, PRECISION)


@jit
def gate_up_tile(
    hidden, gate_up, slot_expert, act, i_s, i_i, W,
    D: tl.constexpr, M: tl.constexpr, MA: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BI inner channels of one slot, for all tokens: rows of those that did not choose the expert are never read."""
    o_t, o_i, o_d = tl.arange(0, 16), i_i * BI + tl.arange(0, BI), tl.arange(0, BD)
    m_t, m_i = o_t < W, o_i < M
    gate = gate_up + tl.load(slot_expert + i_s).to(tl.int64) * (2 * M * D)
    o_w = o_i[:, None] * D + o_d[None, :]
    b_g, b_u = tl.zeros((16, BI), tl.float32), tl.zeros((16, BI), tl.float32)
    for i_d in range(0, D, BD):
        m_d = (o_d < D - i_d)[None, :]
        b_h = tl.load(hidden + o_t[:, None] * D + i_d + o_d[None, :], mask=m_t[:, None] & m_d, other=0.0)
        m_w = m_i[:, None] & m_d
        b_g += input_dot(b_h, tl.trans(tl.load(gate + o_w + i_d, mask=m_w, other=0.0)), PRECISION)
        b_u += input_dot(b_h, tl.trans(tl.load(gate + M * D + o_w + i_d, mask=m_w, other=0.0)), PRECISION)
    p_act = act + i_s * (16 * MA) + o_t[:, None] * MA + o_i[None, :]
    tl.store(p_act, swiglu(b_g, b_u, act.dtype.element_ty), mask=m_i[None, :])


@jit
def shared_tile(
    front, act, i_s, i_i, W,
    MS: tl.constexpr, MA: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """BI inner channels of the shared expert, whose projections are there, at the end of the rows."""
    o_t, o_i = tl.arange(0, 16), i_i * BI + tl.arange(0, BI)
    mask = (o_t < W)[:, None] & (o_i < MS)[None, :]
    p_g = front + o_t[:, None] * ROW + (ROW - 2 * MS) + o_i[None, :]
    b_g, b_u = tl.zeros((16, BI), tl.float32), tl.zeros((16, BI), tl.float32)
    for i_p in tl.static_range(PARTS):
        b_g += tl.load(p_g + i_p * W * ROW, mask=mask, other=0.0).to(tl.float32)
        b_u += tl.load(p_g + i_p * W * ROW + MS, mask=mask, other=0.0).to(tl.float32)
    p_act = act + i_s * (16 * MA) + o_t[:, None] * MA + o_i[None, :]
    tl.store(p_act, swiglu(b_g, b_u, act.dtype.element_ty), mask=mask)


@jit
def down_tile(
    act, weight, size, slot_weight, outputs, i_s, i_n, W,
    D: tl.constexpr, MA: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BN output channels of one slot, for all tokens that chose the expert, times what it counts for."""
    o_t, o_n, o_m = tl.arange(0, 16), i_n * BN + tl.arange(0, BN), tl.arange(0, BM)
    m_n = within(o_n, D, BN)
    share = tl.load(slot_weight + i_s * 16 + o_t)
    m_t = (o_t < W) & (share != -1.0)
    p_a = act + i_s * (16 * MA) + o_t[:, None] * MA + o_m[None, :]
    p_w = weight + o_n[:, None] * size + o_m[None, :]
    acc = tl.zeros((16, BN), tl.float32)
    for i_m in range(0, MA, BM):
        m_m = (o_m < size - i_m)[None, :]
        b_a = tl.load(p_a + i_m, mask=m_t[:, None] & m_m, other=0.0)
        acc += input_dot(b_a, tl.trans(tl.load(p_w + i_m, mask=m_n[:, None] & m_m, other=0.0)), PRECISION)
    dtype = outputs.dtype.element_ty
    b_y = (acc.to(dtype).to(tl.float32) * share[:, None]).to(dtype)
    o_y = i_s.to(tl.int64) * (16 * D) + o_t[:, None] * D + o_n[None, :]
    tl.store(outputs + o_y, b_y, mask=m_t[:, None] & m_n[None, :])


@launcher
def moe_experts(
    hidden: Tensor, slots: ExpertSlots, top_k: int, weights: ExpertWeights, front: Tensor, act: Tensor,
    outputs: Tensor, *, overlap: bool = False,
) -> None:  # fmt: skip
    """`moe_experts_ref` in one launch, without reading a length on the host.

    Args:
        hidden: `[w, D]`, w <= 16. slots: of these tokens, as `moe_route` left them; at most w * top_k. They serve one
            launch. weights: hidden's dtype.
        front: `[w, N]`, hidden's dtype, or `[P, w, N]`, fp32 parts: its last 2*MS columns are the shared expert's gate
            and up projections (the others are the router's, see `moe_route`).
        act: `[S, 16, max(M, MS)]`, hidden's dtype, scratch.
        outputs: `[S, 16, D]`, hidden's dtype; written in a slot's row of every token that it counts for.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on); that kernel must
            not write a weight.

    Raises:
        ValueError: for more than 16 tokens, a layout that the kernel does not read, or a device without it.
    """
    check_experts(hidden, slots, top_k, weights, front, act, outputs)
    (w, D), M, MS, MA = hidden.shape, weights.down.shape[2], weights.shared_down.shape[1], act.shape[2]
    size = w * top_k + 1
    tile = tile_shape(hidden.dtype)
    _moe_experts_kernel[(size * (triton.cdiv(MA, tile.inner) + triton.cdiv(D, tile.outputs)),)](
        hidden, *weights, front, slots.expert, slots.weight, slots.used, slots.ready, act, outputs, w, size,
        D=D, M=M, MS=MS, MA=MA, ROW=front.shape[-1], PARTS=len(front) if front.ndim == 3 else 1,
        BI=tile.inner, BD=min(tile.depth, max(16, triton.next_power_of_2(D))),
        BN=tile.outputs, BM=min(tile.depth, max(16, triton.next_power_of_2(MA))),
        PRECISION=dot_precision(hidden.dtype), num_warps=4, num_stages=tile.stages,
        **launch_options(hidden.device, overlap),
    )  # fmt: skip


class Tile(NamedTuple):
    """Inner channels or outputs of a program, inputs of both per step, and the steps in flight.

    Few programs at a time, each with much in flight: then the first slots' inner channels are done early, and down
    projections fill in where gate and up projections run out. With three steps the 35B loses 5 % at 6 tokens (H200).
    """

    inner: int
    outputs: int
    depth: int
    stages: int


def tile_shape(dtype: torch.dtype) -> Tile:
    """What was fastest on an H200 with 256 experts of 512 channels; in fp32 what smaller GPUs have room for."""
    return Tile(32, 64, 128, 4) if dtype != torch.float32 else Tile(16, 32, 64, 2)


def check_experts(
    hidden: Tensor, slots: ExpertSlots, top_k: int, weights: ExpertWeights, front: Tensor, act: Tensor,
    outputs: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the kernels would read wrongly."""
    check_input_dtype("hidden", hidden)
    if hidden.ndim != 2 or not 1 <= len(hidden) <= MAX_TOKENS:
        raise ValueError(f"hidden is {list(hidden.shape)}; the kernels take [w, D] with 1 to {MAX_TOKENS} tokens.")
    (w, D), (E, _, M), MS, dtype = hidden.shape, weights.down.shape, weights.shared_down.shape[1], hidden.dtype
    size = len(slots.expert)
    if size <= w * top_k:
        raise ValueError(f"slots has room for {size} experts, {w} tokens need {w * top_k + 1}. Allocate more.")
    check_tensor("hidden", hidden, (w, D))
    check_tensor("weights.gate_up", weights.gate_up, (E, 2 * M, D), dtype)
    check_tensor("weights.down", weights.down, (E, D, M), dtype)
    check_tensor("weights.shared_down", weights.shared_down, (D, MS), dtype)
    check_tensor("slots.expert", slots.expert, (size,), torch.int32)
    check_tensor("slots.weight", slots.weight, (size, MAX_TOKENS), torch.float32)
    check_tensor("slots.used", slots.used, (1,), torch.int32)
    check_tensor("slots.ready", slots.ready, (size,), torch.int32)
    check_tensor("act", act, (len(act), MAX_TOKENS, max(M, MS)), dtype)
    if len(act) <= w * top_k:
        raise ValueError(f"act has room for {len(act)} slots, {w} tokens need {w * top_k + 1}. Allocate more.")
    row = front.shape[-1]
    if row < 2 * MS:
        raise ValueError(f"front has {row} columns, the shared expert's projections are {2 * MS}. Pass them, too.")
    if front.ndim == 3:
        check_tensor("front", front, (len(front), w, row), torch.float32)
    else:
        check_tensor("front", front, (w, row), dtype)
    check_tensor("outputs", outputs, (len(act), MAX_TOKENS, D), dtype)
