"""The embedding with the first norm against float64 and, bit by bit, against the two operations apart."""

import pytest
import torch
from gdn_blocks import DEVICE, error, poisoned
from support.kernels import needs_triton

from hybridspec_kernels.norm.add_rms import add_rms_norm, add_rms_norm_ref
from hybridspec_kernels.norm.embed import embed_rms_norm, embed_rms_norm_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6


def random_table(V, H, dtype):
    """Embeddings `[V, H]` as small as a model's, and the weight of a norm `[H]`."""
    return (0.02 * torch.randn(V, H, device=DEVICE)).to(dtype), torch.randn(H, device=DEVICE).to(dtype)


def random_tokens(n, V):
    """`[n]`, the table's first and last among them."""
    tokens = torch.randint(V, (n,), device=DEVICE)
    tokens[0], tokens[-1] = 0, V - 1
    return tokens


def run_embed(kernel, tokens, table, weight, w, zero_centered, filler=None):
    """Residual and norm `[w, H]`."""
    residual, out = (poisoned(w, table.shape[1], dtype=table.dtype) for _ in range(2))
    kernel(tokens, table, weight, residual, out, eps=EPS, zero_centered=zero_centered, filler=filler)
    return residual, out


def check_against_both(tokens, table, weight, w, zero_centered, filler, bound):
    """Against float64, and against lookup and norm one after the other, to the bit."""
    residual, out = run_embed(embed_rms_norm, tokens, table, weight, w, zero_centered, filler)
    exact = run_embed(embed_rms_norm_ref, tokens, table.double(), weight.double(), w, zero_centered, filler)
    assert torch.equal(residual.double(), exact[0])
    assert error(out, exact[1]) <= bound
    block = tokens.tolist() + [filler] * (w - len(tokens))
    looked_up, want = torch.stack([table[token] for token in block]), torch.full_like(out, torch.nan)
    add_rms_norm(looked_up, None, weight, want, eps=EPS, zero_centered=zero_centered)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_reference_is_a_lookup_and_a_norm(zero_centered, dtype):
    table, weight = random_table(11, 24, dtype)
    residual, out = run_embed(
        embed_rms_norm_ref, torch.tensor([10, 0], device=DEVICE), table, weight, 4, zero_centered, 7
    )
    assert torch.equal(residual, torch.stack([table[10], table[0], table[7], table[7]]))
    want = torch.full_like(out, torch.nan)
    add_rms_norm_ref(residual.clone(), None, weight, want, eps=EPS, zero_centered=zero_centered)
    assert torch.equal(out, want)


@needs_triton
@pytest.mark.parametrize("zero_centered", [True, False])
# the interpreter rounds to bf16 towards zero
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("n, w, H", [(1, 1, 1), (3, 3, 128), (5, 5, 101), (16, 16, 130)])
def test_embedding_with_norm(n, w, H, dtype, bound, zero_centered):
    table, weight = random_table(19, H, dtype)
    check_against_both(random_tokens(n, 19), table, weight, w, zero_centered, None, bound)


@needs_triton
@pytest.mark.parametrize("filler", [0, 5, 18])
@pytest.mark.parametrize("n, w", [(1, 2), (1, 16), (3, 7), (4, 4)])
def test_filler_stands_in_the_rows_behind_the_tokens(n, w, filler):
    table, weight = random_table(19, 33, torch.float32)
    check_against_both(random_tokens(n, 19), table, weight, w, False, filler, 1e-6)


@needs_triton
def test_a_zero_centred_weight_may_be_wider():
    table, weight = random_table(9, 48, torch.float16)
    weight = weight.float() + 1e-4
    check_against_both(random_tokens(3, 9), table, weight, 3, True, None, 1e-3)


