"""Router logits of w tokens -> experts and weights of each token, and the list of distinct experts to run."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, loop_bound, start_next, tl, triton

MAX_EXPERTS = 4096
# a weight that no softmax gives
NOT_CHOSEN = -1.0


class Routing(NamedTuple):
    """Experts of each token, as transformers' router gives them.

    Attributes:
        ids: `[w, topk]`, int64. weights: `[w, topk]`, renormalised, model dtype.
        arrived: `[1]`, int32, 0 between launches: programs that are done.
    """

    ids: Tensor
    weights: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, tokens: int, top_k: int, dtype: torch.dtype, device: torch.device) -> "Routing":
        """Room for `tokens` tokens."""
        return cls(
            torch.zeros(tokens, top_k, dtype=torch.int64, device=device),
            torch.zeros(tokens, top_k, dtype=dtype, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


class ExpertSlots(NamedTuple):
    """The distinct experts of w tokens, each to be read once; slot `used` is the shared expert.

    Attributes:
        expert: `[S]`, int32, S > w * topk: experts in ascending order, then garbage.
        weight: `[S, 16]`, fp32: what the slot's output counts for in each token, -1 if the token did not choose it.
        used: `[1]`, int32, distinct experts.
        of_pair: `[w, topk]`, int32, the slot of each token's experts.
    """

    expert: Tensor
    weight: Tensor
    used: Tensor
    of_pair: Tensor

    @classmethod
    def allocate(cls, tokens: int, top_k: int, device: torch.device) -> "ExpertSlots":
        """Room for the experts of `tokens` tokens and the shared one."""
        slots = tokens * top_k + 1
        return cls(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, MAX_TOKENS, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(tokens, top_k, dtype=torch.int32, device=device),
        )


def moe_route_ref(logits: Tensor, top_k: int) -> Routing:
    """Softmax, top-k and renormalisation as in transformers' `Qwen3_5MoeTopKRouter.forward`: logits `[w, E]`."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights, ids = logits.softmax(-1, dtype=wide).topk(top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
    return Routing(ids, weights, torch.zeros(1, dtype=torch.int32, device=ids.device))


def moe_slots_ref(ids: Tensor, weights: Tensor, shared_gate: Tensor) -> ExpertSlots:
    """The slots of tokens with experts `ids` `[w, topk]`, their weights, and shared-expert gate logits `[w]`."""
    experts, of_pair = ids.unique(return_inverse=True)
    weight = torch.full((len(experts) + 1, MAX_TOKENS), NOT_CHOSEN, dtype=weights.dtype, device=ids.device)
    for slot, expert in enumerate(experts):
        chosen = (ids == expert).any(-1)
        weight[slot, : len(ids)][chosen] = (weights * (ids == expert)).sum(-1)[chosen]
    weight[len(experts), : len(ids)] = torch.sigmoid(shared_gate)
    count = torch.tensor([len(experts)], dtype=torch.int32, device=ids.device)
    return ExpertSlots(experts.to(torch.int32), weight, count, of_pair.to(torch.int32))


