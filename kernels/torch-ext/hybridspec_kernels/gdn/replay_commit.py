"""m committed tokens -> a longer ring, or a new checkpoint and an empty ring (Eq. 2): ReplaySSM's commit."""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..tiles import dot_precision, split_dot, within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton
from .replay_verify import check_ring, replay_ref
from .verify import CompactFactors


def gdn_replay_commit_ref(
    state: Tensor, ring: CompactFactors, count: Tensor, num_committed: Tensor, *, max_length: int
) -> None:
    """Arguments of `gdn_replay_commit`, which describes them."""
    n = count + num_committed
    full = n + max_length > ring.z.shape[1]
    state.copy_(torch.where(full, replay_ref(state, ring, n), state))
    count.copy_(torch.where(full, 0, n))


@jit
def _gdn_replay_fold_kernel(
    state, ring_z, ring_k, ring_g, count, num_committed,
    MAX_LENGTH: tl.constexpr, R: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    i_v, i_hv, i_l = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_r, o_k = tl.arange(0, R), tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = within(o_k, K, BK), within(o_v, V, BV)
    start_next(USE_PDL)
    await_previous(USE_PDL)
    n = tl.load(count) + tl.load(num_committed)
    if n + MAX_LENGTH > R:
        m_r = o_r < n
        p_g = ring_g + i_l * R * HV + i_hv
        p_s = state + (i_l * HV + i_hv) * (V * K) + o_v[:, None] * K + o_k[None, :]
        p_k = ring_k + i_l * R * H * K + i_hv // (HV // H) * K + o_r[:, None] * (H * K) + o_k[None, :]
        p_z = ring_z + i_l * R * HV * V + i_hv * V + o_r[None, :] * (HV * V) + o_v[:, None]
        # [BV, BK], [R], [R, BK], [BV, R]
        b_s = tl.load(p_s, mask=m_v[:, None] & m_k[None, :], other=0.0)
        g_n = tl.load(p_g + (n - 1) * HV)
        r_g = tl.load(p_g + o_r * HV, mask=m_r, other=0.0)
        r_k = tl.load(p_k, mask=m_r[:, None] & m_k[None, :], other=0.0)
        r_z = tl.load(p_z, mask=m_v[:, None] & m_r[None, :], other=0.0)
        r_z *= tl.exp(tl.where(m_r, g_n - r_g, float("-inf")))[None, :]
        b_s = split_dot(r_z, r_k.to(tl.float32), b_s * tl.exp(g_n), PRECISION)
        tl.store(p_s, b_s, mask=m_v[:, None] & m_k[None, :])


@jit
def _gdn_replay_advance_kernel(count, num_committed, MAX_LENGTH: tl.constexpr, R: tl.constexpr, USE_PDL: tl.constexpr):
    await_previous(USE_PDL)
    n = tl.load(count) + tl.load(num_committed)
    tl.store(count, tl.where(n + MAX_LENGTH > R, 0, n))


@launcher
def gdn_replay_commit(
    state: Tensor,
    ring: CompactFactors,
    count: Tensor,
    num_committed: Tensor,
    *,
    max_length: int,
    overlap: bool = False,
) -> None:
    """Add the last block's first m tokens to the ring; fold a ring without room for another block into the state.

    Args:
        state: `[L, HV, V, K]`, fp32, the checkpoints; changed by a fold only.
        ring: as for `gdn_replay_verify`, with a leading L: the block's updates lie behind the first `count` entries.
        count: `[1]`, int32, on the device: increased by m, or 0 after a fold.
        num_committed: `[1]`, int32, on the device, m in 0..max_length. Both are never read by the host.
        max_length: tokens of the longest block that may follow.
        overlap: start before the previous kernel ends.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    L, HV, V, K = state.shape
    R, H = ring.k.shape[1:3]
    check_tensor("state", state, (L, HV, V, K), torch.float32)
    check_ring(ring, (L,), HV, V, H, K, ring.k.dtype, max_length)
    for name, tensor in (("count", count), ("num_committed", num_committed)):
        check_tensor(name, tensor, (1,), torch.int32)
    options = launch_options(state.device, overlap)
    BK, BV = max(16, triton.next_power_of_2(K)), min(32, max(16, triton.next_power_of_2(V)))
    _gdn_replay_fold_kernel[(triton.cdiv(V, BV), HV, L)](
        state, *ring, count, num_committed,
        MAX_LENGTH=max_length, R=R, H=H, HV=HV, K=K, V=V, BK=BK, BV=BV,
        PRECISION=dot_precision(ring.k.dtype), num_warps=8, **options,
    )  # fmt: skip
    # a launch of its own: the programs of the fold read the count at different times
    _gdn_replay_advance_kernel[(1,)](count, num_committed, MAX_LENGTH=max_length, R=R, num_warps=1, **options)
