"""A shape's name -> the configs of a target and of its DFlash drafter, with the place that each number comes from."""

from dataclasses import dataclass
from typing import Any

from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ..drafters.config import DFlashConfig

FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
# what all these models have, and what decoding at random needs: no EOS, an untied head
COMMON = {
    "max_position_embeddings": 262144, "rope_parameters": ROPE, "tie_word_embeddings": False, "eos_token_id": None,
    "pad_token_id": 0, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16,
}  # fmt: skip
# five sliding layers and one full, of the nested schema
MIXED = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 4096}


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of its drafter.

    Attributes:
        family: key of `FAMILIES`. target, drafter: config values beside the common ones.
        source: where the sizes are from; says so where one is assumed.
    """

    family: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    source: str


SHAPES = {
    "35b": Shape(
        "qwen3_5_moe",
        {
            "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
        {
            "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 6144,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37], "mask_token_id": 248077, **MIXED,
        },
        "target: Qwen3.5-35B-A3B, the defaults of transformers' Qwen3_5MoeTextConfig; drafter: z-lab's nested schema "
        "for it",
    ),
    "122b": Shape(
        "qwen3_5_moe",
        {
            "vocab_size": 248320, "hidden_size": 3072, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 2, "linear_num_value_heads": 64, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
        },
        {
            "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9216,
            "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45], "mask_token_id": 248077, **MIXED,
        },
        "target: Qwen3.5-122B-A10B as a public test script of it has it; drafter: z-lab/Qwen3.5-122B-A10B-DFlash "
        "(that five of its layers slide, as the 35B's, is assumed)",
    ),
    "80b": Shape(
        "qwen3_next",
        {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 5632,
        },
        {
            "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 6144,
            "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45], "mask_token_id": 151669, **MIXED,
        },
        "target: Qwen3-Next-80B-A3B, the defaults of transformers' Qwen3NextConfig; drafter: assumed, the 35B's "
        "layers (z-lab/Qwen3-Coder-Next-DFlash was not at hand)",
    ),
    "27b": Shape(
        "qwen3_5",
        {
            "vocab_size": 248320, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "linear_num_value_heads": 48, "intermediate_size": 17408,
        },
        {
            "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 17408,
            "target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070,
        },
        "target: Qwen3.5-27B as public code that builds it has it; drafter: z-lab's for this size, 1.73 B parameters "
        "as its file has (that its layers are full attention is assumed)",
    ),
    "9b": Shape(
        "qwen3_5",
        {
            "vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "linear_num_value_heads": 32, "intermediate_size": 12288,
        },
        {
            "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
            "target_layer_ids": [1, 8, 15, 22, 29], "mask_token_id": 248070,
        },
        "target: Qwen3.5-9B, the defaults of transformers' Qwen3_5TextConfig; drafter: assumed, five layers of the "
        "target's width, which makes the 1 B parameters that z-lab/Qwen3.5-9B-DFlash is said to have",
    ),
    "4b": Shape(
        "qwen3_5",
        {
            "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "linear_num_value_heads": 32, "intermediate_size": 9216,
        },
        {
            "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 9216,
            "target_layer_ids": [1, 8, 15, 22, 29], "mask_token_id": 248070,
        },
        "target: Qwen3.5-4B as a public test of its topology has it, with a head of its own (a tied one reads the "
        "same bytes a round); drafter: assumed, as the 9B's",
    ),
    "tiny": Shape(
        "qwen3_5_moe",
        {
            "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "linear_num_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
            "max_position_embeddings": 8192,
        },
        {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
            "target_layer_ids": [0, 2], "mask_token_id": 511, "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64,
        },
        "made up, to run the benchmark on a CPU",
    ),
}  # fmt: skip


def target_config(shape: Shape) -> Any:
    """The target's transformers config."""
    return FAMILIES[shape.family][1](**{**COMMON, **shape.target})


def drafter_config(shape: Shape) -> DFlashConfig:
    """The drafter's config; blocks of 16."""
    sizes = {
        "vocab_size": shape.target["vocab_size"], "hidden_size": shape.target["hidden_size"], "head_dim": 128,
        "block_size": 16, "rope_theta": 1e7, "max_position_embeddings": 262144,
        "num_target_layers": shape.target["num_hidden_layers"],
    }  # fmt: skip
    return DFlashConfig(**{**sizes, **shape.drafter})


def shortened(shape: Shape, layers: int) -> Shape:
    """The shape with its first `layers` layers only; the drafter reads as many of them, as evenly spread.

    Raises:
        ValueError: if the shape has fewer, or the drafter would read a layer twice.
    """
    have = shape.target["num_hidden_layers"]
    ids = [i * layers // have for i in shape.drafter["target_layer_ids"]]
    if not 1 <= layers <= have or len(set(ids)) < len(ids):
        raise ValueError(
            f"layers={layers}: the shape has {have}, and its drafter reads {len(ids)} different ones of them. "
            f"Choose a number between {len(ids)} and {have}."
        )
    target = {**shape.target, "num_hidden_layers": layers}
    return Shape(shape.family, target, {**shape.drafter, "target_layer_ids": ids}, f"{shape.source}; {layers} layers")
