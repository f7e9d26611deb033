"""The layers of a DFlash drafter, under z-lab's weight names: keys in, the block's hidden states through.

A layer never holds keys: the caller projects them (context once per token, the block's own once per round),
keeps them where it likes, and hands over all that the queries may see, with a mask.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from hybridspec_hf.drafters.config import DFlashConfig

# cos and sin, each `[B, T, D]` fp32
Rotary = tuple[Tensor, Tensor]
# keys and values, each `[B, HKV, T, D]`
KeyValue = tuple[Tensor, Tensor]


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn each pair (i, i + D/2) of a head by its position's angle, in fp32.

    Args:
        x: `[B, H, T, D]`.
        rotary: cos and sin, each `[B, T, D]`, fp32.

    Returns:
        `[B, H, T, D]`, x's dtype.
    """
    cos, sin = rotary[0][:, None], rotary[1][:, None]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class DFlashRMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; statistics in fp32, the result in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` → `[..., size]`, same dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DFlashMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, H]` → `[B, T, H]`."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DFlashAttention(nn.Module):
    """Attention of the block's rows over keys that the caller holds: context and block in one tensor."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.num_key_value_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = DFlashRMSNorm(self.head_dim, config.rms_norm_eps)

    def project_keys(self, x: Tensor, rotary: Rotary) -> KeyValue:
        """Project keys and values.

        Args:
            x: `[B, T, H]`: context hidden as it is, or the block's hidden states after the layer's norm.
            rotary: cos and sin at the tokens' positions, each `[B, T, D]`, fp32.

        Returns:
            keys (normed and rotated) and values, each `[B, HKV, T, D]`, x's dtype.
        """
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        values = self._heads(self.v_proj(x)).transpose(1, 2)
        return rotate(keys, rotary), values

    def forward(self, x: Tensor, rotary: Rotary, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend.

        Args:
            x: `[B, T, H]`, the block's hidden states after the layer's norm.
            rotary: cos and sin at the block's positions, each `[B, T, D]`, fp32.
            keys, values: `[B, HKV, S, D]`, all keys that the queries may see, the block's own among them.
                Masked slots must be finite.
            mask: `[B or 1, 1, T, S]`, bool, True where visible.

        Returns:
            `[B, T, H]`, x's dtype.
        """
        batch, length, _ = x.shape
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rotary)
        # the query heads of a group become rows of its key head: no copy of keys and values per query head
        groups = queries.shape[1] // self.num_key_value_heads
        queries = queries.reshape(batch, self.num_key_value_heads, groups * length, self.head_dim)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
        mixed = mixed.reshape(batch, -1, length, self.head_dim).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch, length, -1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class DFlashLayer(nn.Module):
    """One drafter layer: pre-norm attention, pre-norm MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DFlashRMSNorm(config.hidden_size, config.rms_norm_eps)

    def project_block(self, hidden: Tensor, rotary: Rotary) -> KeyValue:
        """Keys and values of the block's own rows, which the caller puts among `forward`'s keys.

        Args:
            hidden: `[B, T, H]`, the hidden states that enter this layer.
            rotary: cos and sin at the block's positions, each `[B, T, D]`, fp32.

        Returns:
            keys and values, each `[B, HKV, T, D]`.
        """
        return self.self_attn.project_keys(self.input_layernorm(hidden), rotary)

    def forward(self, hidden: Tensor, rotary: Rotary, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Run the block's rows through the layer; arguments and shapes as in `DFlashAttention.forward`.

        Args:
            hidden: `[B, T, H]`, before the layer's norm.

        Returns:
            `[B, T, H]`, same dtype.
        """
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, keys, values, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
