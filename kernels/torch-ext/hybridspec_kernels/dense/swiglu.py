"""Hidden states of w tokens -> `silu(gate) * up` of two linear layers, weights read once."""

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from ..checks import MAX_TOKENS, check_input_dtype, check_tensor
from ..tiles import dot_precision, input_dot, swiglu
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton


def swiglu_linear_ref(x: Tensor, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """`silu(x gate^T) * (x up^T)`: x `[w, D]`, weights `[N, D]`, out `[w, N]`."""
    out.copy_(F.silu(F.linear(x, gate)) * F.linear(x, up))


@partial(jit, do_not_specialize=["W"])
def _swiglu_linear_kernel(
    x, gate, up, out, W,
    D: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs."""
    o_n, o_t, o_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16), tl.arange(0, BD)
    m_n, m_t = o_n < N, o_t < W
    o_w = o_n.to(tl.int64)[:, None] * D + o_d[None, :]
    p_x = x + o_t[:, None] * D + o_d[None, :]
    start_next(USE_PDL)
    await_previous(USE_PDL)
    b_g, b_u = tl.zeros((16, BN), tl.float32), tl.zeros((16, BN), tl.float32)
    for i_d in range(0, D, BD):
        m_d = (o_d < D - i_d)[None, :]
        b_x = tl.load(p_x + i_d, mask=m_t[:, None] & m_d, other=0.0)
        b_g += input_dot(b_x, tl.trans(tl.load(gate + o_w + i_d, mask=m_n[:, None] & m_d, other=0.0)), PRECISION)
        b_u += input_dot(b_x, tl.trans(tl.load(up + o_w + i_d, mask=m_n[:, None] & m_d, other=0.0)), PRECISION)
    b_o = swiglu(b_g, b_u, out.dtype.element_ty)
    tl.store(out + o_t[:, None] * N + o_n[None, :], b_o, mask=m_t[:, None] & m_n[None, :])


@launcher
def swiglu_linear(x: Tensor, gate: Tensor, up: Tensor, out: Tensor, *, overlap: bool = False) -> None:
    """`swiglu_linear_ref` in one launch.

    Args:
        x: `[w, D]`, w <= 16. gate, up: `[N, D]`, x's dtype. out: `[w, N]`, x's dtype; written.
        overlap: let the launch overlap with the kernel in front of it in the stream (SM90 on); that kernel must not
            write a weight.

    Raises:
        ValueError: for more than 16 tokens, a layout that the kernel does not read, or a device without it.
    """
    check_swiglu(x, gate, up, out)
    (w, D), N = x.shape, len(gate)
    block_n, block_d, stages = (32, 128, 4) if x.element_size() == 2 else (16, 64, 2)
    _swiglu_linear_kernel[(triton.cdiv(N, block_n),)](
        x, gate, up, out, w, D=D, N=N, BN=block_n, BD=min(block_d, max(16, triton.next_power_of_2(D))),
        PRECISION=dot_precision(x.dtype), num_warps=4, num_stages=stages, **launch_options(x.device, overlap),
    )  # fmt: skip


def check_swiglu(x: Tensor, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Raise ValueError for inputs that the kernel would read wrongly."""
    check_input_dtype("x", x)
    if x.ndim != 2 or not 1 <= len(x) <= MAX_TOKENS:
        raise ValueError(f"x is {list(x.shape)}; the kernel takes [w, D] with 1 to {MAX_TOKENS} tokens.")
    (w, D), N = x.shape, len(gate)
    check_tensor("x", x, (w, D))
    check_tensor("gate", gate, (N, D), x.dtype)
    check_tensor("up", up, (N, D), x.dtype)
    check_tensor("out", out, (w, N), x.dtype)
