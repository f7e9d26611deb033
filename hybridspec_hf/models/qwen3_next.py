"""Split forward of qwen3_next (Qwen3-Next-80B-A3B).

Follows transformers 5.24 `models/qwen3_next/modeling_qwen3_next.py`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from .base import GDNInputs, SplitTarget


class Qwen3NextTarget(SplitTarget):
    """qwen3_next: q, k, v and z of a key head lie side by side in one projection, b and a in another."""

    MODEL_CLASSES = ("Qwen3NextForCausalLM",)
    apply_rotary = staticmethod(apply_rotary_pos_emb)

    def project_gdn(self, module: Any, hidden_states: Tensor) -> GDNInputs:
        """`[w, H]` -> the layer's projections."""
        w = len(hidden_states)
        query, key, value, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden_states[None]), module.in_proj_ba(hidden_states[None])
        )
        mixed_qkv = torch.cat([x.reshape(w, -1) for x in (query, key, value)], dim=-1)
        return GDNInputs(mixed_qkv, z.reshape(w, -1), b[0], a[0])
