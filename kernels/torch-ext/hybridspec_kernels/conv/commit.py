"""The convolution windows of all layers move through the m committed tokens, in place."""

import torch
from torch import Tensor


def conv_commit_ref(rows: Tensor, taps: int, num_committed: Tensor) -> None:
    """Make the window end at the last committed token.

    Args:
        rows: `[L, taps-1+W, C]`, per layer the window before the round, then the inputs of the round's tokens.
            The first `taps-1` rows are overwritten.
        taps: convolution width.
        num_committed: `[1]`, integer, on the rows' device, 0..W. Never read by the host.
    """
    window = torch.arange(taps - 1, device=rows.device) + num_committed
    rows[:, : taps - 1] = rows.index_select(1, window)
