"""Split forward of qwen3_next (Qwen3-Next-80B-A3B).

Follows transformers 5.24 `models/qwen3_next/modeling_qwen3_next.py`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

from .base import GDNInputs, SplitTarget, plain_linear


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

    def projection_rows(self, module: Any) -> Tensor | None:
        """Two projections, each with a part for every key head: q, k, its value heads' v and z; and their b and a."""
        if not (plain_linear(module.in_proj_qkvz) and plain_linear(module.in_proj_ba)):
            return None
        key_dim, heads = module.head_k_dim, module.num_v_heads // module.num_k_heads
        values, device = heads * module.head_v_dim, module.in_proj_ba.weight.device
        rows = torch.arange(len(module.in_proj_qkvz.weight), dtype=torch.int32, device=device)
        q, k, v, z = rows.view(module.num_k_heads, -1).split([key_dim, key_dim, values, values], dim=1)
        gates = torch.arange(len(module.in_proj_ba.weight), dtype=torch.int32, device=device)
        b, a = gates.view(module.num_k_heads, 2, heads).unbind(1)
        return torch.cat([part.flatten() for part in (q, k, v, z, b, a)])

    def projection_weights(self, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv and z, b and a."""
        qkvz, ba = module.in_proj_qkvz.weight, module.in_proj_ba.weight
        return qkvz, qkvz, ba, ba
