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

    Attributes:
        gate_up: `[E, 2*I, D]`, gate rows, then up rows. down: `[E, D, I]`.
        shared_gate, shared_up: `[IS, D]`. shared_down: `[D, IS]`.
    """

    gate_up: Tensor
    down: Tensor
    shared_gate: Tensor
    shared_up: Tensor
    shared_down: Tensor


def moe_experts_ref(hidden: Tensor, slots: ExpertSlots, weights: ExpertWeights, outputs: Tensor) -> None:
    """Every expert on the tokens `[w, D]` that chose it, times its weight: outputs `[S, 16, D]`, other rows untouched."""
    for slot in range(int(slots.count) + 1):
        if slot == int(slots.count):
            gate, up, down = weights.shared_gate, weights.shared_up, weights.shared_down
        else:
            gate, up = weights.gate_up[slots.expert[slot]].chunk(2)
            down = weights.down[slots.expert[slot]]
        share = slots.weight[slot, : len(hidden)]
        chosen = share != NOT_CHOSEN
        y = F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down) * share[:, None].to(hidden.dtype)
        outputs[slot, : len(hidden)][chosen] = y[chosen]


@partial(jit, do_not_specialize=["W"])
def _moe_gate_up_kernel(
    hidden, gate_up, shared_gate, shared_up, slot_expert, slot_count, act, W,
    D: tl.constexpr, I: tl.constexpr, IS: tl.constexpr, IA: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BI inner channels of one slot, for all tokens: those that did not choose the expert get weight 0 later."""
    i_i, i_s = tl.program_id(0), tl.program_id(1)
    o_t, o_i, o_d = tl.arange(0, 16), i_i * BI + tl.arange(0, BI), tl.arange(0, BD)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    count = tl.load(slot_count)
    if i_s <= count:
        gate, up, size = shared_gate, shared_up, IS
        if i_s < count:
            gate = gate_up + tl.load(slot_expert + i_s).to(tl.int64) * (2 * I * D)
            up, size = gate + I * D, I
        m_t, m_i = o_t < W, o_i < size
        o_w = o_i[:, None] * D + o_d[None, :]
        b_g, b_u = tl.zeros((16, BI), tl.float32), tl.zeros((16, BI), tl.float32)
        for i_d in range(0, D, BD):
            m_d = (o_d < D - i_d)[None, :]
            b_h = tl.load(hidden + o_t[:, None] * D + i_d + o_d[None, :], mask=m_t[:, None] & m_d, other=0.0)
            m_w = m_i[:, None] & m_d
            b_g += input_dot(b_h, tl.trans(tl.load(gate + o_w + i_d, mask=m_w, other=0.0)), PRECISION)
            b_u += input_dot(b_h, tl.trans(tl.load(up + o_w + i_d, mask=m_w, other=0.0)), PRECISION)
        b_a = swiglu(b_g, b_u, act.dtype.element_ty)
        tl.store(act + i_s * (16 * IA) + o_t[:, None] * IA + o_i[None, :], b_a, mask=m_i[None, :])


