"""Hidden states of w tokens and their expert slots -> every slot's output, each distinct expert read once."""

from functools import partial
from typing import Any, NamedTuple

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


@partial(jit, do_not_specialize=["W"])
def _moe_gate_up_kernel(
    hidden, gate_up, front, slot_expert, slot_count, act, W,
    D: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, MA: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr,
    BI: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BI inner channels of one slot, for all tokens: rows of those that did not choose the expert are never read."""
    i_i, i_s = tl.program_id(0), tl.program_id(1)
    o_t, o_i, o_d = tl.arange(0, 16), i_i * BI + tl.arange(0, BI), tl.arange(0, BD)
    m_t = o_t < W
    start_next(USE_PDL)
    await_previous(USE_PDL)
    count = tl.load(slot_count)
    p_act = act + i_s * (16 * MA) + o_t[:, None] * MA + o_i[None, :]
    if i_s < count:
        m_i = o_i < M
        gate = gate_up + tl.load(slot_expert + i_s).to(tl.int64) * (2 * M * D)
        o_w = o_i[:, None] * D + o_d[None, :]
        b_g, b_u = tl.zeros((16, BI), tl.float32), tl.zeros((16, BI), tl.float32)
        for i_d in range(0, D, BD):
            m_d = (o_d < D - i_d)[None, :]
            b_h = tl.load(hidden + o_t[:, None] * D + i_d + o_d[None, :], mask=m_t[:, None] & m_d, other=0.0)
            m_w = m_i[:, None] & m_d
            b_g += input_dot(b_h, tl.trans(tl.load(gate + o_w + i_d, mask=m_w, other=0.0)), PRECISION)
            b_u += input_dot(b_h, tl.trans(tl.load(gate + M * D + o_w + i_d, mask=m_w, other=0.0)), PRECISION)
        tl.store(p_act, swiglu(b_g, b_u, act.dtype.element_ty), mask=m_i[None, :])
    elif i_s == count:
        # the shared expert's projections are there, at the end of the rows
        m_s = m_t[:, None] & (o_i < MS)[None, :]
        p_g = front + o_t[:, None] * ROW + (ROW - 2 * MS) + o_i[None, :]
        b_g, b_u = tl.zeros((16, BI), tl.float32), tl.zeros((16, BI), tl.float32)
        for i_p in tl.static_range(PARTS):
            b_g += tl.load(p_g + i_p * W * ROW, mask=m_s, other=0.0).to(tl.float32)
            b_u += tl.load(p_g + i_p * W * ROW + MS, mask=m_s, other=0.0).to(tl.float32)
        tl.store(p_act, swiglu(b_g, b_u, act.dtype.element_ty), mask=m_s)


@partial(jit, do_not_specialize=["W"])
def _moe_down_kernel(
    act, down, shared_down, slot_expert, slot_weight, slot_count, outputs, W,
    D: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, MA: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BN output channels of one slot, for all tokens that chose the expert, times what it counts for."""
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_t, o_n, o_i = tl.arange(0, 16), i_n * BN + tl.arange(0, BN), tl.arange(0, BI)
    m_n = within(o_n, D, BN)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    count = tl.load(slot_count)
    if i_s <= count:
        weight, size = shared_down, MS
        if i_s < count:
            weight, size = down + tl.load(slot_expert + i_s).to(tl.int64) * (D * M), M
        share = tl.load(slot_weight + i_s * 16 + o_t)
        m_t = (o_t < W) & (share != -1.0)
        p_a = act + i_s * (16 * MA) + o_t[:, None] * MA + o_i[None, :]
        p_w = weight + o_n[:, None] * size + o_i[None, :]
        acc = tl.zeros((16, BN), tl.float32)
        for i in range(0, MA, BI):
            m_i = (o_i < size - i)[None, :]
            b_a = tl.load(p_a + i, mask=m_t[:, None] & m_i, other=0.0)
            acc += input_dot(b_a, tl.trans(tl.load(p_w + i, mask=m_n[:, None] & m_i, other=0.0)), PRECISION)
        dtype = outputs.dtype.element_ty
        b_y = (acc.to(dtype).to(tl.float32) * share[:, None]).to(dtype)
        o_y = i_s.to(tl.int64) * (16 * D) + o_t[:, None] * D + o_n[None, :]
        tl.store(outputs + o_y, b_y, mask=m_t[:, None] & m_n[None, :])


@launcher
def moe_experts(
    hidden: Tensor, slots: ExpertSlots, top_k: int, weights: ExpertWeights, front: Tensor, act: Tensor,
    outputs: Tensor, *, overlap: bool = False,
) -> None:  # fmt: skip
    """`moe_experts_ref` in two launches, without reading a length on the host.

    Args:
        hidden: `[w, D]`, w <= 16. slots: of these tokens, see `moe_route`; at most
            w * top_k. weights: hidden's dtype.
        front: `[w, N]`, hidden's dtype, or `[P, w, N]`, fp32 parts: its last 2*MS columns are the shared expert's gate
            and up projections (the others are the router's, see `moe_route`).
        act: `[S, 16, max(M, MS)]`, hidden's dtype, scratch.
        outputs: `[S, 16, D]`, hidden's dtype; written in a slot's row of every token that it counts for.
        overlap: let the launches overlap with the kernel in front of them in the stream (SM90 on); that kernel must
            not write a weight.

    Raises:
        ValueError: for more than 16 tokens, a layout that the kernel does not read, or a device without it.
    """
    check_experts(hidden, slots, top_k, weights, front, act, outputs)
    (w, D), M, MS, MA = hidden.shape, weights.down.shape[2], weights.shared_down.shape[1], act.shape[2]
    shared: dict[str, Any] = {"PRECISION": dot_precision(hidden.dtype), "D": D, "M": M, "MS": MS, "MA": MA}
    shared |= launch_options(hidden.device, overlap)
    block, depth, warps, stages = gate_up_shape(hidden.dtype)
    _moe_gate_up_kernel[(triton.cdiv(MA, block), w * top_k + 1)](
        hidden, weights.gate_up, front, slots.expert, slots.used, act, w,
        ROW=front.shape[-1], PARTS=len(front) if front.ndim == 3 else 1, BI=block,
        BD=min(depth, max(16, triton.next_power_of_2(D))), num_warps=warps, num_stages=stages, **shared,
    )  # fmt: skip
    block, depth, warps, stages = down_shape(hidden.dtype)
    _moe_down_kernel[(triton.cdiv(D, block), w * top_k + 1)](
        act, weights.down, weights.shared_down, slots.expert, slots.weight, slots.used, outputs, w,
        BN=block, BI=min(depth, max(16, triton.next_power_of_2(MA))), num_warps=warps, num_stages=stages, **shared,
    )  # fmt: skip


def gate_up_shape(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Inner channels and inputs per step of a program of the first launch, its warps and the steps in flight."""
    return (32, 128, 4, 4) if dtype != torch.float32 else (16, 64, 4, 2)


def down_shape(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Outputs and inner channels per step of a program of the second launch, its warps and the steps in flight."""
    return (64, 128, 4, 4) if dtype != torch.float32 else (32, 64, 4, 2)


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
