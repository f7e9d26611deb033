"""Split forward of dense qwen3_5: no router, so Layer 0 stops before its MLP and no correction is made.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`.
"""

from typing import Any

from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

from .base import GDNInputs, SplitTarget


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
