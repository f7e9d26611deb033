"""Router logits of w tokens -> experts and weights of each token, and the list of distinct experts to run."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import INPUT_DTYPES, MAX_TOKENS, check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

MAX_EXPERTS = 4096
# a weight that no softmax gives
NOT_CHOSEN = -1.0


class Routing(NamedTuple):
    """Experts of each token, as transformers' router gives them: distinct, in descending order of their logits.

    Attributes:
        ids: `[w, topk]`, int64. weights: `[w, topk]`, renormalised, model dtype.
    """

    ids: Tensor
    weights: Tensor


class ExpertSlots(NamedTuple):
    """The distinct experts of w tokens, each to be read once; slot `used` is the shared expert.

    Attributes:
        expert: `[S]`, int32, S > w * topk: experts in ascending order, then garbage.
        weight: `[S, 16]`, fp32: what the slot's output counts for in each token, -1 if the token did not choose it.
        used: `[1]`, int32, distinct experts.
        of_pair: `[w, topk]`, int32, the slot of each token's experts, in their order in `Routing`.
        ready: `[S]`, int32, 0: where `moe_experts` counts what is done of a slot.
    """

    expert: Tensor
    weight: Tensor
    used: Tensor
    of_pair: Tensor
    ready: Tensor

    @classmethod
    def allocate(cls, tokens: int, top_k: int, device: torch.device) -> "ExpertSlots":
        """Room for the experts of `tokens` tokens and the shared one."""
        slots = tokens * top_k + 1
        return cls(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, MAX_TOKENS, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(tokens, top_k, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )


def moe_route_ref(logits: Tensor, top_k: int) -> Routing:
    """Softmax, top-k and renormalisation as in transformers' `Qwen3_5MoeTopKRouter.forward`: logits `[w, E]`."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights, ids = logits.softmax(-1, dtype=wide).topk(top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)
    return Routing(ids, weights)


def moe_slots_ref(ids: Tensor, weights: Tensor, shared_gate: Tensor) -> ExpertSlots:
    """The slots of tokens with experts `ids` `[w, topk]`, their weights, and shared-expert gate logits `[w]`."""
    experts, of_pair = ids.unique(return_inverse=True)
    weight = torch.full((len(experts) + 1, MAX_TOKENS), NOT_CHOSEN, dtype=weights.dtype, device=ids.device)
    for slot, expert in enumerate(experts):
        chosen = (ids == expert).any(-1)
        weight[slot, : len(ids)][chosen] = (weights * (ids == expert)).sum(-1)[chosen]
    weight[len(experts), : len(ids)] = torch.sigmoid(shared_gate)
    count = torch.tensor([len(experts)], dtype=torch.int32, device=ids.device)
    ready = torch.zeros(len(experts) + 1, dtype=torch.int32, device=ids.device)
    return ExpertSlots(experts.to(torch.int32), weight, count, of_pair.to(torch.int32), ready)