@partial(jit, do_not_specialize=["W"])
def _moe_down_kernel(
    act, down, shared_down, slot_expert, slot_weight, slot_count, outputs, W,
    D: tl.constexpr, I: tl.constexpr, IS: tl.constexpr, IA: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr,
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
        weight, size = shared_down, IS
        if i_s < count:
            weight, size = down + tl.load(slot_expert + i_s).to(tl.int64) * (D * I), I
        share = tl.load(slot_weight + i_s * 16 + o_t)
        m_t = (o_t < W) & (share != -1.0)
        p_a = act + i_s * (16 * IA) + o_t[:, None] * IA + o_i[None, :]
        p_w = weight + o_n[:, None] * size + o_i[None, :]
        acc = tl.zeros((16, BN), tl.float32)
        for i in range(0, IA, BI):
            m_i = (o_i < size - i)[None, :]
            b_a = tl.load(p_a + i, mask=m_t[:, None] & m_i, other=0.0)
            acc += input_dot(b_a, tl.trans(tl.load(p_w + i, mask=m_n[:, None] & m_i, other=0.0)), PRECISION)
        dtype = outputs.dtype.element_ty
        b_y = (acc.to(dtype).to(tl.float32) * share[:, None]).to(dtype)
        o_y = i_s.to(tl.int64) * (16 * D) + o_t[:, None] * D + o_n[None, :]
        tl.store(outputs + o_y, b_y, mask=m_t[:, None] & m_n[None, :])


@launcher
def moe_experts(
    hidden: Tensor, slots: ExpertSlots, top_k: int, weights: ExpertWeights, act: Tensor, outputs: Tensor, *,
    overlap: bool = False,
) -> None:  # fmt: skip
    """`moe_experts_ref` in two launches, without reading a length on the host.

    Args:
        hidden: `[w, D]`, w <= 16. slots: of these tokens, see `moe_route`; at most
            w * top_k. weights: hidden's dtype.
        act: `[S, 16, max(I, IS)]`, hidden's dtype, scratch.
        outputs: `[S, 16, D]`, hidden's dtype; written in a slot's row of every token that it counts for.
        overlap: let the launches overlap with the kernel in front of them in the stream (SM90 on); that kernel must
            not write a weight.

    Raises:
        ValueError: for more than 16 tokens, a layout that the kernel does not read, or a device without it.
    """
    check_experts(hidden, slots, top_k, weights, act, outputs)
    (w, D), I, IS, IA = hidden.shape, weights.down.shape[2], len(weights.shared_gate), act.shape[2]
    wide = hidden.element_size() == 2
    block_i, block_n, depth, stages = (32, 64, 128, 4) if wide else (16, 32, 64, 2)
    options = {"PRECISION": dot_precision(hidden.dtype), "num_warps": 4, "num_stages": stages}
    options |= {"D": D, "I": I, "IS": IS, "IA": IA, **launch_options(hidden.device, overlap)}
    _moe_gate_up_kernel[(triton.cdiv(IA, block_i), w * top_k + 1)](
        hidden, weights.gate_up, weights.shared_gate, weights.shared_up, slots.expert, slots.count, act, w,
        BI=block_i, BD=min(depth, max(16, triton.next_power_of_2(D))), **options,
    )  # fmt: skip
    _moe_down_kernel[(triton.cdiv(D, block_n), w * top_k + 1)](
        act, weights.down, weights.shared_down, slots.expert, slots.weight, slots.count, outputs, w,
        BN=block_n, BI=min(depth, max(16, triton.next_power_of_2(IA))), **options,
    )  # fmt: skip


def check_experts(
    hidden: Tensor, slots: ExpertSlots, top_k: int, weights: ExpertWeights, act: Tensor, outputs: Tensor
) -> None:
    """Raise ValueError for inputs that the kernels would read wrongly."""
    check_input_dtype("hidden", hidden)
    if hidden.ndim != 2 or not 1 <= len(hidden) <= MAX_TOKENS:
        raise ValueError(f"hidden is {list(hidden.shape)}; the kernels take [w, D] with 1 to {MAX_TOKENS} tokens.")
    (w, D), (E, _, I), IS, dtype = hidden.shape, weights.down.shape, len(weights.shared_gate), hidden.dtype
    size = len(slots.expert)
    if size <= w * top_k:
        raise ValueError(f"slots has room for {size} experts, {w} tokens need {w * top_k + 1}. Allocate more.")
    check_tensor("hidden", hidden, (w, D))
    check_tensor("weights.gate_up", weights.gate_up, (E, 2 * I, D), dtype)
    check_tensor("weights.down", weights.down, (E, D, I), dtype)
    check_tensor("weights.shared_gate", weights.shared_gate, (IS, D), dtype)
    check_tensor("weights.shared_up", weights.shared_up, (IS, D), dtype)
    check_tensor("weights.shared_down", weights.shared_down, (D, IS), dtype)
    check_tensor("slots.expert", slots.expert, (size,), torch.int32)
    check_tensor("slots.weight", slots.weight, (size, MAX_TOKENS), torch.float32)
    check_tensor("slots.count", slots.count, (1,), torch.int32)
    check_tensor("act", act, (len(act), MAX_TOKENS, max(I, IS)), dtype)
    if len(act) <= w * top_k:
        raise ValueError(f"act has room for {len(act)} slots, {w} tokens need {w * top_k + 1}. Allocate more.")
    check_tensor("outputs", outputs, (len(act), MAX_TOKENS, D), dtype)
