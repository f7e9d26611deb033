"""A bound DFlash drafter as a sequence of kernel launches: capture-safe, for blocks of up to 16 rows."""

from typing import Any

import torch
from torch import Tensor

from hybridspec_generation.state import Draft
from hybridspec_kernels import (
    MAX_TOKENS,
    AttentionScratch,
    HeadScratch,
    add_rms_norm,
    attention_splits,
    attention_store,
    attention_verify,
    embed_rms_norm,
    has_kernels,
    head_draft,
    linear,
    swiglu_linear,
)

from ..models.kernel_support import MOST_COLUMNS, MOST_HEAD_CHANNELS, computes_plainly
from ..models.part_sums import PartSums
from .block import BlockDrafter, DraftContext
from .dflash import DFlashDrafter


class KernelDrafter(BlockDrafter):
    """`BlockDrafter` in kernels; a prompt's features still go through PyTorch.

    Args:
        drafter, embed_tokens, lm_head, context: as for `BlockDrafter`, in one dtype.
    """

    def __init__(self, drafter: DFlashDrafter, embed_tokens: Any, lm_head: Any, context: DraftContext) -> None:
        super().__init__(drafter, embed_tokens, lm_head, context)
        with torch.inference_mode(False):
            self._allocate()

    def _allocate(self) -> None:
        config, W, device, dtype = self.drafter.config, self.block_size, self.keys.device, self.keys.dtype
        kv_heads, capacity, head_dim = self.keys.shape[2:]
        query_heads: int = config.num_attention_heads

        def buffer(*size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.residual, self.hidden = buffer(W, config.hidden_size), buffer(W, config.hidden_size)
        self.sums = PartSums(W, config.hidden_size, device)
        self.inner = buffer(W, config.intermediate_size)
        self.projected = buffer(W, (query_heads + 2 * kv_heads) * head_dim)
        layers, columns = config.num_hidden_layers, 2 * kv_heads * head_dim
        # every layer's k and v rows in one weight, so that the context's keys and values are one product
        self.context_weight = buffer(layers * columns, config.hidden_size)
        self.context_norm = buffer(layers, head_dim)
        self.context_projected = buffer(W, layers * columns)
        self.mixed = buffer(W, query_heads * head_dim)
        splits = attention_splits(capacity, kv_heads, device)
        self.attention_scratch = AttentionScratch.allocate(W, query_heads, head_dim, splits, device)
        self.head_scratch = HeadScratch.allocate(W, len(self.lm_head.weight), device)
        # text positions are slots: one table serves every request
        cos, sin = self.drafter.rotary(self.slots[None])
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
        self.refresh()

    def refresh(self) -> None:
        """Copy again what this holds of the drafter's weights, in place: they may have changed."""
        attentions = [layer.self_attn for layer in self.drafter.layers]
        weights = [w.weight for attention in attentions for w in (attention.k_proj, attention.v_proj)]
        torch.cat([weight.detach() for weight in weights], out=self.context_weight)
        torch.stack([attention.k_norm.weight.detach() for attention in attentions], out=self.context_norm)

    def append(self, features: Tensor, start: Tensor) -> None:
        """Context keys and values of `features` `[T, A*H]` at slots `start` `[1]`, ... ."""
        w = len(features)
        if w > self.block_size:
            super().append(features, start)
            return
        drafter, context = self.drafter, self.hidden[:w]
        self.norm(drafter.hidden_norm, None, self.sums.linear(features, drafter.fc.weight), context)
        projected = self.context_projected[:w]
        linear(context, (self.context_weight,), projected, overlap=True)
        attention_store(
            projected, self.context_norm, self.cos, self.sin, start, self.keys[:, 0], self.values[:, 0],
            eps=drafter.layers[0].self_attn.k_norm.eps, overlap=True,
        )  # fmt: skip

    def propose(self, anchor: Tensor, length: Tensor, draft: Draft) -> None:
        """Draft the D tokens after `anchor` `[1]` at position `length` `[1]`, see `Drafter.propose`."""
        residual, hidden, delta = self.residual, self.hidden, None
        norm = self.drafter.layers[0].input_layernorm
        embed_rms_norm(
            anchor, self.embed_tokens.weight, norm.weight, residual, hidden,
            eps=norm.eps, zero_centered=False, filler=self.drafter.config.mask_token_id, overlap=True,
        )  # fmt: skip
        for i, layer in enumerate(self.drafter.layers):
            if delta is not None:
                self.norm(layer.input_layernorm, residual, delta, hidden)
            self.norm(
                layer.post_attention_layernorm, residual, self.attend(i, layer.self_attn, hidden, length), hidden
            )
            mlp = layer.mlp
            swiglu_linear(hidden, mlp.gate_proj.weight, mlp.up_proj.weight, self.inner, overlap=True)
            delta = self.sums.linear(self.inner, mlp.down_proj.weight)
        self.norm(self.drafter.norm, residual, delta, hidden)
        head_draft(hidden[1:], self.lm_head.weight, *draft, self.head_scratch, overlap=True)

    def attend(self, i: int, attention: Any, hidden: Tensor, length: Tensor) -> Tensor:
        """Attention and output projection of layer i on `[W, H]`; `append` overwrites the block's slots."""
        weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        linear(hidden, weights, self.projected, overlap=True)
        rule = self.drafter.rules[i]
        attention_verify(
            self.projected, attention.q_norm.weight, attention.k_norm.weight, self.cos, self.sin, length,
            self.keys[i, 0], self.values[i, 0], self.mixed, self.attention_scratch, gated=False, zero_centered=False,
            eps=attention.k_norm.eps, scale=attention.head_dim**-0.5, causal=rule.causal, window=rule.window,
            window_from_block=rule.window_from_block, overlap=True,
        )  # fmt: skip
        return self.sums.linear(self.mixed, attention.o_proj.weight)

    def norm(self, module: Any, residual: Tensor | None, delta: Tensor | None, out: Tensor) -> None:
        """residual += delta; out = the norm of residual."""
        add_rms_norm(residual, delta, module.weight, out, eps=module.eps, zero_centered=False, overlap=True)


def why_not(drafter: DFlashDrafter, embed_tokens: Any, lm_head: Any) -> str | None:
    """None if the kernels can run this drafter, else the reason in words."""
    config, weight = drafter.config, drafter.fc.weight
    if not has_kernels(weight.device):
        return "Triton kernels need an NVIDIA GPU from SM80 on, and triton"
    if config.block_size is None or config.block_size > MAX_TOKENS:
        return f"the drafter's block has {config.block_size} rows, the kernels take {MAX_TOKENS}"
    if config.attention_bias or config.hidden_act not in ("silu", "swish"):
        return "the drafter has biases, or another activation than silu"
    if config.head_dim > MOST_HEAD_CHANNELS or config.hidden_size > MOST_COLUMNS:
        return f"heads of {config.head_dim} or hidden size {config.hidden_size} are more than the kernels take"
    for module in (embed_tokens, lm_head, *(module for module in drafter.modules() if module is not drafter)):
        if not computes_plainly(module, called_by_rounds=False):
            return f"a {type(module).__name__} is more than a drafter's own layer"
    dtypes = {embed_tokens.weight.dtype, lm_head.weight.dtype, *(p.dtype for p in drafter.parameters())}
    if len(dtypes) != 1:
        return f"drafter and target differ in dtype ({', '.join(sorted(map(str, dtypes)))})"
    return None
