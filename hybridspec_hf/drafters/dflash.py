"""Target features and a block of mask tokens → the block's hidden states: z-lab's DFlash drafter in PyTorch.

The context's keys and values come straight from the fused features (`fc`, `hidden_norm`, then each layer's
`k_proj`, `k_norm`, RoPE and `v_proj`); only the block's rows run through the layers. Embedding and lm_head
are the target's and no part of this module. The same modules train (autograd, any batch, any mask) and
decode (the engine keeps the projected keys in its own buffers).
"""

import os
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridspec_hf.drafters.config import DFlashConfig
from hybridspec_hf.drafters.loading import (
    ALIASES,
    check_dtype,
    read_raw_config,
    refuse_bad_weights,
    refuse_duplicate_weights,
    settle_dtype,
)
from hybridspec_hf.drafters.modules import DFlashLayer, DFlashRMSNorm, KeyValue, Rotary
from hybridspec_hf.drafters.visibility import VisibilityRule, block_mask, training_mask


class DFlashDrafter(PreTrainedModel):
    """A DFlash drafter: `fc` and `hidden_norm` fuse the target's features, the layers denoise the block."""

    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = ""
    main_input_name = "block"
    _no_split_modules: ClassVar[list[str]] = ["DFlashLayer"]
    _supports_sdpa = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.layers = cast("Sequence[DFlashLayer]", layers)
        self.norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rules = [_rule(config, layer) for layer in range(config.num_hidden_layers)]
        self.post_init()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        device_map: Any = None,
        dtype: str | torch.dtype = "auto",
        revision: str = "main",
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str = "",
    ) -> "DFlashDrafter":
        """Load a drafter from a folder or a Hub repository, in z-lab's or speculators' format.

        Args:
            pretrained_model_name_or_path: folder with config.json and safetensors (one or sharded), or repository.
            device_map: as in transformers.
            dtype: torch.bfloat16, torch.float32, or "auto" for the file's own (fp16 files are read as bf16).
            revision, token, cache_dir, local_files_only, force_download, subfolder: as in transformers.

        Raises:
            ValueError: the config is not understood, a weight is missing, unexpected or of another shape,
                or dtype is neither bf16 nor fp32.
            OSError: a file cannot be found.
        """
        source: dict[str, Any] = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "force_download": force_download,
            "subfolder": subfolder,
        }
        path, dtype = pretrained_model_name_or_path, check_dtype(dtype)
        config = DFlashConfig.from_raw(read_raw_config(path, source))
        refuse_duplicate_weights(path, source)
        drafter, info = super().from_pretrained(
            path,
            config=config,
            dtype=dtype,
            device_map=device_map,
            use_safetensors=True,
            key_mapping=ALIASES,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **source,
        )
        refuse_bad_weights(path, info)
        return settle_dtype(path, drafter)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "50GB",
        push_to_hub: bool = False,
        token: str | bool | None = None,
    ) -> None:
        """Write config.json in z-lab's nested schema and the weights under z-lab's names.

        Args:
            save_directory: folder, created if absent. This class and z-lab's package both read it.
            max_shard_size, push_to_hub, token: as in transformers.

        Raises:
            ValueError: z-lab's schema cannot express this drafter.
        """
        # loading may have renamed aliases; the copy keeps z-lab's names instead of restoring them
        super().save_pretrained(
            save_directory,
            max_shard_size=max_shard_size,
            push_to_hub=push_to_hub,
            token=token,
            save_original_format=False,
        )

    def rotary(self, positions: Tensor) -> Rotary:
        """Rotary angles of 1-D text positions.

        Args:
            positions: `[B, T]`, integer.

        Returns:
            cos and sin, each `[B, T, D]`, fp32.
        """
        dim, theta = self.config.head_dim, self.config.rope_theta
        steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
        # [B, T, D/2]
        angles = positions[..., None].float() * (1.0 / (theta ** (steps / dim)))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def fuse_features(self, features: Tensor) -> Tensor:
        """Fuse the target's features into context hidden states.

        Args:
            features: `[B, T, A*H]`, outputs of the target layers `target_layer_ids`, concatenated in that order;
                any float dtype, cast to the drafter's.

        Returns:
            `[B, T, H]`, the drafter's dtype.
        """
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def project_context(self, context: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of context tokens, for every layer; each token's depend on that token alone.

        Args:
            context: `[B, T, H]`, from `fuse_features`.
            positions: `[B, T]`, integer, the tokens' positions in the text.

        Returns:
            one pair per layer, each tensor `[B, HKV, T, D]`.
        """
        rotary = self.rotary(positions)
        return [layer.self_attn.project_keys(context, rotary) for layer in self.layers]

    def block_mask(self, layer: int, query_positions: Tensor, key_positions: Tensor, context_length: Tensor) -> Tensor:
        """The visibility rule of one layer for a decoding block: `visibility.block_mask`, which documents it.

        Args:
            layer: drafter layer.
            query_positions: `[T]`, int64, `context_length + arange(T)`.
            key_positions: `[S]`, int64, the position of each key slot.
            context_length: `[1]`, int64, never read on the host.

        Returns:
            `[1, 1, T, S]`, bool, True where visible.
        """
        return block_mask(self.rules[layer], query_positions, key_positions, context_length)

    def training_masks(
        self, anchors: Tensor, context_length: int, context_valid: Tensor | None = None
    ) -> list[Tensor]:
        """Masks of `forward` for blocks anchored at `anchors`; layers with the same rule share one tensor.

        Args:
            anchors: `[B, N]`, int64, the anchor's position of each block.
            context_length: `L`, columns of the context.
            context_valid: `[B, L]`, bool, False for padding.

        Returns:
            one mask per layer, `[B, 1, N*W, L + N*W]`, bool.
        """
        size = self.config.block_size
        masks = {rule: training_mask(rule, anchors, context_length, size, context_valid) for rule in set(self.rules)}
        return [masks[rule] for rule in self.rules]

    def forward(
        self,
        block: Tensor,
        block_positions: Tensor,
        features: Tensor,
        context_positions: Tensor,
        masks: Sequence[Tensor],
    ) -> Tensor:
        """Run whole blocks over their whole context, keeping nothing: training and tests.

        Args:
            block: `[B, T, H]`, the target's embeddings of anchors and mask tokens (several blocks in a row).
            block_positions: `[B, T]`, integer.
            features: `[B, L, A*H]`, the target's features.
            context_positions: `[B, L]`, integer.
            masks: one per layer, `[B or 1, 1, T, L + T]`, bool, from `block_mask` or `training_masks`.

        Returns:
            `[B, T, H]`, the hidden states after the final norm, to be given to the target's lm_head.
        """
        hidden = block.to(self.fc.weight.dtype)
        rotary = self.rotary(block_positions)
        context = self.project_context(self.fuse_features(features), context_positions)
        for layer, mask, (context_keys, context_values) in zip(self.layers, masks, context, strict=True):
            keys, values = layer.project_block(hidden, rotary)
            keys, values = torch.cat((context_keys, keys), 2), torch.cat((context_values, values), 2)
            hidden = layer(hidden, rotary, keys, values, mask)
        return self.norm(hidden)


def _rule(config: DFlashConfig, layer: int) -> VisibilityRule:
    window = config.window(layer)
    return VisibilityRule(config.causal(layer), window, window is not None and config.window_anchor == "block")
