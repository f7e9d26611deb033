"""Split forward of dense qwen3_5: no router, so Layer 0 stops before its MLP and no correction is made.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

from .base import GDNInputs, SplitTarget, plain_linear


class Qwen3_5Target(SplitTarget):
    """qwen3_5: separate qkv, z, b and a projections, multimodal rotary positions."""

    MODEL_CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    rotary_axes = 3
    apply_rotary = staticmethod(apply_rotary_pos_emb)

    def project_gdn(self, module: Any, hidden_states: Tensor) -> GDNInputs:
        """`[w, H]` -> the layer's projections."""
        return GDNInputs(
            module.in_proj_qkv(hidden_states),
            module.in_proj_z(hidden_states),
            module.in_proj_b(hidden_states),
            module.in_proj_a(hidden_states),
        )

    def projection_rows(self, module: Any) -> Tensor | None:
        """In order, for each of the four projections."""
        layers = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        if not all(map(plain_linear, layers)):
            return None
        sizes, device = [len(layer.weight) for layer in layers], module.in_proj_qkv.weight.device
        return torch.cat([torch.arange(n, dtype=torch.int32, device=device) for n in sizes])

    def projection_weights(self, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv, z, b and a."""
        return (
            module.in_proj_qkv.weight, module.in_proj_z.weight, module.in_proj_b.weight, module.in_proj_a.weight
        )  # fmt: skip