@partial(jit, do_not_specialize=["W"])
def _moe_route_kernel(
    logits, ids, weights, slot_expert, slot_weight, slot_count, pair_slot, arrived, W,
    E: tl.constexpr, ROW: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr, EP: tl.constexpr,
    PARTS: tl.constexpr, ROUTE: tl.constexpr, LIST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """ROUTE: a program a token chooses its experts. LIST: the last one to finish, or the only one, lists them."""
    o_e = tl.arange(0, EP)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    if ROUTE:
        choose_experts(logits, ids, weights, tl.program_id(0), W, o_e, E, ROW, TOPK, PARTS)
    if LIST:
        last = True
        if ROUTE:
            # what all threads stored is there before one of them says so
            tl.debug_barrier()
            if W > 1:
                last = tl.atomic_add(arrived, 1, sem="acq_rel") == W - 1
        if last:
            if ROUTE:
                tl.store(arrived, 0)
            list_experts(
                logits, ids, weights, slot_expert, slot_weight, slot_count, pair_slot, W, o_e, E, ROW, TOPK, PAIRS,
                EP, PARTS,
            )  # fmt: skip


@jit
def load_logits(logits, offsets, mask, W, ROW: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of a logit's parts, rounded to the model's dtype."""
    b_x = tl.load(logits + offsets, mask=mask, other=0.0)
    for i in tl.static_range(1, PARTS):
        b_x += tl.load(logits + i * W * ROW + offsets, mask=mask, other=0.0)
    return b_x.to(DTYPE)


@jit
def choose_experts(
    logits, ids, weights, i_t, W, o_e, E: tl.constexpr, ROW: tl.constexpr, TOPK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Top-k of one token's logits; the softmax over all experts cancels in the renormalisation."""
    b_x = load_logits(logits, i_t * ROW + o_e, o_e < E, W, ROW, PARTS, weights.dtype.element_ty)
    key, none = ranked(b_x, o_e)
    key = tl.where(o_e < E, key, none)
    best = tl.max(key, 0)
    top, scores = score_of(best, b_x.dtype), ()
    total = top - top
    for i in tl.static_range(TOPK):
        score = tl.exp(score_of(best, b_x.dtype) - top)
        tl.store(ids + i_t * TOPK + i, (4095 - (best & 4095)).to(tl.int64))
        total += score
        scores = scores + (score,)  # type: ignore[assignment]
        key = tl.where(key == best, none, key)
        best = tl.max(key, 0)
    for i in tl.static_range(TOPK):
        tl.store(weights + i_t * TOPK + i, (scores[i] / total).to(weights.dtype.element_ty))


@jit
def list_experts(
    logits, ids, weights, slot_expert, slot_weight, slot_count, pair_slot, W, o_e,
    E: tl.constexpr, ROW: tl.constexpr, TOPK: tl.constexpr, PAIRS: tl.constexpr, EP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """The distinct experts of all tokens in ascending order, and what each counts for in each token."""
    o_t, o_p = tl.arange(0, 16), tl.arange(0, 16 * PAIRS)
    t_p, i_p = o_p // PAIRS, o_p % PAIRS
    m_p = (t_p < W) & (i_p < TOPK)
    expert = tl.load(ids + t_p * TOPK + i_p, mask=m_p, other=0).to(tl.int32)
    weight = tl.load(weights + t_p * TOPK + i_p, mask=m_p, other=0.0).to(tl.float32)
    shared = load_logits(logits, o_t * ROW + E, o_t < W, W, ROW, PARTS, weights.dtype.element_ty)
    shared = tl.sigmoid(shared.to(tl.float32)).to(shared.dtype).to(tl.float32)
    present = (tl.histogram(expert, EP, mask=m_p) > 0).to(tl.int32)
    slot, count = tl.cumsum(present, 0) - 1, tl.sum(present, 0)
    tl.store(slot_expert + slot, o_e, mask=present > 0)
    tl.store(slot_count, count)
    for i_s in range(0, loop_bound(count), 16):
        tl.store(slot_weight + (i_s + o_t)[:, None] * 16 + o_t[None, :], -1.0, mask=(i_s + o_t < count)[:, None])
    tl.store(slot_weight + count * 16 + o_t, tl.where(o_t < W, shared, -1.0))
    # all rows are filled before some are overwritten
    tl.debug_barrier()
    slot = tl.gather(slot, expert, 0)
    tl.store(pair_slot + t_p * TOPK + i_p, slot, mask=m_p)
    tl.store(slot_weight + slot * 16 + t_p, weight, mask=m_p)


@jit
def ranked(x, o_e):
    """A key for every logit `[EP]`: ordered as x, the lower index first; and a key below all of them.

    16-bit numbers leave the lower bits of their fp32 form to the index; fp32 needs keys of 64 bits.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if x.dtype.primitive_bitwidth == 16:
        return (order & -4096) | (4095 - o_e), -0x7FFFFFFF - 1
    else:
        return (order.to(tl.int64) << 12) | (4095 - o_e).to(tl.int64), -0x7FFFFFFFFFFFFFFF - 1


@jit
def score_of(key, DTYPE: tl.constexpr):
    """The number that a key carries, fp32."""
    if DTYPE.primitive_bitwidth == 16:  # noqa: SIM108
        order = tl.where(key < 0, key | 4095, key & -4096)
    else:
        order = (key >> 12).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@launcher
def moe_route(
    logits: Tensor,
    routing: Routing,
    slots: ExpertSlots | None,
    *,
    experts: int,
    choose: bool = True,
    overlap: bool = False,
) -> None:
    """Route w tokens and list their distinct experts, in one launch.

    Args:
        logits: `[w, N]`, model dtype, or `[P, w, N]`, fp32 parts whose sum is rounded to it: the router's E logits,
            the shared expert's gate logit, and what else was computed beside them.
        routing: written; with `choose=False` read instead: its first w rows say which experts the tokens chose.
        slots: written; None leaves the list for later.
        experts: E.
        choose: whether to choose experts by the logits. The router of Layer 0 runs once, in Stage 0; Stage 1 lists the
            experts of the tokens that it verifies.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on).

    Raises:
        ValueError: for more than 16 tokens or 4096 experts, a layout that the kernel does not read, or a device
            without it.
    """
    check_route(logits, routing, slots, experts)
    (w, row), top_k = logits.shape[-2:], routing.ids.shape[1]
    # without slots nothing is written there; the kernel still takes pointers
    listed = (routing.arrived, routing.weights, routing.arrived, routing.arrived) if slots is None else slots
    padded = max(16, triton.next_power_of_2(experts))
    _moe_route_kernel[(w if choose else 1,)](
        logits, routing.ids, routing.weights, *listed, routing.arrived, w,
        E=experts, ROW=row, TOPK=top_k, EP=padded, PAIRS=triton.next_power_of_2(top_k),
        PARTS=len(logits) if logits.ndim == 3 else 1, ROUTE=choose, LIST=slots is not None,
        num_warps=max(1, padded // 256), **launch_options(logits.device, overlap),
    )  # fmt: skip


def check_route(logits: Tensor, routing: Routing, slots: ExpertSlots | None, experts: int) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("routing.weights", routing.weights)
    if not (logits.ndim in (2, 3) and 1 <= logits.shape[-2] <= MAX_TOKENS and 1 <= experts <= MAX_EXPERTS):
        raise ValueError(
            f"logits is {list(logits.shape)} for {experts} experts; the kernel takes [w, N] or [P, w, N], "
            f"1 to {MAX_TOKENS} tokens and at most {MAX_EXPERTS} experts."
        )
    (w, row), (rows, top_k) = logits.shape[-2:], routing.ids.shape
    if rows < w or not 1 <= top_k <= experts < row:
        raise ValueError(
            f"routing.ids is {[rows, top_k]} for {w} tokens, {experts} experts and {row} logits. Pass w rows, "
            "and E + 1 logits or more."
        )
    parts = logits.ndim == 3
    check_tensor("logits", logits, tuple(logits.shape), torch.float32 if parts else routing.weights.dtype)
    check_tensor("routing.ids", routing.ids, (rows, top_k), torch.int64)
    check_tensor("routing.weights", routing.weights, (rows, top_k))
    check_tensor("routing.arrived", routing.arrived, (1,), torch.int32)
    if slots is not None:
        size = len(slots.expert)
        if size <= w * top_k:
            raise ValueError(f"slots has room for {size} experts, {w} tokens need {w * top_k + 1}. Allocate more.")
        check_tensor("slots.expert", slots.expert, (size,), torch.int32)
        check_tensor("slots.weight", slots.weight, (size, MAX_TOKENS), torch.float32)
        check_tensor("slots.used", slots.used, (1,), torch.int32)
        check_tensor("slots.of_pair", slots.of_pair, (len(slots.of_pair), top_k), torch.int32)
