"""Verification attention against a plain softmax, its prepared inputs against the models' own modules."""

from itertools import product

import pytest
import torch
from gdn_blocks import DEVICE, captured, error, forbid_host_reads, on_device, poisoned
from support.kernels import needs_triton
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, apply_rotary_pos_emb

from hybridspec_hf.drafters.modules import DFlashRMSNorm, rotate
from hybridspec_hf.drafters.visibility import VisibilityRule, block_mask
from hybridspec_kernels.attention.prepare import attention_prepare, attention_prepare_ref
from hybridspec_kernels.attention.verify import (
    AttentionScratch,
    attention_splits,
    attention_verify,
    attention_verify_ref,
    tile_shape,
)

EPS = 1e-6
# finite, and far from any score or value
JUNK = 3e4
RULES = [
    VisibilityRule(causal, window, from_block)
    for causal, window, from_block in [
        (True, None, False),
        (False, None, False),
        (True, 7, False),
        (False, 7, False),
        (True, 1, False),
        (False, 1, False),
        (True, 7, True),
        (False, 7, True),
        (False, 100, True),
    ]
]


def tables(capacity, R, dtype):
    """cos and sin `[capacity, R]`, halves repeated as the models make them."""
    angles = torch.arange(capacity)[:, None] * 10.0 ** -(torch.arange(R // 2) / (R // 2))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)


def prepared(w, HQ, HKV, D, gated, dtype=torch.float32):
    """projected, q_norm, k_norm: random inputs of one layer."""
    projected = torch.randn(w, HQ * D * (2 if gated else 1) + 2 * HKV * D)
    norms = [1 + 0.3 * torch.randn(D) for _ in range(2)]
    return [t.to(dtype).to(DEVICE) for t in (projected, *norms)]


def prepare(op, tensors, rotary, start, HQ, HKV, D, capacity, dtype=torch.float32, **options):
    """q, keys and values that the operation wrote, the latter two over zeros."""
    projected, q_norm, k_norm = tensors
    q = poisoned(len(projected), HQ, D, dtype=dtype) if HQ else None
    keys, values = (torch.zeros(HKV, capacity, D, dtype=dtype, device=DEVICE) for _ in range(2))
    start = on_device(start).long()
    op(projected, q_norm if HQ else None, k_norm, *rotary, start, q, keys, values, query_heads=HQ, **options)
    return ([] if q is None else [q]) + [keys, values]


@needs_triton
@pytest.mark.parametrize("gated, zero_centered", [(True, True), (False, False)])
@pytest.mark.parametrize("w, HQ, HKV, D, R", [(1, 4, 2, 64, 16), (5, 3, 1, 20, 20), (16, 0, 2, 48, 32)])
def test_prepare_matches_reference(w, HQ, HKV, D, R, gated, zero_centered):
    tensors, rotary, capacity = prepared(w, HQ, HKV, D, gated), tables(40, R, torch.float32), 37
    options = dict(gated=gated, zero_centered=zero_centered, eps=EPS)
    got = prepare(attention_prepare, tensors, rotary, 9, HQ, HKV, D, capacity, **options)
    wide, rotary = [t.double() for t in tensors], [t.double() for t in rotary]
    want = prepare(attention_prepare_ref, wide, rotary, 9, HQ, HKV, D, capacity, torch.float64, **options)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= 1e-6
    for cache in got[-2:]:
        assert not cache[:, :9].any() and not cache[:, 9 + w :].any(), "other slots are not touched"


@needs_triton
def test_prepare_of_several_layers_is_that_of_each():
    w, L, HKV, D, capacity = 5, 3, 2, 16, 30
    projected, norms = torch.randn(w, L * 2 * HKV * D, device=DEVICE), torch.randn(L, D, device=DEVICE)
    rotary, start = tables(capacity, D, torch.float32), on_device(4)
    options = dict(query_heads=0, gated=False, zero_centered=False, eps=EPS)
    got = [torch.zeros(L, HKV, capacity, D, device=DEVICE) for _ in range(2)]
    attention_prepare(projected, None, norms, *rotary, start, None, *got, **options)
    for i, part in enumerate(projected.chunk(L, dim=1)):
        want = [torch.zeros(HKV, capacity, D, device=DEVICE) for _ in range(2)]
        attention_prepare(part.contiguous(), None, norms[i], *rotary, start, None, *want, **options)
        assert torch.equal(got[0][i], want[0]) and torch.equal(got[1][i], want[1])
    refs = [torch.zeros_like(t) for t in got]
    attention_prepare_ref(projected, None, norms, *rotary, start, None, *refs, **options)
    for a, b in zip(got, refs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="several layers take no query heads"):
        q = torch.zeros(w, 2, D, device=DEVICE)
        attention_prepare(projected, norms[0], norms, *rotary, start, q, *got, **options | {"query_heads": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepare_reference_is_the_models(dtype):
    w, HQ, HKV, D, R, start = 5, 4, 2, 32, 8, 3
    tensors = prepared(w, HQ, HKV, D, True, dtype)
    projected, q_norm, k_norm = (t.cpu() for t in tensors)
    queries, k, v = projected.split([2 * HQ * D, HKV * D, HKV * D], -1)
    heads = queries.view(w, HQ, 2 * D)[..., :D].contiguous(), k.view(w, HKV, D)

    def normed(norm_class):
        for x, weight in zip(heads, (q_norm, k_norm), strict=True):
            norm = norm_class(D, EPS).to(dtype)
            norm.weight.data.copy_(weight)
            yield norm(x).transpose(0, 1)[None].detach()

    cos, sin = (t.cpu()[start : start + w][None] for t in tables(20, R, dtype))
    want_q, want_k = apply_rotary_pos_emb(*normed(Qwen3_5MoeRMSNorm), cos, sin)
    options = dict(gated=True, eps=EPS)
    got = prepare(
        attention_prepare_ref,
        tensors,
        tables(20, R, dtype),
        start,
        HQ,
        HKV,
        D,
        20,
        dtype,
        zero_centered=True,
        **options,
    )
    assert torch.equal(got[0].cpu(), want_q[0].transpose(0, 1))
    assert torch.equal(got[1][:, start : start + w].cpu(), want_k[0])
    assert torch.equal(got[2][:, start : start + w].cpu(), v.view(w, HKV, D).transpose(0, 1))

    rotary = tables(20, D, torch.float32)
    cos, sin = (t.cpu()[start : start + w][None] for t in rotary)
    want_q, want_k = (rotate(x, (cos, sin)) for x in normed(DFlashRMSNorm))
    got = prepare(attention_prepare_ref, tensors, rotary, start, HQ, HKV, D, 20, dtype, zero_centered=False, **options)
    assert torch.equal(got[0].cpu(), want_q[0].transpose(0, 1))
    assert torch.equal(got[1][:, start : start + w].cpu(), want_k[0])


@needs_triton
@pytest.mark.parametrize("table_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_prepare_rounds_where_the_models_round(zero_centered, table_dtype):
    sizes = 5, 4, 1, 64
    tensors, rotary = prepared(*sizes, True, torch.float16), tables(20, 16, table_dtype)
    options = dict(gated=True, zero_centered=zero_centered, eps=EPS)
    got, want = (
        prepare(op, tensors, rotary, 3, *sizes[1:], 20, torch.float16, **options)
        for op in (attention_prepare, attention_prepare_ref)
    )
    # the order of an fp32 sum decides ties only
    for a, b in zip(got, want, strict=True):
        assert (a == b).float().mean() > 0.99
    wide, rotary = [t.double() for t in tensors], [t.double() for t in rotary]
    exact = prepare(attention_prepare_ref, wide, rotary, 3, *sizes[1:], 20, torch.float64, **options)
    assert (want[0] == exact[0].half()).float().mean() < 0.95, "roundings in between show"


@needs_triton
def test_prepare_refuses_what_it_would_read_wrongly():
    projected, q_norm, k_norm = prepared(2, 4, 2, 16, True)
    rotary, start, options = tables(10, 8, torch.float32), on_device(0), dict(gated=True, zero_centered=True, eps=EPS)
    keys, values, q = torch.zeros(2, 10, 16), torch.zeros(2, 10, 16), torch.zeros(2, 4, 16)
    keys, values, q = (t.to(DEVICE) for t in (keys, values, q))
    arguments = [projected, q_norm, k_norm, *rotary, start, q, keys, values]

    def refuses(message, index, value, **changes):
        with pytest.raises(ValueError, match=message):
            attention_prepare(
                *arguments[:index], value, *arguments[index + 1 :], **{"query_heads": 4} | options | changes
            )

    refuses(r"projected is \[2, 192\].*contiguous \[2, 128\]", 0, projected, gated=False)
    refuses("projected is torch.float64", 0, projected.double())
    refuses("values is", 8, values.half())
    refuses("q and q_norm must be given for 4 query heads", 6, None)
    refuses(r"cos is \[5, 8\]", 3, rotary[0][:5])
    refuses("cos is .* torch.float16", 3, rotary[0].half())
    refuses("sin is", 4, rotary[1][:, :4])
    refuses("start is", 5, start.float())


def cache(HKV, capacity, D, used, dtype=torch.float32):
    """keys, values: random up to slot `used`, then junk, in the values' last slots NaN."""
    keys, values = (torch.randn(HKV, capacity, D, device=DEVICE).to(dtype) for _ in range(2))
    keys[:, used:], values[:, used:] = JUNK, -JUNK
    values[:, used + 3 :] = float("nan")
    return keys, values


def verify(q, keys, values, length, splits=4, w_max=16, **options):
    """The kernels' output, from a scratch of NaN."""
    w, HQ, D = q.shape
    scratch = AttentionScratch.allocate(w_max, HQ, D, splits, DEVICE)
    for buffer in scratch:
        buffer.fill_(float("nan"))
    out = poisoned(w, HQ * D, dtype=q.dtype)
    attention_verify(q, keys, values, on_device(length).long(), out, scratch, scale=D**-0.5, **options)
    return out


def softmax_attention(q, keys, values, length, rule):
    """Truth in float64 from the drafters' own mask, `[w, HQ*D]`."""
    (w, HQ, D), (HKV, capacity, _) = q.shape, keys.shape
    positions = length + torch.arange(w, device=DEVICE)
    context = torch.tensor([length], device=DEVICE)
    seen = block_mask(rule, positions, torch.arange(capacity, device=DEVICE), context)[0, 0]
    out = torch.zeros(w, HQ, D, dtype=torch.float64, device=DEVICE)
    for t, h in product(range(w), range(HQ)):
        k, v = (x[h // (HQ // HKV), seen[t]].double() for x in (keys, values))
        out[t, h] = (k @ q[t, h].double() * D**-0.5).softmax(0) @ v
    return out.flatten(1)


def reference(q, keys, values, length, **options):
    """`attention_verify_ref` in float64."""
    out = poisoned(len(q), q[0].numel(), dtype=torch.float64)
    wide = (x.double() for x in (q, keys, values))
    attention_verify_ref(*wide, on_device(length).long(), out, scale=q.shape[-1] ** -0.5, **options)
    return out


@needs_triton
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "w, length, HQ, HKV", [(1, 0, 4, 2), (2, 5, 2, 2), (5, 0, 1, 1), (5, 40, 4, 1), (16, 1, 1, 1)]
)
def test_verify_sees_what_the_rule_says(w, length, HQ, HKV, rule):
    D = 16
    q, (keys, values) = torch.randn(w, HQ, D, device=DEVICE), cache(HKV, 75, D, length + w)
    truth = softmax_attention(q, keys, values, length, rule)
    assert error(reference(q, keys, values, length, **rule._asdict()), truth) <= 1e-12
    assert error(verify(q, keys, values, length, **rule._asdict()), truth) <= 1e-6


@needs_triton
@pytest.mark.parametrize(
    "w, HQ, HKV, D, splits, window",
    [
        (1, 8, 1, 48, 8, None),
        (1, 4, 2, 132, 3, 50),
        (2, 4, 1, 20, 1, 50),
        (5, 3, 3, 20, 3, None),
        (5, 8, 1, 32, 8, 200),
        (16, 8, 1, 16, 4, None),
    ],
)
def test_verify_splits_a_long_context(w, HQ, HKV, D, splits, window):
    length, capacity = 300, 333
    q, (keys, values) = torch.randn(w, HQ, D, device=DEVICE), cache(HKV, capacity, D, length + w)
    got = verify(q, keys, values, length, splits, window=window)
    assert error(got, reference(q, keys, values, length, window=window)) <= 1e-6


@needs_triton
@pytest.mark.parametrize("window, from_block, reach", [(20, False, 19), (20, True, 20)])
def test_verify_reads_nothing_before_the_window(window, from_block, reach):
    q, (keys, values) = torch.randn(3, 2, 16, device=DEVICE), cache(1, 200, 16, 153)
    want = reference(q, keys, values, 150, window=window, window_from_block=from_block)
    keys[:, : 150 - reach] = values[:, : 150 - reach] = float("nan")
    assert error(verify(q, keys, values, 150, window=window, window_from_block=from_block), want) <= 1e-6


@needs_triton
def test_verify_gates_and_rounds_as_transformers():
    w, HQ, HKV, D = 5, 4, 2, 32
    q, (keys, values) = torch.randn(w, HQ, D, device=DEVICE).half(), cache(HKV, 50, D, 25, torch.float16)
    gate = torch.randn(w, 2 * HQ * D + 2 * HKV * D, device=DEVICE).half()
    plain, gated = verify(q, keys, values, 20), verify(q, keys, values, 20, gate=gate)
    sigmoid = torch.sigmoid(gate[:, : 2 * HQ * D].view(w, HQ, 2 * D)[..., D:].reshape(w, HQ * D))
    assert (gated == plain * sigmoid).float().mean() > 0.99
    assert error(gated, reference(q, keys, values, 20, gate=gate.double())) <= 2e-3


@needs_triton
def test_verify_survives_scores_of_any_size():
    q, (keys, values) = 100 * torch.randn(3, 2, 16, device=DEVICE), cache(1, 200, 16, 153)
    keys[:, :153] *= 20
    assert error(verify(q, keys, values, 150), reference(q, keys, values, 150)) <= 1e-4


@needs_triton
def test_verify_reads_no_length_on_the_host(monkeypatch):
    q, (keys, values) = torch.randn(3, 2, 16, device=DEVICE), cache(1, 100, 16, 53)
    want = reference(q, keys, values, 50)
    forbid_host_reads(monkeypatch)
    got = verify(q, keys, values, 50)
    monkeypatch.undo()
    assert error(got, want) <= 1e-6


@needs_triton
def test_verify_refuses_what_it_would_read_wrongly():
    q, (keys, values) = torch.randn(3, 4, 16, device=DEVICE), cache(2, 40, 16, 20)
    for message, change in [
        ("1 to 16 tokens, got 17", dict(q=torch.randn(17, 4, 16, device=DEVICE), w_max=17)),
        ("scratch has room for 2 tokens, got 3", dict(w_max=2)),
        ("window is 0", dict(window=0)),
        ("got 3 for 2", dict(q=torch.randn(3, 3, 16, device=DEVICE))),
        ("keys is .*torch.float16", dict(keys=keys.half())),
        (r"gate is \[3, 64\].*\[3, 128\]", dict(gate=torch.randn(3, 64, device=DEVICE))),
        ("q is torch.float64", dict(q=q.double())),
    ]:
        with pytest.raises(ValueError, match=message):
            verify(**{"q": q, "keys": keys, "values": values, "length": 10} | change)


def test_splits_keep_a_device_busy_within_the_capacity():
    cpu = torch.device("cpu")
    assert [attention_splits(n, 2, cpu) for n in (1, 64, 97, 1 << 17)] == [1, 2, 4, 8]
    assert attention_splits(1 << 17, 64, cpu) == 1


def test_tiles_fit_shared_memory():
    for rows, D, dtype in product((1, 16, 17, 32, 64, 128), (16, 64, 128, 256), (torch.bfloat16, torch.float32)):
        block_m, block_n, _, stages = tile_shape(rows, D, dtype)
        assert block_m * D * dtype.itemsize + 2 * block_n * D * dtype.itemsize * (stages - 1) <= 99 << 10


TARGET, DRAFTERS = (16, 2, 256, 64), [(32, 4, 128, 128), (32, 8, 128, 128)]
DTYPES = [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("HQ, HKV, D, R", [TARGET, *DRAFTERS])
def test_prepare_at_model_sizes(HQ, HKV, D, R, dtype, bound):
    gated = R < D
    rotary = tables(2000, R, dtype if gated else torch.float32)
    options = dict(gated=gated, zero_centered=gated, eps=EPS)
    for w in (1, 5, 16):
        tensors = prepared(w, HQ, HKV, D, gated, dtype)
        got, want = (
            prepare(op, tensors, rotary, 1000, HQ, HKV, D, 1500, dtype, **options, **overlap)
            for op, overlap in ((attention_prepare, dict(overlap=True)), (attention_prepare_ref, {}))
        )
        for a, b in zip(got, want, strict=True):
            assert (a == b).float().mean() > (0.99 if dtype != torch.float32 else 0)
            assert error(a, b.double()) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("length", [1000, 20000])
@pytest.mark.parametrize("HQ, HKV, D, R", [TARGET, *DRAFTERS])
def test_verify_at_model_sizes(HQ, HKV, D, R, length, dtype, bound):
    splits = attention_splits(24000, HKV, DEVICE)
    rules = RULES[:1] if R < D else [*RULES[:2], *(r._replace(window=2048) for r in RULES[2:4] + RULES[6:8])]
    for w, rule in product((1, 2, 5, 16), rules):
        q, (keys, values) = torch.randn(w, HQ, D, device=DEVICE).to(dtype), cache(HKV, 24000, D, length + w, dtype)
        options = rule._asdict()
        if R < D:
            options["gate"] = torch.randn(w, 2 * HQ * D + 2 * HKV * D, device=DEVICE).to(dtype)
        got = verify(q, keys, values, length, splits, **options, overlap=True)
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        assert error(got, reference(q, keys, values, length, **wide)) <= bound


@pytest.mark.gpu
def test_verify_replays_as_a_graph():
    HQ, HKV, D, _ = TARGET
    q, (keys, values) = torch.randn(5, HQ, D, device=DEVICE).bfloat16(), cache(HKV, 3000, D, 2905, torch.bfloat16)
    scratch = AttentionScratch.allocate(16, HQ, D, attention_splits(3000, HKV, DEVICE), DEVICE)
    length, out = on_device(0).long(), poisoned(5, HQ * D, dtype=torch.bfloat16)
    graph = captured(lambda: attention_verify(q, keys, values, length, out, scratch, scale=D**-0.5, overlap=True))
    for n in (0, 40, 2900, 7):
        length.fill_(n)
        graph.replay()
        assert error(out, reference(q, keys, values, n)) <= 5e-3
