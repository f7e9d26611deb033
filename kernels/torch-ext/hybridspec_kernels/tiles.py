"""Pieces of kernels: dots that keep fp32's digits on 16-bit matrix units, gates, convolution taps, SiLU."""

import torch

from .triton_support import INTERPRETED, jit, tl, triton

# inline assembly is for real GPUs; a kernel reads globals only as constexpr
_INTERPRETED = INTERPRETED if triton is None else tl.constexpr(INTERPRETED)


def dot_precision(dtype: torch.dtype) -> str:
    """PRECISION of a kernel's dots for inputs of `dtype`: the matrix instructions that keep their digits.

    "bf16" and "fp16" inputs are exact operands, and fp32 operands are split into bf16 parts. For fp32 inputs all dots
    are three TF32 products, which together keep 21 bits; in the interpreter, which has no 16-bit dots, plain fp32.
    """
    if INTERPRETED:
        return "ieee"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "tf32x3")


@jit
def split_bf16(x):
    """An fp32 tile as the sum of two bf16 tiles, exact to 16 bits."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit
def split_dot(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a @ b` for fp32 tiles; for 16-bit inputs exact to 16 bits, as three bf16 products."""
    if PRECISION == "bf16" or PRECISION == "fp16":
        a_high, a_low = split_bf16(a)
        b_high, b_low = split_bf16(b)
        acc = tl.dot(a_high, b_high, acc=acc)
        acc = tl.dot(a_low, b_high, acc=acc)
        return tl.dot(a_high, b_low, acc=acc)
    else:
        return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@jit
def input_dot(x, y, PRECISION: tl.constexpr):
    """`x @ y` for tiles in the model's dtype, whose products are exact in fp32."""
    if PRECISION == "bf16" or PRECISION == "fp16":
        return tl.dot(x, y)
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)


@jit
def wide_dot(x, high, low, PRECISION: tl.constexpr):
    """`x @ (high + low)` for a tile in the model's dtype and an fp32 tile that `widen` split."""
    if PRECISION == "bf16":
        return tl.dot(x, low, acc=tl.dot(x, high))
    elif PRECISION == "fp16":
        # the 11 bits of an fp16 are two bf16 exactly
        x_high, x_low = split_bf16(x.to(tl.float32))
        acc = tl.dot(x_low, high, acc=tl.dot(x_high, high))
        return tl.dot(x_high, low, acc=acc)
    else:
        return tl.dot(x.to(tl.float32), high, input_precision=PRECISION)


@jit
def widen(x, PRECISION: tl.constexpr):
    """The operands `high`, `low` of `wide_dot` for an fp32 tile."""
    if PRECISION == "bf16" or PRECISION == "fp16":
        return split_bf16(x)
    else:
        return x, x


@jit
def within(offsets, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of the offsets below SIZE; a constant where blocks fit exactly, so that it costs nothing."""
    if SIZE % BLOCK == 0:
        return tl.full((BLOCK,), 1, tl.int1)
    else:
        return offsets < SIZE


@jit
def opaque(x):
    """`x`, behind a wall that the compiler's layout search does not cross.

    Without it a convolution in front of a dot is recomputed in the layout of every use, and a load is put next to its
    shared-memory store, so that loads wait for each other.
    """
    if _INTERPRETED:
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@jit
def log_decay(a, rate, dt_bias):
    """`-exp(A_log) * softplus(a + dt_bias)` with `rate = exp(A_log)`, fp32."""
    return -rate * softplus(a.to(tl.float32) + dt_bias)


@jit
def softplus(x):
    """`log(1 + e^x)` of fp32, to 3e-7 of its value also where that is tiny: slow decays add up over a long text."""
    # x^+ + log(1 + e) with e = e^-|x| <= 1, and log(1 + e) = 2 artanh(s): the GPU's log has no relative precision at 1
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 13 * s2 + 1.0 / 11
    series = series * s2 + 1.0 / 9
    series = series * s2 + 1.0 / 7
    series = series * s2 + 1.0 / 5
    series = series * s2 + 1.0 / 3
    series = series * s2 + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * series


@jit
def write_strength(b):
    """`sigmoid(b)` rounded to b's dtype, as transformers rounds it, then fp32."""
    return tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)


@jit
def load_taps(p, mask, stride, TAPS: tl.constexpr):
    """The TAPS tiles (or vectors) that lie `stride` elements apart, as a tuple."""
    taps = ()
    for i in tl.static_range(TAPS):
        taps = taps + (tl.load(p + i * stride, mask=mask, other=0.0),)  # type: ignore[assignment]
    return taps


@jit
def convolve(rows, weights, TAPS: tl.constexpr):
    """Causal convolution, then SiLU, each rounded to the rows' dtype as transformers rounds them."""
    acc = rows[0].to(tl.float32) * weights[0].to(tl.float32)
    for i in tl.static_range(1, TAPS):
        acc += rows[i].to(tl.float32) * weights[i].to(tl.float32)
    return silu(acc.to(rows[0].dtype).to(tl.float32)).to(rows[0].dtype)


@jit
def silu(x):
    """`x * sigmoid(x)` of fp32, to 3e-7 of its value above -5 and of 1 below: it is rounded to 16 bits, or tiny."""
    if _INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    else:
        # a division that handles every range costs more than all of the convolution
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 y;
            mul.f32 y, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 y, y;
            add.f32 y, y, 0f3F800000;
            rcp.approx.ftz.f32 y, y;
            mul.f32 $0, $1, y;
            }""",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@jit
def swiglu(gate, up, DTYPE: tl.constexpr):
    """`silu(gate) * up` of fp32 sums, each step rounded to DTYPE as separate PyTorch operations round it."""
    active = silu(gate.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
    return (active * up.to(DTYPE).to(tl.float32)).to(DTYPE)
