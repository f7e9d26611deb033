"""The drafter's modules against a direct fp64 evaluation, and what training and engine rely on."""

from typing import Any

import pytest
import torch
from drafter_cases import FULL, SLIDING, SUPPORTED, hidden_reference, random_drafter, tiny, tiny_raw
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridspec_hf.drafters.config import DFlashConfig
from hybridspec_hf.drafters.dflash import DFlashDrafter

LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": [SLIDING] * 2, "sliding_window": 7},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 7},
    "sliding_symmetric": {"layer_types": [SLIDING] * 2, "sliding_window": 7, "is_causal": False},
    "full_causal": {"is_causal": True},
    "window_below_block": {"layer_types": [SLIDING, FULL], "sliding_window": 2},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def norm64(x: Tensor, module: nn.Module) -> Tensor:
    scale = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return x * scale * module.weight.double()


def rope64(x: Tensor, position: int) -> Tensor:
    """`[D]` of one head at one position: pair (i, i + D/2) turns by `position / theta^(2i/D)`."""
    half = x.shape[-1] // 2
    angle = position / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def attend64(layer: Any, config: DFlashConfig, context: Tensor, hidden: Tensor, index: int) -> Tensor:
    """Attention of one layer written from the rule: a loop over rows, heads and visible keys. `[W, H]`."""
    attn, length = layer.self_attn, context.shape[0]
    inputs = norm64(hidden, layer.input_layernorm)
    rows = torch.cat((context, inputs))
    shape = (rows.shape[0], -1, config.head_dim)
    keys = norm64((rows @ attn.k_proj.weight.double().T).view(shape), attn.k_norm)
    keys = torch.stack([rope64(keys[p], p) for p in range(len(rows))])
    values = (rows @ attn.v_proj.weight.double().T).view(shape)
    queries = norm64((inputs @ attn.q_proj.weight.double().T).view(len(inputs), -1, config.head_dim), attn.q_norm)
    group = config.num_attention_heads // config.num_key_value_heads
    out = torch.zeros_like(queries)
    for row in range(len(inputs)):
        q = length + row
        seen = [k for k in range(len(rows)) if visible(config, index, q, k)]
        turned = rope64(queries[row], q)
        for head in range(config.num_attention_heads):
            scores = keys[seen, head // group] @ turned[head] / config.head_dim**0.5
            out[row, head] = scores.softmax(-1) @ values[seen, head // group]
    return out.flatten(1) @ attn.o_proj.weight.double().T


def visible(config: DFlashConfig, layer: int, q: int, k: int) -> bool:
    sliding = config.layer_types[layer] == SLIDING
    causal = sliding if config.is_causal is None else config.is_causal
    if causal and k > q:
        return False
    return not sliding or abs(q - k) < config.sliding_window


def drafter64(drafter: DFlashDrafter, block: Tensor, features: Tensor) -> Tensor:
    """The whole drafter in fp64, from features `[L, A*H]` and block embeddings `[W, H]`."""
    context = norm64(features.double() @ drafter.fc.weight.double().T, drafter.hidden_norm)
    hidden = block.double()
    for index, layer in enumerate(drafter.layers):
        hidden = hidden + attend64(layer, drafter.config, context, hidden, index)
        inner = norm64(hidden, layer.post_attention_layernorm)
        gate = nn.functional.silu(inner @ layer.mlp.gate_proj.weight.double().T)
        hidden = (
            hidden + (gate * (inner @ layer.mlp.up_proj.weight.double().T)) @ layer.mlp.down_proj.weight.double().T
        )
    return norm64(hidden, drafter.norm)


@layouts
@pytest.mark.parametrize("length", [1, 6, 17])
def test_forward_matches_the_rule_in_fp64(layout: dict[str, Any], length: int) -> None:
    drafter = random_drafter(tiny_raw(**layout))
    embed, features, anchor = torch.randn(64, 32), torch.randn(length, 64), torch.tensor([5])
    hidden = hidden_reference(drafter, embed, features, anchor)[0]
    with torch.no_grad():
        expected = drafter64(drafter, embed[[5] + [63] * 5], features)
    torch.testing.assert_close(hidden.double(), expected, atol=1e-5, rtol=1e-5)


@layouts
def test_forward_with_training_masks_equals_block_after_block(layout: dict[str, Any]) -> None:
    drafter = random_drafter(tiny_raw(**layout))
    embed, features = torch.randn(64, 32), torch.randn(2, 20, 64)
    anchors = torch.tensor([[3, 9, 20], [1, 12, 15]])
    tokens = torch.randint(0, 60, anchors.shape)
    block = torch.full((2, 3, 6), 63)
    block[:, :, 0] = tokens
    positions = (anchors[:, :, None] + torch.arange(6)).flatten(1)
    masks = drafter.training_masks(anchors, 20)
    with torch.no_grad():
        hidden = drafter(embed[block.flatten(1)], positions, features, torch.arange(20).expand(2, -1), masks)
    hidden = hidden.view(2, 3, 6, 32)
    for row in range(2):
        for column in range(3):
            context = features[row, : anchors[row, column]]
            alone = hidden_reference(drafter, embed, context, tokens[row, column : column + 1])[0]
            torch.testing.assert_close(hidden[row, column], alone, atol=1e-5, rtol=1e-5)


def test_training_masks_share_one_tensor_per_rule() -> None:
    drafter = random_drafter(tiny(SUPPORTED["zlab_nested"]()))
    masks = drafter.training_masks(torch.tensor([[4, 8]]), 10)
    assert len(masks) == 6 and len({id(mask) for mask in masks}) == 2


def test_every_weight_gets_a_gradient() -> None:
    drafter = random_drafter(tiny_raw(**LAYOUTS["mixed"])).train()
    anchors = torch.tensor([[3, 8]])
    positions = (anchors[:, :, None] + torch.arange(6)).flatten(1)
    masks = drafter.training_masks(anchors, 10)
    drafter(torch.randn(1, 12, 32), positions, torch.randn(1, 10, 64), torch.arange(10)[None], masks).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in drafter.parameters())


@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 12], [16, 4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_context_in_chunks_equals_context_at_once(chunks: list[int], dtype: torch.dtype) -> None:
    drafter = random_drafter(tiny_raw(**LAYOUTS["mixed"])).to(dtype)
    features, positions = torch.randn(1, 20, 64), torch.arange(20)[None]
    with torch.no_grad():
        whole = drafter.project_context(drafter.fuse_features(features), positions)
        parts = [
            drafter.project_context(drafter.fuse_features(f), p)
            for f, p in zip(features.split(chunks, 1), positions.split(chunks, 1), strict=True)
        ]
    # rounding of a matrix product depends on its number of rows, by a unit in the last place or so
    tolerance = 4 * torch.finfo(dtype).eps
    for layer, pair in enumerate(whole):
        for which, tensor in enumerate(pair):
            joined = torch.cat([part[layer][which] for part in parts], dim=2)
            torch.testing.assert_close(joined, tensor, atol=tolerance * tensor.abs().max().item(), rtol=0)


@layouts
def test_static_buffer_with_stale_slots_equals_exact_keys(layout: dict[str, Any]) -> None:
    drafter = random_drafter(tiny_raw(**layout))
    embed, features, anchor = torch.randn(64, 32), torch.randn(9, 64), torch.tensor([5])
    expected = hidden_reference(drafter, embed, features, anchor)
    slots, length = torch.arange(40), torch.tensor([9])
    positions = length + torch.arange(6)
    hidden = embed[torch.tensor([[5] + [63] * 5])]
    with torch.no_grad():
        rotary = drafter.rotary(positions[None])
        context = drafter.project_context(drafter.fuse_features(features[None]), slots[None, :9])
        for index, layer in enumerate(drafter.layers):
            buffers = torch.randn(2, 1, 2, 40, 8) * 50
            for buffer, past, own in zip(buffers, context[index], layer.project_block(hidden, rotary), strict=True):
                buffer[:, :, :9] = past
                buffer.index_copy_(2, positions, own)
            hidden = layer(hidden, rotary, *buffers, drafter.block_mask(index, positions, slots, length))
        hidden = drafter.norm(hidden)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_rotary_is_fp32_and_exact_far_out() -> None:
    drafter = random_drafter(tiny_raw()).to(torch.bfloat16)
    cos, sin = drafter.rotary(torch.tensor([[0, 262143]]))
    assert cos.dtype == sin.dtype == torch.float32
    angle = 262143 / 10000.0 ** (torch.arange(4, dtype=torch.float64) / 4)
    # an angle of 2.6e5 has a spacing of 2^-6 in fp32; slow pairs are accurate to the end
    torch.testing.assert_close(cos[0, 1, 1:4].double(), angle.cos()[1:], atol=2e-3, rtol=0)
    assert cos[0, 0].eq(1).all() and sin[0, 0].eq(0).all()


def test_fuse_features_casts_to_the_drafters_dtype() -> None:
    drafter = random_drafter(tiny_raw()).to(torch.bfloat16)
    assert drafter.fuse_features(torch.randn(1, 3, 64, dtype=torch.float16)).dtype == torch.bfloat16


def test_fuse_features_survives_outliers_beyond_fp16() -> None:
    drafter = random_drafter(tiny_raw()).to(torch.bfloat16)
    assert drafter.fuse_features(torch.randn(1, 3, 64) * 1e6).isfinite().all()


@pytest.mark.parametrize("name", SUPPORTED)
def test_embedding_and_head_are_no_part_of_the_drafter(name: str) -> None:
    drafter = random_drafter(tiny(SUPPORTED[name]()))
    names = set(drafter.state_dict())
    assert not any(part in key for key in names for part in ("embed", "lm_head"))
    assert names == {key for key, _ in drafter.named_parameters()}
    assert not list(drafter.buffers())


def test_attention_bias_follows_the_config() -> None:
    drafter = random_drafter(tiny_raw(attention_bias=True))
    biased = {name for name in drafter.state_dict() if name.endswith(".bias") and "layers.0" in name}
    assert biased == {f"layers.0.self_attn.{x}_proj.bias" for x in "qkvo"}


def test_drafter_is_what_generate_expects_of_an_assistant() -> None:
    drafter = random_drafter(tiny_raw())
    assert isinstance(drafter, PreTrainedModel) and not drafter.can_generate()
    assert drafter.config.get_text_config().vocab_size == 64
    assert "hybridspec" not in repr(drafter.config.to_json_string())
