"""The head's kernels against logits written out: tokens, probabilities, entropies; also infinite and NaN logits."""

from math import floor, log2

import pytest
import torch
from gdn_blocks import DEVICE, poisoned
from support.kernels import needs_triton
from torch.nn import functional as F

from hybridspec_kernels.head.choose import HeadScratch, head_argmax, head_argmax_ref
from hybridspec_kernels.head.draft import head_draft, head_draft_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def whole_numbers(w, N, H, dtype):
    """Hidden states and weights whose logits every order of addition gives exactly; 16 bits must round them."""
    hidden, weight = (torch.randint(-30, 31, shape, device=DEVICE).to(dtype) for shape in ((w, H), (N, H)))
    # logits of a standard deviation between 2 and 4
    return hidden, weight * 2.0 ** (1 - floor(log2(310 * H**0.5)))


def run_argmax(hidden, weight, rows=None):
    """The kernel's tokens."""
    tokens = torch.full((len(hidden),), -1, device=DEVICE)
    scratch = HeadScratch.allocate(rows or len(hidden), len(weight), DEVICE)
    head_argmax(hidden, weight, tokens, scratch, overlap=True)
    return tokens


def run_draft(hidden, weight, rows=None):
    """The kernel's tokens, probabilities and entropies."""
    w = len(hidden)
    out = torch.full((w,), -1, device=DEVICE), poisoned(w), poisoned(w)
    head_draft(hidden, weight, *out, HeadScratch.allocate(rows or w, len(weight), DEVICE), overlap=True)
    return out


def rounded_logits(hidden, weight):
    """float64 numbers of the weight's dtype."""
    return F.linear(hidden.double(), weight.double()).to(weight.dtype).double()


def statistics(logits):
    """The largest probability and the entropy of every row."""
    log_prob = logits.log_softmax(-1)
    return log_prob.amax(-1).exp(), -(log_prob.exp() * log_prob).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_references_are_what_the_decoders_compute(dtype):
    hidden, weight = torch.randn(5, 40).to(dtype), torch.randn(150, 40).to(dtype)
    logits = F.linear(hidden, weight).float()
    tokens, again, confidence, entropy = (torch.zeros(5, dtype=t) for t in (torch.int64,) * 2 + (torch.float32,) * 2)
    head_argmax_ref(hidden, weight, tokens)
    head_draft_ref(hidden, weight, again, confidence, entropy)
    assert torch.equal(tokens, logits.argmax(-1)) and torch.equal(again, tokens)
    # as BlockDrafter.propose
    want_confidence, want_entropy = statistics(logits)
    torch.testing.assert_close(confidence, want_confidence)
    torch.testing.assert_close(entropy, want_entropy)


