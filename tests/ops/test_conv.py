"""The causal convolution with its rolling window, and the window's commit."""

import pytest
import torch
from torch.nn import functional as F

from hybridspec_kernels import conv_commit_ref, conv_verify_ref


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("taps", [2, 4])
def test_conv_matches_direct_sum(W, taps):
    torch.manual_seed(0)
    rows, weight = torch.randn(taps - 1 + W, 6, dtype=torch.float64), torch.randn(6, taps, dtype=torch.float64)
    direct = torch.stack([(rows[i : i + taps] * weight.t()).sum(0) for i in range(W)])
    torch.testing.assert_close(conv_verify_ref(rows, weight), F.silu(direct), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("m", range(0, 9))
def test_commit_moves_the_window_exactly(m):
    rows = torch.randn(3, 3 + 8, 6)
    before = rows.clone()
    conv_commit_ref(rows, 4, torch.tensor([m], dtype=torch.int32))
    assert torch.equal(rows[:, :3], before[:, m : m + 3])
    assert torch.equal(rows[:, 3:], before[:, 3:])
