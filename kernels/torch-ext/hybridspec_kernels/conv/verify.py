"""Rolling window + w new rows -> causal depthwise convolution and SiLU of a GDN layer."""

from torch import Tensor
from torch.nn import functional as F

from ..checks import check_tensor
from ..tiles import convolve, load_taps, within
from ..triton_support import await_previous, jit, launch_options, launcher, start_next, tl, triton

# channels per program
BLOCK = 256


def conv_verify_ref(rows: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution followed by SiLU.

    Args:
        rows: `[taps-1+W, C]`, the last `taps-1` inputs before the block, then the block's inputs.
        weight: `[taps, C]`, the transposed weight of the layer's `nn.Conv1d`, which has no bias.

    Returns:
        `[W, C]` in rows' dtype.
    """
    out = F.conv1d(rows.t()[None].to(weight.dtype), weight.t()[:, None], groups=weight.shape[1])
    return F.silu(out)[0].t().to(rows.dtype)


@jit
def _conv_verify_kernel(
    rows, weight, out, C: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr, USE_PDL: tl.constexpr
):
    i_t = tl.program_id(1)
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    m_c = within(o_c, C, BC)
    start_next(USE_PDL)
    weights = load_taps(weight + o_c, m_c, C, TAPS)
    await_previous(USE_PDL)
    b_y = convolve(load_taps(rows + i_t * C + o_c, m_c, C, TAPS), weights, TAPS)
    tl.store(out + i_t * C + o_c, b_y, mask=m_c)


@launcher
def conv_verify(rows: Tensor, weight: Tensor, out: Tensor, *, overlap: bool = False) -> None:
    """`conv_verify_ref` into a given buffer: fp32 sums, rounded to rows' dtype before and after the SiLU.

    Args:
        rows: `[taps-1+W, C]`, the last `taps-1` inputs before the block, then the block's inputs.
        weight: `[taps, C]`.
        out: `[W, C]`, rows' dtype, written.
        overlap: start before the previous kernel ends, which must not be one that writes `weight`.

    Raises:
        ValueError: if a tensor has another shape, dtype or layout, or if there is no kernel for the device.
    """
    (taps, C), W = weight.shape, len(out)
    check_tensor("rows", rows, (taps - 1 + W, C))
    check_tensor("weight", weight, (taps, C))
    check_tensor("out", out, (W, C), rows.dtype)
    options = launch_options(rows.device, overlap)
    _conv_verify_kernel[(triton.cdiv(C, BLOCK), W)](
        rows, weight, out, C=C, TAPS=taps, BC=BLOCK, num_warps=1, **options
    )
