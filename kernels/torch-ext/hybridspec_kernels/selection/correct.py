"""Router boundary -> corrected verification length: the routing correction (Eq. 6)."""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .select import MAX_BLOCK


def new_experts_ref(expert_ids: Tensor) -> Tensor:
    """How many experts each token adds to those of the tokens before it: U_0(i+1) - U_0(i).

    Args:
        expert_ids: `[W, topk]`, integer, distinct within a row.

    Returns:
        `[W]`, int32.
    """
    same = expert_ids[:, :, None, None] == expert_ids[None, None, :, :]
    earlier = torch.ones(len(expert_ids), len(expert_ids), dtype=torch.bool, device=expert_ids.device).tril(-1)
    seen = (same & earlier[:, None, :, None]).flatten(2).any(-1)
    return (~seen).sum(1, dtype=torch.int32)


def correct_length_ref(
    nominal_length: Tensor,
    stage0_length: Tensor,
    prefix_prob: Tensor,
    new_experts: Tensor,
    target_cost: Tensor,
    stage0_token_cost: Tensor,
    expert_cost: Tensor,
    mean_new_pairs: Tensor,
    mean_new_pairs_given: Tensor,
    throughput: Tensor,
) -> Tensor:
    """Keep the extra Stage-0 token iff `p_{w0} > rho * dL_c` (Eq. 6).

    Args:
        nominal_length, stage0_length: `[1]`, integer: w0 and u. Without u = w0 + 1 there is no extra token.
        prefix_prob: `[D]`. new_experts: `[W]`, integer; rows from u on are ignored.
        target_cost: `[W+1]`, seconds. stage0_token_cost, expert_cost: `[1]`, seconds (s and eta).
        mean_new_pairs: `[W+1]`; mean_new_pairs_given: `[W+1, topk+1]` (nbar_all(w0), nbar_all(w0 | n)), index = w0.
        throughput: `[1]`, rho, tokens per second.

    Returns:
        w_c, `[1]`, int32.
    """
    w0 = nominal_length.long()
    longest = len(target_cost) - 1
    extra_row = w0.clamp_max(longest - 1)
    new = new_experts.index_select(0, extra_row).long().clamp(0, mean_new_pairs_given.shape[1] - 1)
    pairs = mean_new_pairs_given.index_select(0, w0).gather(1, new[:, None])[:, 0] - mean_new_pairs[w0]
    step = target_cost[(w0 + 1).clamp_max(longest)] - target_cost[w0]
    extra_latency = step - stage0_token_cost + expert_cost * pairs
    worth = prefix_prob.index_select(0, (w0 - 1).clamp_max(len(prefix_prob) - 1)) > throughput * extra_latency
    covered = stage0_length == nominal_length + 1
    return nominal_length + (worth & covered).to(torch.int32)


