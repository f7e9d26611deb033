"""Raw drafter configs as they lie in known repositories, their tiny twins with made-up weights, and a reference."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridspec_hf.drafters.config import DFlashConfig
from hybridspec_hf.drafters.dflash import DFlashDrafter

Raw = dict[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"

_ZLAB: Raw = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}


def zlab_legacy() -> Raw:
    """z-lab/Qwen3.6-35B-A3B-DFlash at revision 42d3b34."""
    return deepcopy(_ZLAB) | {
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": [FULL] * 8,
        "max_window_layers": 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "num_target_layers": 40,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "sliding_window": None,
        "transformers_version": "4.57.3",
        "use_sliding_window": False,
    }


def zlab_nested() -> Raw:
    """The newer drafter of the 35B-A3B: eight anchors, six layers."""
    return deepcopy(_ZLAB) | {
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
        },
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": [SLIDING] * 5 + [FULL],
        "max_window_layers": 6,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_target_layers": 40,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": 4096,
        "use_sliding_window": True,
    }


def zlab_122b() -> Raw:
    """z-lab/Qwen3.5-122B-A10B-DFlash."""
    raw = zlab_nested() | {"hidden_size": 3072, "intermediate_size": 9216, "num_target_layers": 48}
    raw["dflash_config"]["target_layer_ids"] = [1, 7, 14, 20, 26, 32, 39, 45]
    return raw


def zlab_dflash2() -> Raw:
    """z-lab/Qwen3.8-27B-DFlash2, which is another architecture and must be refused."""
    return zlab_nested() | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            "block_size": 8,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "mask_token_id": 248070,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": [5, 19, 33, 47, 61],
        },
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "is_causal": False,
        "layer_types": [SLIDING] * 5,
        "num_hidden_layers": 5,
        "num_target_layers": 64,
        "sliding_window": 2048,
    }


def speculators() -> Raw:
    """What speculators 0.9.0 writes for a full-vocabulary drafter of a Qwen3.5 target."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [2, 20, 37],
        "block_size": 8,
        "draft_vocab_size": 248320,
        "dtype": "bfloat16",
        "mask_token_id": 248077,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [], "verifier": {"name_or_path": "x"}},
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "layer_types": [SLIDING] * 4 + [FULL],
            "max_position_embeddings": 262144,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "pad_token_id": None,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_section": [44, 44, 40],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "sliding_window": 2048,
            "tie_word_embeddings": False,
            "transformers_version": "5.24.0",
            "use_cache": True,
            "use_sliding_window": True,
            "vocab_size": 248320,
        },
        "transformers_version": "5.24.0",
    }


SUPPORTED = {
    "zlab_legacy": zlab_legacy,
    "zlab_nested": zlab_nested,
    "zlab_122b": zlab_122b,
    "speculators": speculators,
}


def tiny(raw: Raw) -> Raw:
    """Shrink widths and vocabulary of a raw config; layers, anchors, head ratio and layout stay."""
    raw = deepcopy(raw)
    decoder = raw.get("transformer_layer_config", raw)
    ratio = decoder["num_attention_heads"] // decoder["num_key_value_heads"]
    decoder.update(hidden_size=32, intermediate_size=48, head_dim=8, vocab_size=64)
    decoder.update(num_attention_heads=ratio, num_key_value_heads=1)
    if decoder["sliding_window"]:
        decoder["sliding_window"] = 7
    if decoder is raw:
        raw["dflash_config"]["mask_token_id"] = 63
    else:
        raw.update(mask_token_id=63, draft_vocab_size=64)
    return raw


def tiny_raw(**changes: Any) -> Raw:
    """A nested config of two layers, two anchors and blocks of six; `changes` replace top-level keys."""
    raw = tiny(zlab_nested()) | {"num_hidden_layers": 2, "layer_types": [FULL] * 2, "num_target_layers": 5}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 10000.0}}
    raw["dflash_config"] = {"block_size": 6, "mask_token_id": 63, "target_layer_ids": [1, 3]}
    return raw | changes


def random_drafter(raw: Raw, seed: int = 0) -> DFlashDrafter:
    """A drafter whose weights are large enough for every part to matter."""
    drafter = DFlashDrafter(DFlashConfig.from_raw(raw)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else noise * weight.shape[1] ** -0.5)
    return drafter


def write_checkpoint(folder: Path, raw: Raw, weights: dict[str, Tensor]) -> Path:
    """A drafter's folder: the raw config as it is, and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def block_tokens(drafter: DFlashDrafter, anchor: Tensor) -> Tensor:
    """`[1, W]`: the anchor `[1]` and the mask tokens."""
    masks = torch.full((drafter.config.block_size - 1,), drafter.config.mask_token_id)
    return torch.cat((anchor, masks))[None]


def hidden_reference(drafter: DFlashDrafter, embed: Tensor, features: Tensor, anchor: Tensor) -> Tensor:
    """Hidden states `[1, W, H]` of one block, from features `[L, A*H]` and an embedding `[V, H]`; no cache."""
    length, size = features.shape[0], drafter.config.block_size
    positions = torch.arange(length + size)
    masks = [
        drafter.block_mask(layer, positions[length:], positions, torch.tensor([length]))
        for layer in range(drafter.config.num_hidden_layers)
    ]
    block = embed[block_tokens(drafter, anchor)]
    with torch.no_grad():
        return drafter(block, positions[None, length:], features[None], positions[None, :length], masks)


def propose_reference(drafter: DFlashDrafter, embed: Tensor, head: Tensor, features: Tensor, anchor: Tensor) -> Tensor:
    """The proposal `[W-1]` of one block, with the target's embedding and head, each `[V, H]`."""
    hidden = hidden_reference(drafter, embed, features, anchor)[0, 1:]
    return (hidden @ head.T).argmax(-1)