@needs_triton
# the interpreter rounds to bf16 towards zero
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("w, N, H", [(1, 64, 32), (5, 150, 40), (16, 200, 130), (3, 7, 5)])
def test_head_matches_logits_in_float64(w, N, H, dtype):
    hidden, weight = whole_numbers(w, N, H, dtype)
    logits = rounded_logits(hidden, weight)
    tokens, confidence, entropy = run_draft(hidden, weight, rows=w + 2)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(run_argmax(hidden, weight, rows=w + 2), tokens)
    for got, want in zip((confidence, entropy), statistics(logits), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


@needs_triton
@pytest.mark.parametrize("scale", [0.1, 5.0, 1e4])
def test_head_matches_ref_in_float32(scale):
    hidden, weight = torch.randn(6, 50, device=DEVICE), scale * torch.randn(333, 50, device=DEVICE)
    tokens, confidence, entropy = run_draft(hidden, weight)
    logits = F.linear(hidden.double(), weight.double())
    assert torch.equal(tokens, logits.argmax(-1))
    for got, want in zip((confidence, entropy), statistics(logits), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * max(1.0, scale))


@needs_triton
def test_the_lowest_of_equal_entries_wins():
    hidden, weight = torch.randn(4, 32, device=DEVICE), torch.randn(200, 32, device=DEVICE)
    # the same rows again within a tile, and in the last tile
    weight[20:40], weight[180:200] = weight[:20], weight[:20]
    weight[:20] *= 10
    weight[20:40], weight[180:200] = weight[:20], weight[:20]
    assert (run_argmax(hidden, weight) < 20).all()
    assert (run_draft(hidden, weight)[0] < 20).all()
    zeros = torch.zeros_like(weight)
    assert not run_argmax(hidden, zeros).any() and not run_draft(hidden, zeros)[0].any()


@needs_triton
def test_logits_are_rounded_before_they_are_compared():
    hidden = torch.ones(1, 2, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.tensor([[0.5, 0], [1, 0], [1, 2**-10]], dtype=torch.bfloat16, device=DEVICE)
    assert run_argmax(hidden, weight).item() == 1
    assert run_argmax(hidden.float(), weight.float()).item() == 2


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("N", [7, 64, 150])
def test_tokens_are_of_the_vocabulary_whatever_the_logits_are(N, value):
    hidden, weight = torch.randn(5, 32, device=DEVICE), torch.randn(N, 32, device=DEVICE)
    finite = run_argmax(hidden[2:], weight)
    hidden[0], hidden[1, 3] = value, value
    tokens, confidence, entropy = run_draft(hidden, weight)
    assert torch.equal(run_argmax(hidden, weight), tokens)
    assert (tokens >= 0).all() and (tokens < N).all()
    assert torch.equal(tokens[2:], finite), "the other rows are as they were"
    assert confidence[2:].isfinite().all() and entropy[2:].isfinite().all()
    hidden, weight = torch.rand(3, 32, device=DEVICE), torch.rand(N, 32, device=DEVICE)
    weight[N // 2] = value
    tokens, confidence, entropy = run_draft(hidden, weight)
    want = F.linear(hidden, weight).argmax(-1)
    assert torch.equal(tokens, want) and torch.equal(run_argmax(hidden, weight), want)
    # an entry of probability 0 has no share in the entropy
    assert (confidence.isfinite() & entropy.isfinite()).all() == (value == float("-inf"))
    weight[:] = value
    tokens = run_argmax(hidden, weight)
    assert torch.equal(tokens, torch.zeros_like(tokens)) and torch.equal(run_draft(hidden, weight)[0], tokens)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_entries_of_probability_zero_have_no_share():
    # fp16 logits that overflow, and a tile that has nothing else
    hidden, weight = torch.ones(2, 16, device=DEVICE).half(), torch.randn(150, 16, device=DEVICE).half()
    weight[::3], weight[64:128] = -6e4, -6e4
    tokens, confidence, entropy = run_draft(hidden, weight)
    want, want_confidence, want_entropy = torch.zeros_like(tokens), poisoned(2), poisoned(2)
    head_draft_ref(hidden, weight, want, want_confidence, want_entropy)
    assert torch.equal(tokens, want)
    torch.testing.assert_close(confidence, want_confidence, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-5)


@needs_triton
def test_head_refuses_what_it_would_read_wrongly():
    hidden, weight = torch.randn(2, 32, device=DEVICE), torch.randn(100, 32, device=DEVICE)
    tokens, numbers = torch.zeros(2, dtype=torch.int64, device=DEVICE), poisoned(2)
    scratch = HeadScratch.allocate(2, 100, DEVICE)
    with pytest.raises(ValueError, match="hidden is .*torch.float16"):
        head_argmax(hidden.half(), weight, tokens, scratch)
    with pytest.raises(ValueError, match="weight is .*strides"):
        head_argmax(hidden, weight.t().contiguous().t(), tokens, scratch)
    with pytest.raises(ValueError, match="weight is torch.float64"):
        head_argmax(hidden.double(), weight.double(), tokens, scratch)
    with pytest.raises(ValueError, match="tokens is .*int32"):
        head_argmax(hidden, weight, tokens.int(), scratch)
    with pytest.raises(ValueError, match="1 to 16 tokens, got 17. Use head_argmax_ref"):
        head_argmax(hidden.repeat(9, 1)[:17], weight, tokens, scratch)
    with pytest.raises(ValueError, match=r"takes \[w, H\] and \[N, H\]"):
        head_argmax(hidden[0], weight, tokens, scratch)
    with pytest.raises(ValueError, match="scratch has 1 rows for 2 tokens"):
        head_argmax(hidden, weight, tokens, HeadScratch.allocate(1, 100, DEVICE))
    with pytest.raises(ValueError, match=r"scratch.maximum is \[2, 4\]"):
        head_argmax(hidden, weight, tokens, HeadScratch.allocate(2, 200, DEVICE))
    with pytest.raises(ValueError, match="1 to 16 tokens, got 17. Use head_draft_ref"):
        head_draft(hidden.repeat(9, 1)[:17], weight, tokens, numbers, numbers, scratch)
    with pytest.raises(ValueError, match="confidence is .*torch.float16"):
        head_draft(hidden, weight, tokens, numbers.half(), numbers, scratch)
    with pytest.raises(ValueError, match=r"entropy is \[1\]"):
        head_draft(hidden, weight, tokens, numbers, numbers[:1], scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [2048, 3072, 5120])
def test_head_at_model_sizes(H, dtype):
    hidden, weight = whole_numbers(16, 248320, H, dtype)
    logits = rounded_logits(hidden, weight)
    want, statistics_64 = logits.argmax(-1), statistics(logits)
    for w in (1, 2, 5, 15, 16):
        tokens, confidence, entropy = run_draft(hidden[:w], weight, rows=16)
        assert torch.equal(tokens, want[:w])
        assert torch.equal(run_argmax(hidden[:w], weight, rows=16), tokens)
        for got, exact in zip((confidence, entropy), statistics_64, strict=True):
            torch.testing.assert_close(got.double(), exact[:w], rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 1e-5)])
def test_head_takes_the_best_of_random_logits(dtype, bound):
    hidden = torch.randn(16, 2048, device=DEVICE).to(dtype)
    weight = (2 * 2048**-0.5 * torch.randn(248320, 2048, device=DEVICE)).to(dtype)
    logits = rounded_logits(hidden, weight)
    tokens, confidence, entropy = run_draft(hidden, weight)
    assert torch.equal(run_argmax(hidden, weight), tokens)
    # the order of an fp32 sum decides a rounding, and with it between neighbours
    best = logits.amax(-1)
    assert (logits.gather(-1, tokens[:, None])[:, 0] >= best - bound * best.abs()).all()
    for got, want in zip((confidence, entropy), statistics(logits), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