@jit
def _correct_length_kernel(
    nominal_length, stage0_length, prefix_prob, expert_ids, target_cost, stage0_token_cost, expert_cost,
    mean_new_pairs, mean_new_pairs_given, throughput, out, W: tl.constexpr, TOPK: tl.constexpr, BW: tl.constexpr,
    BK: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Tables are loaded whole, so that no load waits for w0 but one, whose line is there by then."""
    o_w, o_k, o_g, o_p = tl.arange(0, BW), tl.arange(0, BK), tl.arange(0, BG), tl.arange(0, BP)
    m_w, m_g = o_w <= W, o_g <= TOPK
    start_next(USE_PDL)
    b_c = tl.load(target_cost + o_w, mask=m_w, other=0.0)
    b_m = tl.load(mean_new_pairs + o_w, mask=m_w, other=0.0)
    # [W+1, topk+1]
    o_t = o_w[:, None] * (TOPK + 1) + o_g[None, :]
    b_g = tl.load(mean_new_pairs_given + o_t, mask=m_w[:, None] & m_g[None, :], other=0.0)
    s, eta, rho = tl.load(stage0_token_cost), tl.load(expert_cost), tl.load(throughput)
    await_previous(USE_PDL)
    t_p, i_p = o_p // BK, o_p % BK
    every = tl.load(expert_ids + t_p * TOPK + i_p, mask=(t_p < W) & (i_p < TOPK), other=-1).to(tl.int32)
    # p_i is at i - 1
    b_p = tl.load(prefix_prob + o_w - 1, mask=(o_w > 0) & (o_w < W), other=0.0)
    w0, u = tl.load(nominal_length), tl.load(stage0_length)

    # where there is no extra token, the last row stands in
    mine = tl.load(expert_ids + tl.minimum(w0, W - 1) * TOPK + o_k, mask=o_k < TOPK, other=-1).to(tl.int32)
    seen = (mine[:, None] == every[None, :]) & (t_p < w0)[None, :]
    new = tl.sum(((tl.max(seen.to(tl.int32), 1) == 0) & (o_k < TOPK)).to(tl.int32), 0)

    at_w0 = o_w == w0
    given = tl.sum(tl.sum(tl.where(at_w0[:, None] & (o_g == new)[None, :], b_g, 0.0), 1), 0)
    pairs = given - tl.sum(tl.where(at_w0, b_m, 0.0), 0)
    step = tl.sum(tl.where(o_w == w0 + 1, b_c, 0.0) - tl.where(at_w0, b_c, 0.0), 0)
    worth = tl.sum(tl.where(at_w0, b_p, 0.0), 0) > rho * (step - s + eta * pairs)
    tl.store(out, tl.minimum(w0 + (worth & (u == w0 + 1)).to(tl.int32), u))


@launcher
def correct_length(
    nominal_length: Tensor,
    stage0_length: Tensor,
    prefix_prob: Tensor,
    expert_ids: Tensor,
    target_cost: Tensor,
    stage0_token_cost: Tensor,
    expert_cost: Tensor,
    mean_new_pairs: Tensor,
    mean_new_pairs_given: Tensor,
    throughput: Tensor,
    out: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """The new experts of the extra token and Eq. 6 in one launch of one program.

    Args:
        nominal_length, stage0_length: `[1]`, int32: w0 in 1..W and u.
        expert_ids: `[W, topk]`, int64, W <= 64; rows from u on are ignored.
        prefix_prob, target_cost, stage0_token_cost, expert_cost, mean_new_pairs, mean_new_pairs_given, throughput:
            fp32, see `correct_length_ref`.
        out: `[1]`, int32, written: w, the smaller of `correct_length_ref` and u.
        overlap: start before the previous kernel ends, which must not be one that writes a table.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    check_correct(
        nominal_length, stage0_length, prefix_prob, expert_ids, target_cost, stage0_token_cost, expert_cost,
        mean_new_pairs, mean_new_pairs_given, throughput, out,
    )  # fmt: skip
    W, top_k = expert_ids.shape
    BW, BK, BG = (triton.next_power_of_2(n) for n in (W + 1, top_k, top_k + 1))
    _correct_length_kernel[(1,)](
        nominal_length, stage0_length, prefix_prob, expert_ids, target_cost, stage0_token_cost, expert_cost,
        mean_new_pairs, mean_new_pairs_given, throughput, out, W=W, TOPK=top_k, BW=BW, BK=BK, BG=BG,
        BP=triton.next_power_of_2(W) * BK, num_warps=1, **launch_options(out.device, overlap),
    )  # fmt: skip


def check_correct(
    nominal_length: Tensor, stage0_length: Tensor, prefix_prob: Tensor, expert_ids: Tensor, target_cost: Tensor,
    stage0_token_cost: Tensor, expert_cost: Tensor, mean_new_pairs: Tensor, mean_new_pairs_given: Tensor,
    throughput: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError for inputs that the correction would read wrongly."""
    if expert_ids.ndim != 2 or not 2 <= expert_ids.shape[0] <= MAX_BLOCK or expert_ids.shape[1] < 1:
        raise ValueError(
            f"expert_ids is {list(expert_ids.shape)}; correct_length takes [W, topk] with 2 to {MAX_BLOCK} tokens and "
            "at least one expert. Without experts there is nothing to correct; use correct_length_ref for more tokens."
        )
    W, top_k = expert_ids.shape
    check_tensor("expert_ids", expert_ids, (W, top_k), torch.int64)
    for name, length in (("nominal_length", nominal_length), ("stage0_length", stage0_length), ("out", out)):
        check_tensor(name, length, (1,), torch.int32)
    sizes = {"prefix_prob": (prefix_prob, (W - 1,)), "target_cost": (target_cost, (W + 1,)),
             "stage0_token_cost": (stage0_token_cost, (1,)), "expert_cost": (expert_cost, (1,)),
             "mean_new_pairs": (mean_new_pairs, (W + 1,)), "throughput": (throughput, (1,)),
             "mean_new_pairs_given": (mean_new_pairs_given, (W + 1, top_k + 1))}  # fmt: skip
    for name, (tensor, shape) in sizes.items():
        check_tensor(name, tensor, shape, torch.float32)
