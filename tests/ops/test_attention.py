"""Verification attention against a plain softmax, its heads against the models' own modules."""

from itertools import product

import pytest
import torch
from gdn_blocks import DEVICE, captured, error, forbid_host_reads, on_device, poisoned
from support.kernels import needs_triton
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, apply_rotary_pos_emb

from hybridspec_hf.drafters.modules import DFlashRMSNorm, rotate
from hybridspec_hf.drafters.visibility import VisibilityRule, block_mask
from hybridspec_kernels.attention.heads import head_norm_ref, rotate_ref
from hybridspec_kernels.attention.store import attention_store, attention_store_ref
from hybridspec_kernels.attention.verify import (
    AttentionScratch,
    attention_splits,
    attention_verify,
    attention_verify_ref,
    tile_shape,
)

EPS = 1e-6
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


def tables(capacity, R, dtype=torch.float32):
    """cos and sin `[capacity, R]`, halves repeated as the models make them."""
    angles = torch.arange(capacity)[:, None] * 10.0 ** -(torch.arange(R // 2) / (R // 2))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)


def wide(tensors):
    """The same in float64."""
    return [t.double() for t in tensors]


def same(a, b):
    """Equal to the bit, NaN to NaN."""
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


# ---- keys and values alone


def stored(op, tensors, rotary, start, HKV, D, capacity, **options):
    """keys and values `[L, HKV, capacity, D]` that the operation wrote over zeros."""
    caches = [projected_zeros(tensors, HKV, capacity, D) for _ in range(2)]
    op(*tensors, *rotary, on_device(start).long(), *caches, eps=EPS, **options)
    return caches


def projected_zeros(tensors, HKV, capacity, D):
    return torch.zeros(len(tensors[1]), HKV, capacity, D, dtype=tensors[0].dtype, device=DEVICE)


def layers(w, L, HKV, D, dtype=torch.float32):
    """projected, k_norm: random inputs of L layers."""
    tensors = torch.randn(w, L * 2 * HKV * D), 1 + 0.3 * torch.randn(L, D)
    return [t.to(dtype).to(DEVICE) for t in tensors]


@needs_triton
@pytest.mark.parametrize("w, L, HKV, D, R", [(1, 1, 2, 64, 16), (5, 3, 1, 20, 20), (16, 2, 2, 48, 32)])
def test_store_matches_reference(w, L, HKV, D, R):
    tensors, rotary, capacity = layers(w, L, HKV, D), tables(40, R), 37
    got = stored(attention_store, tensors, rotary, 9, HKV, D, capacity)
    want = stored(attention_store_ref, wide(tensors), wide(rotary), 9, HKV, D, capacity)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) <= 1e-6
        assert not a[:, :, :9].any() and not a[:, :, 9 + w :].any(), "other slots are not touched"


@needs_triton
def test_store_refuses_what_it_would_read_wrongly():
    (projected, k_norm), rotary, start = layers(2, 3, 2, 16), tables(10, 8), on_device(0)
    caches = [torch.zeros(3, 2, 10, 16, device=DEVICE) for _ in range(2)]
    arguments = [projected, k_norm, *rotary, start, *caches]
    for message, index, value in [
        ("1 to 16 tokens, got 17", 0, torch.zeros(17, 192, device=DEVICE)),
        (r"projected is \[2, 96\].*contiguous \[2, 192\]", 0, projected[:, :96].contiguous()),
        ("projected is torch.float64", 0, projected.double()),
        ("k_norm is", 1, k_norm[0]),
        (r"cos is \[5, 8\]", 2, rotary[0][:5]),
        ("cos is .* torch.float16", 2, rotary[0].half()),
        ("sin is", 3, rotary[1][:, :4]),
        ("start is", 4, start.float()),
        ("values is", 6, caches[1].half()),
    ]:
        with pytest.raises(ValueError, match=message):
            attention_store(*arguments[:index], value, *arguments[index + 1 :], eps=EPS)


# ---- the heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_heads_are_the_models(zero_centered, dtype):
    w, HKV, D, start, capacity = 5, 2, 32, 3, 20
    R, norm_class, table_dtype = (8, Qwen3_5MoeRMSNorm, dtype) if zero_centered else (D, DFlashRMSNorm, torch.float32)
    projected, q_norm, k_norm = (t.cpu() for t in block(w, HKV, HKV, D, False, dtype))
    rotary = [t.cpu() for t in tables(capacity, R, table_dtype)]
    angles = [t[None, start : start + w] for t in rotary]

    def turned(x, weight):
        norm = norm_class(D, EPS).to(dtype)
        norm.weight.data.copy_(weight)
        x = norm(x.view(w, HKV, D)).transpose(0, 1)[None].detach()
        return (apply_rotary_pos_emb(x, x, *angles)[0] if zero_centered else rotate(x, angles))[0]

    q, k, v = projected.chunk(3, dim=1)
    rows = [t[start : start + w, None] for t in rotary]
    got = rotate_ref(head_norm_ref(q.view(w, HKV, D), q_norm, zero_centered, EPS), *rows)
    assert torch.equal(got, turned(q, q_norm).transpose(0, 1))

    options = dict(gated=False, zero_centered=zero_centered, eps=EPS, scale=1.0)
    keys, values = (torch.zeros(HKV, capacity, D, dtype=dtype) for _ in range(2))
    out, length = torch.zeros(w, HKV * D, dtype=dtype), torch.tensor([start])
    attention_verify_ref(projected, q_norm, k_norm, *rotary, length, keys, values, out, **options)
    assert torch.equal(keys[:, start : start + w], turned(k, k_norm))
    assert torch.equal(values[:, start : start + w], v.view(w, HKV, D).transpose(0, 1))
    if not zero_centered:
        caches = [torch.zeros(1, HKV, capacity, D, dtype=dtype) for _ in range(2)]
        attention_store_ref(projected[:, HKV * D :], k_norm[None], *rotary, length, *caches, eps=EPS)
        assert torch.equal(caches[0][0], keys) and torch.equal(caches[1][0], values)


@needs_triton
@pytest.mark.parametrize("table_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("zero_centered", [True, False])
def test_keys_round_where_the_models_round(zero_centered, table_dtype):
    HQ, HKV, D, length = 2, 2, 64, 3
    tensors, rotary = block(16, HQ, HKV, D, True, torch.float16), tables(20, 16, table_dtype)
    caches = cache(HKV, 20, D, length, torch.float16)
    options = dict(gated=True, zero_centered=zero_centered)
    got, want = (
        verify(tensors, rotary, caches, length, HQ, op=op, **options)[1]
        for op in (attention_verify, attention_verify_ref)
    )
    block_slots = slice(length, length + 16)
    # the order of an fp32 sum decides ties only
    assert (got[:, block_slots] == want[:, block_slots]).float().mean() > 0.99
    exact = verify(wide(tensors), wide(rotary), wide(caches), length, HQ, op=attention_verify_ref, **options)[1]
    assert (want == exact.half())[:, block_slots].float().mean() < 0.95, "roundings in between show"


# ---- verification


def block(w, HQ, HKV, D, gated=False, dtype=torch.float32):
    """projected, q_norm, k_norm: random inputs of a layer."""
    projected = torch.randn(w, HQ * D * (2 if gated else 1) + 2 * HKV * D)
    norms = [1 + 0.3 * torch.randn(D) for _ in range(2)]
    return [t.to(dtype).to(DEVICE) for t in (projected, *norms)]


def cache(HKV, capacity, D, used, dtype=torch.float32):
    """keys, values: random up to slot `used`, then NaN."""
    caches = [torch.randn(HKV, capacity, D, device=DEVICE).to(dtype) for _ in range(2)]
    for t in caches:
        t[:, used:] = float("nan")
    return caches


def verify(tensors, rotary, caches, length, HQ, op=attention_verify, splits=4, w_max=16, **options):
    """The output, and the keys and values behind it; kernels work in a scratch of NaN."""
    projected, D = tensors[0], caches[0].shape[2]
    out = poisoned(len(projected), HQ * D, dtype=projected.dtype)
    keys, values = (t.clone() for t in caches)
    arguments = [*tensors, *rotary, on_device(length).long(), keys, values, out]
    if op is attention_verify:
        scratch = AttentionScratch.allocate(w_max, HQ, D, splits, DEVICE)
        for buffer in scratch:
            buffer.fill_(float("nan"))
        arguments.append(scratch)
    op(*arguments, **{"gated": False, "zero_centered": False, "eps": EPS, "scale": D**-0.5} | options)
    return out, keys, values


def reference(tensors, rotary, caches, length, HQ, **options):
    """The same from `attention_verify_ref` in float64."""
    return verify(wide(tensors), wide(rotary), wide(caches), length, HQ, op=attention_verify_ref, **options)


def softmax_attention(tensors, rotary, caches, length, HQ, rule):
    """Truth in float64 from the drafters' own mask, `[w, HQ*D]`."""
    (projected, q_norm, k_norm), (HKV, capacity, D) = wide(tensors), caches[0].shape
    w = len(projected)
    positions = length + torch.arange(w, device=DEVICE)
    q, k, v = projected.split([HQ * D, HKV * D, HKV * D], 1)
    rows = [t.double()[positions, None] for t in rotary]
    q, k = (
        rotate_ref(head_norm_ref(x.view(w, -1, D), weight, False, EPS), *rows)
        for x, weight in ((q, q_norm), (k, k_norm))
    )
    keys, values = wide(caches)
    keys[:, positions], values[:, positions] = k.transpose(0, 1), v.view(w, HKV, D).transpose(0, 1)
    context = torch.tensor([length], device=DEVICE)
    seen = block_mask(rule, positions, torch.arange(capacity, device=DEVICE), context)[0, 0]
    out = torch.zeros(w, HQ, D, dtype=torch.float64, device=DEVICE)
    for t, h in product(range(w), range(HQ)):
        k, v = (x[h // (HQ // HKV), seen[t]] for x in (keys, values))
        out[t, h] = (k @ q[t, h] * D**-0.5).softmax(0) @ v
    return out.flatten(1)


@needs_triton
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "w, length, HQ, HKV", [(1, 0, 4, 2), (2, 5, 2, 2), (5, 0, 1, 1), (5, 40, 4, 1), (16, 1, 1, 1)]
)
def test_verify_sees_what_the_rule_says(w, length, HQ, HKV, rule):
    D = 16
    inputs = block(w, HQ, HKV, D), tables(75, 8), cache(HKV, 75, D, length), length, HQ
    truth = softmax_attention(*inputs, rule)
    assert error(reference(*inputs, **rule._asdict())[0], truth) <= 1e-12
    assert error(verify(*inputs, **rule._asdict())[0], truth) <= 1e-6


@needs_triton
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("w, HQ, D, R", [(1, 4, 64, 16), (5, 3, 20, 20), (16, 2, 48, 32)])
def test_verify_fills_the_blocks_slots_alone(w, HQ, D, R, zero_centered):
    HKV, capacity, length = 1, 40, 21
    inputs = block(w, HQ, HKV, D), tables(capacity, R), cache(HKV, capacity, D, length), length, HQ
    got, want = (f(*inputs, zero_centered=zero_centered) for f in (verify, reference))
    slots = slice(length, length + w)
    for before, a, b in zip((None, *inputs[2]), got, want, strict=True):
        if before is None:
            assert error(a, b) <= 1e-6
            continue
        assert error(a[:, slots], b[:, slots]) <= 1e-6
        a[:, slots] = before[:, slots]
        assert same(a, before), "other slots are not touched"


@needs_triton
@pytest.mark.parametrize(
    "w, HQ, HKV, D, R, splits, window",
    [
        (1, 8, 1, 48, 12, 8, None),
        (1, 4, 2, 132, 132, 3, 50),
        (2, 4, 1, 20, 8, 2, 50),
        (5, 3, 3, 20, 20, 3, None),
        (5, 8, 1, 32, 32, 8, 200),
        (16, 4, 1, 16, 4, 4, None),
    ],
)
def test_verify_splits_a_long_context(w, HQ, HKV, D, R, splits, window):
    length, capacity = 300, 333
    inputs = block(w, HQ, HKV, D), tables(capacity, R), cache(HKV, capacity, D, length), length, HQ
    got = verify(*inputs, splits=splits, window=window)[0]
    assert error(got, reference(*inputs, window=window)[0]) <= 1e-6


@needs_triton
@pytest.mark.parametrize("window, from_block, reach", [(20, False, 19), (20, True, 20)])
def test_verify_reads_nothing_before_the_window(window, from_block, reach):
    inputs = block(3, 2, 1, 16), tables(200, 16), cache(1, 200, 16, 150), 150, 2
    options = dict(window=window, window_from_block=from_block)
    want = reference(*inputs, **options)[0]
    for t in inputs[2]:
        t[:, : 150 - reach] = float("nan")
    assert error(verify(*inputs, **options)[0], want) <= 1e-6


@needs_triton
def test_verify_gates_and_rounds_as_transformers():
    w, HQ, HKV, D = 5, 4, 2, 32
    tensors, rotary = block(w, HQ, HKV, D, True, torch.float16), tables(50, 8, torch.float16)
    queries, gate = tensors[0][:, : 2 * HQ * D].view(w, HQ, 2 * D).chunk(2, -1)
    ungated = torch.cat((queries.flatten(1), tensors[0][:, 2 * HQ * D :]), 1)
    inputs = rotary, cache(HKV, 50, D, 20, torch.float16), 20, HQ
    plain, gated = verify([ungated, *tensors[1:]], *inputs)[0], verify(tensors, *inputs, gated=True)[0]
    assert (gated == plain * torch.sigmoid(gate).flatten(1)).float().mean() > 0.99
    assert error(gated, reference(tensors, *inputs, gated=True)[0]) <= 2e-3


@needs_triton
def test_verify_survives_scores_of_any_size():
    (projected, q_norm, k_norm), caches = block(3, 2, 1, 16), cache(1, 200, 16, 150)
    inputs = [projected, 100 * q_norm, 20 * k_norm], tables(200, 16), [20 * caches[0], caches[1]], 150, 2
    assert error(verify(*inputs)[0], reference(*inputs)[0]) <= 1e-4


@needs_triton
def test_verify_reads_no_length_on_the_host(monkeypatch):
    inputs = block(3, 2, 1, 16), tables(100, 16), cache(1, 100, 16, 50), 50, 2
    want = reference(*inputs)[0]
    forbid_host_reads(monkeypatch)
    got = verify(*inputs)[0]
    monkeypatch.undo()
    assert error(got, want) <= 1e-6


@needs_triton
def test_verify_refuses_what_it_would_read_wrongly():
    (projected, q_norm, k_norm), rotary, caches = block(3, 4, 2, 16), tables(40, 8), cache(2, 40, 16, 20)

    def inputs(tensors=(projected, q_norm, k_norm), rotary=rotary, caches=caches, length=10, HQ=4, **options):
        verify(tensors, rotary, caches, length, HQ, **options)

    inputs()
    for message, change in [
        ("1 to 16 tokens, got 17", dict(tensors=[projected.new_zeros(17, 128), q_norm, k_norm], w_max=17)),
        ("scratch has room for 2 tokens", dict(w_max=2)),
        ("and 1 splits", dict(splits=1)),
        ("window is 0", dict(window=0)),
        ("got 3 for 2", dict(HQ=3)),
        ("keys is .*torch.float16", dict(caches=[caches[0].half(), caches[1]])),
        (r"projected is \[3, 128\].*\[3, 192\]", dict(gated=True)),
        ("projected is torch.float64", dict(tensors=[projected.double(), q_norm, k_norm])),
        ("q_norm is", dict(tensors=[projected, q_norm[:8], k_norm])),
        ("k_norm is", dict(tensors=[projected, q_norm, k_norm.half()])),
        (r"cos is \[5, 8\]", dict(rotary=[rotary[0][:5], rotary[1]])),
        ("sin is", dict(rotary=[rotary[0], rotary[1].half()])),
    ]:
        with pytest.raises(ValueError, match=message):
            inputs(**change)


def test_splits_keep_a_device_busy_within_the_capacity():
    cpu = torch.device("cpu")
    assert [attention_splits(n, 2, cpu) for n in (1, 64, 97, 1 << 17)] == [2, 2, 4, 8]
    assert attention_splits(1 << 17, 64, cpu) == 2, "the cache and the block"


def test_tiles_fit_shared_memory():
    for rows, D, dtype in product((1, 16, 17, 32, 64, 128), (16, 64, 128, 256), (torch.bfloat16, torch.float32)):
        block_m, block_n, _, stages = tile_shape(rows, D, dtype)
        assert block_m * D * dtype.itemsize + 2 * block_n * D * dtype.itemsize * (stages - 1) <= 99 << 10


TARGET, DRAFTERS = (16, 2, 256, 64), [(32, 4, 128, 128), (32, 8, 128, 128)]
DTYPES = [(torch.bfloat16, 5e-3), (torch.float16, 1e-3), (torch.float32, 1e-5)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("HQ, HKV, D, R", DRAFTERS)
def test_store_at_model_sizes(HQ, HKV, D, R, dtype, bound):
    for w in (1, 5, 16):
        inputs = layers(w, 6, HKV, D, dtype), tables(2000, R), 1000, HKV, D, 1500
        got, want = stored(attention_store, *inputs, overlap=True), stored(attention_store_ref, *inputs)
        for a, b in zip(got, want, strict=True):
            assert (a == b).float().mean() > (0.99 if dtype != torch.float32 else 0)
            assert error(a, b.double()) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", DTYPES)
@pytest.mark.parametrize("length", [0, 1000, 20000])
@pytest.mark.parametrize("HQ, HKV, D, R", [TARGET, *DRAFTERS])
def test_verify_at_model_sizes(HQ, HKV, D, R, length, dtype, bound):
    target, capacity = R < D, 24000
    rotary, caches = tables(capacity, R, dtype if target else torch.float32), cache(HKV, capacity, D, length, dtype)
    splits = attention_splits(capacity, HKV, DEVICE)
    rules = RULES[:1] if target else [*RULES[:2], *(r._replace(window=2048) for r in RULES[2:4] + RULES[6:8])]
    for w, rule in product((1, 2, 5, 16), rules):
        inputs = block(w, HQ, HKV, D, target, dtype), rotary, caches, length, HQ
        options = dict(gated=target, zero_centered=target, **rule._asdict())
        got = verify(*inputs, splits=splits, **options, overlap=True)
        # roundings in between are the models'
        rounded, slots = verify(*inputs, op=attention_verify_ref, **options), slice(length, length + w)
        assert error(got[0], rounded[0].double()) <= 2 * bound
        assert error(got[0], reference(*inputs, **options)[0]) <= 2 * bound
        for a, b in zip(got[1:], rounded[1:], strict=True):
            assert (a == b)[:, slots].float().mean() > (0.99 if dtype != torch.float32 else 0)
            assert error(a[:, slots], b[:, slots].double()) <= bound


@pytest.mark.gpu
def test_verify_at_the_longest_context_of_the_models():
    HQ, HKV, D, R = TARGET
    length, capacity, dtype = 262_120, 262_144, torch.bfloat16
    inputs = block(5, HQ, HKV, D, True, dtype), tables(capacity, R, dtype), cache(HKV, capacity, D, length, dtype)
    options = dict(gated=True, zero_centered=True, **RULES[0]._asdict())
    got = verify(*inputs, length, HQ, splits=attention_splits(capacity, HKV, DEVICE), **options, overlap=True)[0]
    assert error(got, verify(*inputs, length, HQ, op=attention_verify_ref, **options)[0].double()) <= 1e-2


@pytest.mark.gpu
def test_verify_replays_as_a_graph():
    HQ, HKV, D, R = TARGET
    tensors, rotary = block(5, HQ, HKV, D, True, torch.bfloat16), tables(3000, R, torch.bfloat16)
    caches = cache(HKV, 3000, D, 2905, torch.bfloat16)
    scratch = AttentionScratch.allocate(16, HQ, D, attention_splits(3000, HKV, DEVICE), DEVICE)
    length, out = on_device(2905).long(), poisoned(5, HQ * D, dtype=torch.bfloat16)
    options = dict(gated=True, zero_centered=True, eps=EPS, scale=D**-0.5)
    keys, values = (t.clone() for t in caches)
    graph = captured(
        lambda: attention_verify(*tensors, *rotary, length, keys, values, out, scratch, **options, overlap=True)
    )
    for n in (0, 40, 2900, 7):
        length.fill_(n)
        keys.copy_(caches[0])
        values.copy_(caches[1])
        graph.replay()
        want = reference(tensors, rotary, caches, n, HQ, gated=True, zero_centered=True)[0]
        assert error(out, want) <= 1e-2
