"""Rolling window + w new rows -> causal depthwise convolution and SiLU of a GDN layer."""

from torch import Tensor
from torch.nn import functional as F


def conv_verify_ref(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution followed by SiLU.

    Args:
        rows: `[taps-1+W, C]`, the last `taps-1` inputs before the block, then the block's inputs.
        weight: `[C, taps]`. bias: `[C]` or None.

    Returns:
        `[W, C]` in rows' dtype.
    """
    out = F.conv1d(rows.t()[None].to(weight.dtype), weight[:, None], bias, groups=weight.shape[0])
    return F.silu(out)[0].t().to(rows.dtype)
