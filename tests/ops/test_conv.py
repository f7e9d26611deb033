"""The causal convolution with its rolling window, and the window's commit."""

import pytest
import torch
from gdn_blocks import DEVICE, poisoned
from torch.nn import functional as F

from hybridspec_kernels import conv_commit_ref, conv_verify_ref
from hybridspec_kernels.conv.verify import conv_verify


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("taps", [2, 4])
def test_conv_matches_direct_sum(W, taps):
    torch.manual_seed(0)
    rows, weight = torch.randn(taps - 1 + W, 6, dtype=torch.float64), torch.randn(taps, 6, dtype=torch.float64)
    direct = torch.stack([(rows[i : i + taps] * weight).sum(0) for i in range(W)])
    torch.testing.assert_close(conv_verify_ref(rows, weight), F.silu(direct), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("C", [6, 300])
@pytest.mark.parametrize("W, taps", [(1, 2), (2, 3), (5, 4), (16, 4), (3, 8)])
def test_conv_kernel_matches_ref(W, taps, C):
    pytest.importorskip("triton")
    rows, weight = torch.randn(taps - 1 + W, C, device=DEVICE), torch.randn(taps, C, device=DEVICE)
    out = poisoned(W, C)
    conv_verify(rows, weight, out)
    torch.testing.assert_close(out.double(), conv_verify_ref(rows.double(), weight.double()), rtol=1e-5, atol=1e-6)


def test_conv_kernel_rounds_between_convolution_and_silu():
    pytest.importorskip("triton")
    rows, weight = (torch.randn(n, 300, device=DEVICE).half() for n in (3 + 16, 4))
    out = poisoned(16, 300, dtype=torch.float16)
    conv_verify(rows, weight, out)
    sums = torch.stack([(rows[i : i + 4].double() * weight.double()).sum(0) for i in range(16)])
    # an fp32 sum and an exact one round to different neighbours only near a tie
    assert (out == F.silu(sums.half().float()).half()).float().mean() > 0.99
    assert (out == F.silu(sums.float()).half()).float().mean() < 0.9


def test_conv_kernel_refuses_what_it_would_read_wrongly():
    pytest.importorskip("triton")
    rows, weight, out = (torch.randn(n, 6, device=DEVICE) for n in (5, 4, 2))
    with pytest.raises(ValueError, match=r"rows is \[4, 6\] torch.float32, contiguous.*contiguous \[5, 6\]"):
        conv_verify(rows[:4], weight, out)
    with pytest.raises(ValueError, match="weight is .*strides"):
        conv_verify(rows, weight.t().contiguous().t(), out)
    with pytest.raises(ValueError, match="out is .*torch.float16"):
        conv_verify(rows, weight, out.half())


@pytest.mark.gpu
@pytest.mark.parametrize("W", [1, 2, 5, 16])
def test_conv_kernel_rounds_as_pytorch_in_bf16(W):
    rows, weight = (torch.randn(n, 8192, device=DEVICE).bfloat16() for n in (3 + W, 4))
    out = poisoned(W, 8192, dtype=torch.bfloat16)
    conv_verify(rows, weight, out)
    # the order of an fp32 sum decides ties only
    assert (out == conv_verify_ref(rows, weight)).float().mean() > 0.99
    torch.testing.assert_close(out, conv_verify_ref(rows, weight), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("m", range(0, 9))
def test_commit_moves_the_window_exactly(m):
    rows = torch.randn(3, 3 + 8, 6)
    before = rows.clone()
    conv_commit_ref(rows, 4, torch.tensor([m], dtype=torch.int32))
    assert torch.equal(rows[:, :3], before[:, m : m + 3])
    assert torch.equal(rows[:, 3:], before[:, 3:])