@needs_triton
@pytest.mark.parametrize("token", [-1, 9, 2**33, -(2**62)])
def test_a_token_outside_of_the_table_makes_its_row_nan(token):
    # rows in front of and behind the table, which no token may reach
    wide, weight = random_table(29, 40, torch.float32)
    tokens = torch.tensor([4, token, 8], device=DEVICE)
    residual, out = run_embed(embed_rms_norm, tokens, wide[10:19], weight, 3, True)
    want = run_embed(embed_rms_norm_ref, tokens[::2].contiguous(), wide[10:19], weight, 2, True)
    assert residual[1].isnan().all() and out[1].isnan().all()
    assert torch.equal(residual[::2], want[0]) and error(out[::2], want[1].double()) <= 1e-6


@needs_triton
def test_embedding_refuses_what_it_would_read_wrongly():
    table, weight = random_table(9, 32, torch.float32)
    tokens, residual, out = random_tokens(2, 9), poisoned(2, 32), poisoned(2, 32)

    def run(tokens=tokens, table=table, weight=weight, residual=residual, out=out, zero_centered=True, filler=None):
        embed_rms_norm(tokens, table, weight, residual, out, eps=EPS, zero_centered=zero_centered, filler=filler)

    run()
    with pytest.raises(ValueError, match=r"out is \[32\]"):
        run(out=out[0])
    with pytest.raises(ValueError, match="1 to 16 tokens .* got 17 of 32"):
        run(out=poisoned(17, 32))
    with pytest.raises(ValueError, match="got 1 of 8193"):
        run(out=poisoned(1, 8193))
    with pytest.raises(ValueError, match="out is torch.float64"):
        run(out=out.double())
    with pytest.raises(ValueError, match="out is .*strides"):
        run(out=out.t().contiguous().t())
    with pytest.raises(ValueError, match="residual is .*torch.float16"):
        run(residual=residual.half())
    with pytest.raises(ValueError, match="table is .*torch.float16"):
        run(table=table.half())
    with pytest.raises(ValueError, match="table is .*strides"):
        run(table=table.t().contiguous().t())
    with pytest.raises(ValueError, match=r"table is \[9, 31\]"):
        run(table=table[:, :31].contiguous())
    with pytest.raises(ValueError, match=r"weight is \[31\]"):
        run(weight=weight[:31])
    with pytest.raises(ValueError, match="weight is .*torch.float32"):
        run(table=table.half(), residual=residual.half(), out=out.half(), zero_centered=False)
    with pytest.raises(ValueError, match="tokens is .*torch.int32"):
        run(tokens=tokens.int())
    with pytest.raises(ValueError, match="tokens is .*strides"):
        run(tokens=tokens.repeat(2)[::2])
    with pytest.raises(ValueError, match=r"tokens is \[1, 2\]"):
        run(tokens=tokens[None])
    for wrong, filler in ((tokens[:1], None), (tokens[:0], 3), (tokens.repeat(2), None), (tokens.repeat(2), 3)):
        with pytest.raises(ValueError, match=f"tokens has {len(wrong)} entries for 2 rows"):
            run(tokens=wrong, filler=filler)
    for filler in (-1, 9):
        with pytest.raises(ValueError, match=f"filler is {filler}; the table has 9 rows"):
            run(tokens=tokens[:1], filler=filler)
    assert out.isfinite().all() and residual.isfinite().all(), "a refused call writes nothing"


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 4e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize("H", [2048, 3072, 5120])
def test_embedding_at_model_sizes(H, dtype, bound, zero_centered):
    table, weight = random_table(4096, H, dtype)
    for n, w in ((1, 1), (2, 2), (6, 6), (16, 16), (1, 16)):
        check_against_both(random_tokens(n, 4096), table, weight, w, zero_centered, 4095, bound)


@pytest.mark.gpu
def test_a_table_of_more_than_2_to_the_31_elements():
    H = 5120
    V = 2**31 // H + 3
    table, weight = torch.empty(V, H, dtype=torch.bfloat16, device=DEVICE), random_table(1, H, torch.bfloat16)[1]
    table[-2:], table[0] = random_table(2, H, torch.bfloat16)[0], 1.0
    tokens = torch.tensor([V - 1, 0], device=DEVICE)
    residual, _ = run_embed(embed_rms_norm, tokens, table, weight, 3, True, V - 2)
    assert torch.equal(residual, table[[V - 1, 0, V - 2]])
