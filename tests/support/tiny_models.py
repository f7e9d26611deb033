"""Random-weight targets of every supported family and drafters for them, small enough for a CPU test."""

from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hybridspec_hf import DFlashConfig, DFlashDrafter

VOCAB = 97
FAMILIES = ("qwen3_5_moe", "qwen3_next", "qwen3_5")
MASK_ID = VOCAB - 1

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                        "mrope_section": [2, 1, 1]},
    "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


def tiny_target(
    family: str = "qwen3_5_moe", seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 1.5, **changes: Any
) -> Any:
    """A random target in eval mode; `changes` override its config."""
    torch.manual_seed(seed)
    options = {**_SHARED, **changes}
    if family == "qwen3_5":
        model: nn.Module = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options))
    elif family == "qwen3_5_moe":
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_MOE, **options))
    else:
        sparse = {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []}
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**sparse, **options}))
    return randomize(model, gain).to(dtype).eval()


def randomize(model: nn.Module, gain: float) -> nn.Module:
    """Weights of std `gain / sqrt(fan_in)`: wide ones keep greedy text from collapsing to one token."""
    for name, parameter in model.named_parameters():
        if "A_log" in name or "dt_bias" in name:
            nn.init.uniform_(parameter, -1.0, 1.0)
        elif "conv1d" in name:
            nn.init.normal_(parameter, std=0.4)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=gain * parameter.shape[-1] ** -0.5)
        else:
            nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.1)
    return model


def tiny_drafter(
    target: Any, seed: int = 1, dtype: torch.dtype | None = None, gain: float = 1.5, **changes: Any
) -> DFlashDrafter:
    """A random drafter that fits `target`: legal proposals, hardly ever accepted."""
    torch.manual_seed(seed)
    config = target.config.get_text_config()
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "block_size": 16,
        "mask_token_id": MASK_ID,
        "target_layer_ids": [0, 2, 3],
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        **changes,
    }
    drafter = DFlashDrafter(DFlashConfig(**options))
    return randomize(drafter, gain).to(dtype or target.dtype).eval()
