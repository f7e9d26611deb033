"""Residual stream + outputs of each token's experts -> the new residual stream and its norm, the next input."""

import torch
from torch import Tensor

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..norm.add_rms import MAX_SIZE, add_rms_norm_ref, check_feature, norm_warps, rms_norm
from ..tiles import within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .route import ExpertSlots


def moe_combine_norm_ref(
    residual: Tensor,
    outputs: Tensor,
    slots: ExpertSlots,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    feature: Tensor | None = None,
) -> None:
    """Sum each token's routed experts, add the shared one, then `add_rms_norm_ref` with the zero-centred norm.

    Args:
        residual: `[w, H]`, becomes the new residual stream.
        outputs: `[S, 16, H]`, see `moe_experts`; a token reads its experts' rows only.
        slots: of the w tokens. weight: `[H]`. out: `[w, H]`, written. eps, feature: see `add_rms_norm_ref`.
    """
    w, count = len(residual), int(slots.used)
    rows = torch.arange(w, device=residual.device)

    wide = torch.promote_types(residual.dtype, torch.float32)
    routed = sum(outputs[slot, rows].to(wide) for slot in slots.of_pair[:w].long().unbind(1))
    assert isinstance(routed, Tensor)
    add_rms_norm_ref(
        residual,
        routed.to(residual.dtype) + outputs[count, :w],
        weight,
        out,
        eps=eps,
        zero_centered=True,
        feature=feature,
    )


@jit
def _moe_combine_norm_kernel(
    residual, outputs, slot_count, pair_slot, weight, out, feature, feature_stride, eps,
    H: tl.constexpr, BH: tl.constexpr, TOPK: tl.constexpr, HAS_FEATURE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    i_t, o_h = tl.program_id(0), tl.arange(0, BH)
    m_h, o_row = within(o_h, H, BH), i_t * H + o_h
    b_w = tl.load(weight + o_h, mask=m_h, other=0.0)
    await_previous(USE_PDL)
    b_r = tl.load(residual + o_row, mask=m_h, other=0.0)
    p_o = outputs + i_t * H + o_h
    shared = tl.load(p_o + tl.load(slot_count).to(tl.int64) * (16 * H), mask=m_h, other=0.0)
    acc = tl.zeros((BH,), tl.float32)
    for i in tl.static_range(TOPK):
        slot = tl.load(pair_slot + i_t * TOPK + i).to(tl.int64)
        acc += tl.load(p_o + slot * (16 * H), mask=m_h, other=0.0).to(tl.float32)
    start_next(USE_PDL)
    b_d = (acc.to(b_r.dtype).to(tl.float32) + shared.to(tl.float32)).to(b_r.dtype)
    b_r = (b_r.to(tl.float32) + b_d.to(tl.float32)).to(b_r.dtype)
    tl.store(residual + o_row, b_r, mask=m_h)
    if HAS_FEATURE:
        tl.store(feature + i_t * feature_stride + o_h, b_r, mask=m_h)
    tl.store(out + o_row, rms_norm(b_r, b_w, H, eps, True), mask=m_h)


@launcher
def moe_combine_norm(
    residual: Tensor,
    outputs: Tensor,
    slots: ExpertSlots,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
    feature: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """`moe_combine_norm_ref` in one launch.

    Args:
        residual, outputs, slots, weight, out, eps, feature: see `moe_combine_norm_ref`; w <= 16, H <= 8192.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on), which must not write
            `weight`.

    Raises:
        ValueError: for more tokens or columns, what the kernel does not read, or a device without it.
    """
    check_combine(residual, outputs, slots, weight, out, feature)
    (w, H), top_k = residual.shape, slots.of_pair.shape[1]
    block = triton.next_power_of_2(H)
    _moe_combine_norm_kernel[(w,)](
        residual, outputs, slots.used, slots.of_pair, weight, out,
        residual if feature is None else feature, H if feature is None else feature.stride(0), eps,
        H=H, BH=block, TOPK=top_k, HAS_FEATURE=feature is not None, num_warps=norm_warps(block),
        **launch_options(residual.device, overlap),
    )  # fmt: skip


def check_combine(
    residual: Tensor, outputs: Tensor, slots: ExpertSlots, weight: Tensor, out: Tensor, feature: Tensor | None
) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("residual", residual)
    if residual.ndim != 2 or not (1 <= len(residual) <= MAX_TOKENS and 1 <= residual.shape[1] <= MAX_SIZE):
        raise ValueError(
            f"residual is {list(residual.shape)}; the kernel takes [w, H] with 1 to {MAX_TOKENS} tokens and at most "
            f"{MAX_SIZE} columns."
        )
    (w, H), dtype = residual.shape, residual.dtype
    check_tensor("residual", residual, (w, H))
    check_tensor("outputs", outputs, (len(outputs), MAX_TOKENS, H), dtype)
    check_tensor("slots.used", slots.used, (1,), torch.int32)
    check_tensor("slots.of_pair", slots.of_pair, (len(slots.of_pair), slots.of_pair.shape[1]), torch.int32)
    if len(slots.of_pair) < w:
        raise ValueError(f"slots.of_pair has {len(slots.of_pair)} rows for {w} tokens. Allocate more.")
    check_tensor("weight", weight, (H,))
    check_tensor("out", out, (w, H), dtype)
    check_feature(feature, w, H, dtype)
