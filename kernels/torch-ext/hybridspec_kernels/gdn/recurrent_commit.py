"""States after every token -> the state after m committed tokens, all GDN layers at once, in place."""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..triton_support import await_previous, jit, launch_options, launcher, tl, triton

# states per program: eight a thread
BLOCK = 1024


def gdn_recurrent_commit_ref(state: Tensor, token_states: Tensor, num_committed: Tensor) -> None:
    """Arguments of `gdn_recurrent_commit`, which describes them."""
    last = token_states.index_select(1, (num_committed.long() - 1).clamp_min(0))[:, 0]
    state.copy_(torch.where(num_committed > 0, last, state))


@jit
def _gdn_recurrent_commit_kernel(
    state, token_states, num_committed, W: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, USE_PDL: tl.constexpr
):
    i_l = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < N
    await_previous(USE_PDL)
    m = tl.load(num_committed)
    if m > 0:
        b_s = tl.load(token_states + (i_l * W + m - 1) * N + o_n, mask=m_n)
        tl.store(state + i_l * N + o_n, b_s, mask=m_n)


@launcher
def gdn_recurrent_commit(state: Tensor, token_states: Tensor, num_committed: Tensor, *, overlap: bool = False) -> None:
    """Copy every layer's state after the last committed token over its state, in place.

    Args:
        state: `[L, HV, V, K]`, fp32, the states at the start of the round.
        token_states: `[L, W, HV, V, K]`, fp32, the states after each token; only token m's is read.
        num_committed: `[1]`, int32, on the state's device, 1..W. Read by the kernel, never by the host.
        overlap: start before the previous kernel ends.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    L, W, N = len(state), token_states.shape[1], state[0].numel()
    check_tensor("state", state, tuple(state.shape), torch.float32)
    check_tensor("token_states", token_states, (L, W, *state.shape[1:]), torch.float32)
    check_tensor("num_committed", num_committed, (1,), torch.int32)
    options = launch_options(state.device, overlap)
    _gdn_recurrent_commit_kernel[(triton.cdiv(N, BLOCK), L)](
        state, token_states, num_committed, W=W, N=N, BN=BLOCK, **options
    )