@partial(jit, do_not_specialize=["W"])
def _moe_route_kernel(
    logits, ids, weights, slot_expert, slot_weight, slot_count, pair_slot, slot_ready, W,
    E: tl.constexpr, ROW: tl.constexpr, TOPK: tl.constexpr, EP: tl.constexpr, LANES: tl.constexpr, WP: tl.constexpr,
    KP: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, ROUTE: tl.constexpr,
    SAVE: tl.constexpr, LIST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program, a warp a token: ROUTE chooses or loads its experts, SAVE stores them, LIST makes slots of them."""
    # pairs of a token and its experts; behind these comes the shared one
    o_p = tl.arange(0, WP * KP)
    o_t, o_k = o_p // KP, o_p % KP
    m_pair, m_shared, o_pair = (o_t < W) & (o_k < TOPK), (o_t < W) & (o_k == TOPK), o_t * TOPK + o_k
    start_next(USE_PDL)
    await_previous(USE_PDL)
    if LIST:
        o_s, o_f = tl.arange(0, SLOTS), tl.arange(0, 16 * SLOTS)
        tl.store(slot_ready + o_s, 0, mask=o_s < W * TOPK + 1)
        tl.store(slot_weight + o_f, -1.0, mask=o_f < (W * TOPK + 1) * 16)
    if ROUTE:
        keys = load_keys(logits, W, E, ROW, EP, LANES, WP, PARTS, DTYPE)
    if LIST:
        shared = load_logits(logits + o_t * ROW + E, m_shared, W, ROW, PARTS, DTYPE)
    if ROUTE:
        expert, weight = choose_experts(keys, TOPK, KP, DTYPE)
        # one dimension: of two, Triton may give the tokens to the lanes, and pairs move between warps
        expert, weight = tl.reshape(expert, (WP * KP,)), tl.reshape(weight, (WP * KP,))
        if SAVE:
            tl.store(ids + o_pair, expert.to(tl.int64), mask=m_pair)
            tl.store(weights + o_pair, weight, mask=m_pair)
    else:
        expert = tl.load(ids + o_pair, mask=m_pair, other=0).to(tl.int32)
        weight = tl.load(weights + o_pair, mask=m_pair, other=0.0)
    if LIST:
        weight = tl.where(m_shared, tl.sigmoid(shared.to(tl.float32)).to(DTYPE), weight).to(tl.float32)
        # an expert that does not exist is behind all others, and so is the shared one
        slot = count_below(tl.reshape(tl.where(m_pair, expert, EP), (WP, KP)), EP)
        slot = tl.reshape(slot, (WP * KP,))
        tl.store(slot_expert + slot, expert, mask=m_pair)
        tl.store(pair_slot + o_pair, slot, mask=m_pair)
        tl.store(slot_count + o_t, slot, mask=m_shared & (o_t == 0))
        # all rows are filled before some are overwritten; the warps have just met
        tl.debug_barrier()
        tl.store(slot_weight + slot * 16 + o_t, weight, mask=m_pair | m_shared)


@jit
def load_logits(p_x, mask, W, ROW: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of the logits' parts, rounded to the model's dtype."""
    b_x = tl.load(p_x, mask=mask, other=0.0)
    for i in tl.static_range(1, PARTS):
        b_x += tl.load(p_x + i * W * ROW, mask=mask, other=0.0)
    return b_x.to(DTYPE)


@jit
def load_keys(
    logits, W, E: tl.constexpr, ROW: tl.constexpr, EP: tl.constexpr, LANES: tl.constexpr, WP: tl.constexpr,
    PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Keys of all experts, see `ranked`, as tiles `[WP, LANES]`; 0 for experts that do not exist."""
    o_t, o_l, keys = tl.arange(0, WP)[:, None], tl.arange(0, LANES)[None, :], ()
    p_x = logits + o_t * ROW + o_l
    for i in tl.static_range(EP // LANES):
        o_e = i * LANES + o_l
        b_x = load_logits(p_x + i * LANES, (o_t < W) & (o_e < E), W, ROW, PARTS, DTYPE)
        keys = keys + (tl.where(o_e < E, ranked(b_x, o_e), 0),)  # type: ignore[assignment]
    return keys


@jit
def choose_experts(keys, TOPK: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr):
    """Every token's top-k and its weights `[WP, KP]`; the softmax over all experts cancels in the renormalisation."""
    o_k = tl.arange(0, KP)[None, :]
    best = row_maximum(keys)
    top = score_of(best, DTYPE)
    step, chosen, total = best, tl.where(o_k == 0, best, 0), tl.exp(top - top)
    for i in tl.static_range(1, TOPK):
        # relative to the last choice, keys from there on wrap around: the largest is the next choice
        keys = lowered(keys, step)
        step = row_maximum(keys)
        best += step
        chosen = tl.where(o_k == i, best, chosen)
        total += tl.exp(score_of(best, DTYPE) - top)
    score = tl.exp(score_of(chosen, DTYPE) - top)
    return 4095 - (chosen & 4095).to(tl.int32), (score / total).to(DTYPE)


@jit
def row_maximum(tiles):
    """Maximum of each token's row over all tiles, `[WP, 1]`."""
    x = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        x = tl.maximum(x, tiles[i])
    return tl.max(x, 1, keep_dims=True)


@jit
def lowered(tiles, step):
    """Unsigned tiles minus `step` `[WP, 1]`, wrapping around."""
    lower = ()
    for i in tl.static_range(len(tiles)):
        lower = lower + (tiles[i] - step,)
    return lower


@jit
def ranked(x, o_e):
    """An unsigned key for every logit: ordered as x, the lower expert first; 0 is below all of them.

    16-bit numbers leave the lower bits of their fp32 form to the expert; fp32 needs keys of 64 bits.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) | -0x80000000)
    if x.dtype.primitive_bitwidth == 16:
        return ((order & -4096) | (4095 - o_e)).to(tl.uint32, bitcast=True)
    else:
        return (order.to(tl.uint32, bitcast=True).to(tl.uint64) << 12) | (4095 - o_e).to(tl.uint64)


@jit
def score_of(key, DTYPE: tl.constexpr):
    """The number that a key carries, fp32."""
    if DTYPE.primitive_bitwidth == 16:
        order = key.to(tl.int32, bitcast=True)
        return ((order ^ (~(order >> 31) | -0x80000000)) & -4096).to(tl.float32, bitcast=True)
    else:
        order = (key >> 12).to(tl.uint32).to(tl.int32, bitcast=True)
        return (order ^ (~(order >> 31) | -0x80000000)).to(tl.float32, bitcast=True)


@jit
def count_below(expert, EP: tl.constexpr):
    """How many distinct experts below EP are below each of `expert` `[WP, KP]`; in a row, those below EP are distinct.

    An expert is a bit in one of EP / 32 words.
    """
    # the words are the first dimension, which Triton leaves to a thread's registers
    o_w, word, bit = tl.arange(0, EP // 32)[:, None, None], (expert >> 5)[None, :, :], (1 << (expert & 31))[None, :, :]
    words = tl.reduce_or(tl.sum(tl.where(word == o_w, bit, 0), 2), 1)
    below = tl.where(o_w < word, -1, tl.where(o_w == word, bit - 1, 0))
    return tl.sum(bits_set(words[:, None, None] & below), 0)


@jit
def bits_set(x):
    """How many bits of an int32 are set; the compiler makes one instruction of it."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@launcher
def moe_route(
    logits: Tensor,
    routing: Routing | None,
    slots: ExpertSlots | None,
    *,
    experts: int,
    dtype: torch.dtype,
    choose: bool = True,
    overlap: bool = False,
) -> None:
    """Route w tokens and list their distinct experts, in one launch of one program.

    Args:
        logits: `[w, N]`, model dtype, or `[P, w, N]`, fp32 parts whose sum is rounded to it: the router's E logits,
            the shared expert's gate logit, and what else was computed beside them.
        routing: written; with `choose=False` read instead: its first w rows say which experts the tokens chose. None
            if only the slots matter.
        slots: written; None leaves the list for later.
        experts: E.
        dtype: the model's, to which logits and weights are rounded.
        choose: whether to choose experts by the logits. The router of Layer 0 runs once, in Stage 0; Stage 1 lists the
            experts of the tokens that it verifies.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on).

    Raises:
        ValueError: for more than 16 tokens or 4096 experts, neither routing nor slots, a layout or dtype that the
            kernel does not read, or a device without it.
    """
    check_route(logits, routing, slots, experts, dtype, choose)
    w, row = logits.shape[-2:]
    # what is neither read nor written still needs a pointer
    routed = (logits,) * 2 if routing is None else routing
    listed = (logits,) * 5 if slots is None else slots
    top_k = chosen_experts(routing, slots)
    padded = max(32, triton.next_power_of_2(experts))
    tokens, lanes, warps = route_shape(w, padded)
    _moe_route_kernel[(1,)](
        logits, *routed, *listed, w, E=experts, ROW=row, TOPK=top_k, EP=padded, LANES=lanes, WP=tokens,
        KP=max(32, triton.next_power_of_2(top_k + 1)), SLOTS=triton.next_power_of_2(tokens * top_k + 1),
        PARTS=len(logits) if logits.ndim == 3 else 1, DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        ROUTE=choose, SAVE=choose and routing is not None, LIST=slots is not None, num_warps=warps,
        # keys wrap around; Triton's debug mode would object
        sanitize_overflow=False, **launch_options(logits.device, overlap),
    )  # fmt: skip


def route_shape(w: int, padded: int) -> tuple[int, int, int]:
    """Tokens of a tile, experts of a token in it, and warps, for E padded to a power of two.

    A warp a token, so that a maximum needs no barrier, with up to 16 experts a thread; more experts need more warps.
    """
    tokens, lanes = triton.next_power_of_2(w), max(32, padded // 16)
    return tokens, lanes, min(32, tokens * lanes // 32)


def chosen_experts(routing: Routing | None, slots: ExpertSlots | None) -> int:
    """Experts per token, by the buffers.

    Raises:
        ValueError: if there are none.
    """
    if routing is not None:
        return routing.ids.shape[1]
    if slots is None:
        raise ValueError("routing and slots are None. Pass what to write, one or both.")
    return slots.of_pair.shape[1]


def check_route(
    logits: Tensor, routing: Routing | None, slots: ExpertSlots | None, experts: int, dtype: torch.dtype, choose: bool
) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    if dtype not in INPUT_DTYPES:
        raise ValueError(f"dtype is {dtype}; the kernel takes {', '.join(map(str, INPUT_DTYPES))}. Convert the model.")
    if not choose and (routing is None or slots is None):
        raise ValueError("choose=False makes slots of a routing, and one of them is None. Pass both.")
    if not (logits.ndim in (2, 3) and 1 <= logits.shape[-2] <= MAX_TOKENS and 1 <= experts <= MAX_EXPERTS):
        raise ValueError(
            f"logits is {list(logits.shape)} for {experts} experts; the kernel takes [w, N] or [P, w, N], "
            f"1 to {MAX_TOKENS} tokens and at most {MAX_EXPERTS} experts."
        )
    (w, row), top_k = logits.shape[-2:], chosen_experts(routing, slots)
    if not 1 <= top_k <= experts < row:
        raise ValueError(
            f"logits has {row} columns for {experts} experts, {top_k} a token. Pass E + 1 logits or more, and at most "
            "E experts a token."
        )
    check_tensor("logits", logits, tuple(logits.shape), torch.float32 if logits.ndim == 3 else dtype)
    if routing is not None:
        rows = len(routing.ids)
        if rows < w:
            raise ValueError(f"routing.ids has {rows} rows for {w} tokens. Allocate more.")
        check_tensor("routing.ids", routing.ids, (rows, top_k), torch.int64)
        check_tensor("routing.weights", routing.weights, (rows, top_k), dtype)
    if slots is not None:
        size, rows = len(slots.expert), len(slots.of_pair)
        if size <= w * top_k or rows < w:
            raise ValueError(
                f"slots has room for {size} experts of {rows} tokens, {w} tokens need {w * top_k + 1}. Allocate more."
            )
        check_tensor("slots.expert", slots.expert, (size,), torch.int32)
        check_tensor("slots.weight", slots.weight, (size, MAX_TOKENS), torch.float32)
        check_tensor("slots.used", slots.used, (1,), torch.int32)
        check_tensor("slots.of_pair", slots.of_pair, (rows, top_k), torch.int32)
        check_tensor("slots.ready", slots.ready, (size,), torch.int32)
