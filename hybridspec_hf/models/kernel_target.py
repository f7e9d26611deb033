"""The split forward for up to 16 tokens as a sequence of kernel launches: capture-safe, over the model's own weights.

`SplitTarget` runs the model's modules one by one and works everywhere; this runs the same layers with the project's
kernels, reads every length on the GPU, and writes static buffers only. `kernel_support.py` says when it cannot.
"""

from typing import Any

import torch
from torch import Tensor

from hybridspec_generation.cache import TargetCache
from hybridspec_generation.state import RouterBoundary
from hybridspec_kernels import (
    MAX_TOKENS,
    AttentionScratch,
    ExpertSlots,
    ExpertWeights,
    GDNProjection,
    HeadScratch,
    Routing,
    add_rms_norm,
    attention_splits,
    attention_verify,
    embed_rms_norm,
    gated_linear,
    head_argmax,
    linear,
    moe_combine_norm,
    moe_experts,
    moe_route,
    swiglu_linear,
)

from .base import SplitTarget
from .part_sums import PartSums

# how many rotary rows are computed at once
ROTARY_CHUNK = 32768

# what a layer adds to the residual stream: a tensor, the outputs of the listed experts, or nothing
Delta = Tensor | ExpertSlots | None


class KernelTarget:
    """Implements `hybridspec_generation.protocols.Target` on one cache; for W <= 16 rows.

    Every launch may overlap with the one in front of it: none writes what its successor reads before waiting (weights,
    and a GDN layer's state, which only the commit writes, behind other work).

    Args:
        split: the target's split view, whose modules hold the weights.
        cache: the cache that rounds work on; its capacity is that of the rotary tables.
    """

    def __init__(self, split: SplitTarget, cache: TargetCache) -> None:
        self.split, self.cache = split, cache
        self.cache_shape, self.hidden_size = split.cache_shape, split.hidden_size
        self.top_k, self.num_moe_layers, self.num_experts = split.top_k, split.num_moe_layers, split.num_experts
        with torch.inference_mode(False):
            self._allocate(cache)

    def _allocate(self, cache: TargetCache) -> None:
        split, W, device = self.split, cache.block, cache.length.device

        def buffer(*size: int) -> Tensor:
            return torch.zeros(size, dtype=split.cache_shape.dtype, device=device)

        self.hidden = buffer(W, split.hidden_size)
        self.head_scratch = HeadScratch.allocate(W, len(split.lm_head.weight), device)
        if "full_attention" in split.layer_types:
            attention = split.mixers[split.layer_types.index("full_attention")]
            head_dim, (kv_heads, capacity) = attention.head_dim, cache.keys.shape[1:3]
            query_heads = len(attention.q_proj.weight) // (2 * head_dim)
            self.projected = buffer(W, (2 * query_heads + 2 * kv_heads) * head_dim)
            self.mixed = buffer(W, query_heads * head_dim)
            splits = attention_splits(capacity, kv_heads, device)
            self.attention_scratch = AttentionScratch.allocate(W, query_heads, head_dim, splits, device)
            positions = torch.zeros(split.rotary_axes, 1, dtype=torch.int64, device=device)
            channels = self._rotary(positions)[0].shape[-1]
            self.cos, self.sin = buffer(capacity, channels), buffer(capacity, channels)
        if split.top_k:
            # Stage 1 takes up Layer 0's shared expert where Stage 0 left it
            self.boundary_front = buffer(W, sum(map(len, front_weights(split.layers[0].mlp))))
            self.slots = ExpertSlots.allocate(W, split.top_k, device)
            inner = max(max(e.down.shape[2], e.shared_down.shape[1]) for e in self._experts())
            self.act = buffer(len(self.slots.expert), MAX_TOKENS, inner)
            self.expert_outputs = buffer(len(self.slots.expert), MAX_TOKENS, split.hidden_size)
        dense = [len(layer.mlp.gate_proj.weight) for layer in split.layers if hasattr(layer.mlp, "gate_proj")]
        self.dense = buffer(W, max(dense, default=0))
        fronts = [sum(map(len, front_weights(x.mlp))) for x in split.layers if hasattr(x.mlp, "experts")]
        self.sums = PartSums(W, max([split.hidden_size, *fronts]), device)

    def _experts(self) -> list[ExpertWeights]:
        return [expert_weights(layer.mlp) for layer in self.split.layers if hasattr(layer.mlp, "experts")]

    def refresh(self, split: SplitTarget) -> None:
        """Take over what a new view of the same weights copied from them, in place."""
        # a module without parameters, which may have been replaced
        self.split.rotary_emb = split.rotary_emb
        for mine, theirs in zip(self.split.gdn_params, split.gdn_params, strict=True):
            mine.conv_weight.copy_(theirs.conv_weight)

    def start_request(self) -> None:
        """Take over a prefilled cache: the rotary tables for its positions."""
        if "full_attention" not in self.split.layer_types:
            return
        for first in range(0, len(self.cos), ROTARY_CHUNK):
            rows = slice(first, min(first + ROTARY_CHUNK, len(self.cos)))
            slots = torch.arange(rows.start, rows.stop, device=self.cos.device)
            cos, sin = self._rotary(self.cache.position_offset[:, None] + slots)
            self.cos[rows], self.sin[rows] = cos[0], sin[0]

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        like = self.hidden[:1]
        cos, sin = self.split.rotary_emb(like, positions[:, None] if self.split.rotary_axes == 3 else positions)
        return cos, sin

    # ---- the two stages

    def stage0(self, tokens: Tensor, cache: TargetCache, boundary: RouterBoundary) -> None:
        """Layer 0 up to its router, see `Target.stage0`."""
        u, layer = len(tokens), self.split.layers[0]
        residual, hidden = boundary.residual[:u], boundary.hidden[:u]
        norm = layer.input_layernorm
        embed_rms_norm(
            tokens, self.split.embed_tokens.weight, norm.weight, residual, self.hidden[:u],
            eps=norm.eps, zero_centered=True, overlap=True,
        )  # fmt: skip
        self.norm(layer.post_attention_layernorm, residual, self.mix_tokens(0, self.hidden[:u]), hidden)
        if self.top_k:
            front = self.boundary_front[:u]
            linear(hidden, front_weights(layer.mlp), front, overlap=True)
            self.route(front, boundary_routing(boundary), None)

    def stage1(self, w: int, cache: TargetCache, boundary: RouterBoundary, features: Tensor | None) -> Tensor:
        """Layer 0 from its experts on, then the other layers, see `Target.stage1`; uses up the boundary's residual."""
        residual, hidden, layers = boundary.residual[:w], self.hidden[:w], self.split.layers
        delta = self.resume_mlp(w, boundary)
        for i in range(1, len(layers)):
            self.norm(layers[i].input_layernorm, residual, delta, hidden, self.feature(i - 1, w, features))
            self.norm(layers[i].post_attention_layernorm, residual, self.mix_tokens(i, hidden), hidden)
            delta = self.mlp(layers[i].mlp, hidden)
        self.norm(self.split.norm, residual, delta, hidden, self.feature(len(layers) - 1, w, features))
        return hidden

    def next_tokens(self, hidden: Tensor, out: Tensor) -> None:
        """Greedy choice after each row, see `Target.next_tokens`."""
        head_argmax(hidden, self.split.lm_head.weight, out, self.head_scratch, overlap=True)

    # ---- their parts

    def norm(self, module: Any, residual: Tensor, delta: Delta, out: Tensor, feature: Tensor | None = None) -> None:
        """residual += delta; out = the layer norm of residual; a layer's output is also a drafter's feature."""
        options: dict[str, Any] = {"eps": module.eps, "feature": feature, "overlap": True}
        if isinstance(delta, ExpertSlots):
            moe_combine_norm(residual, self.expert_outputs, delta, module.weight, out, **options)
        else:
            add_rms_norm(residual, delta, module.weight, out, zero_centered=True, **options)

    def feature(self, layer: int, w: int, features: Tensor | None) -> Tensor | None:
        """The drafter's columns of a layer's output, `[w, H]`, if it reads them."""
        if features is None or layer not in self.split.feature_layers:
            return None
        column = self.split.feature_layers.index(layer) * self.hidden_size
        return features[:w, column : column + self.hidden_size]

    def mix_tokens(self, i: int, hidden: Tensor) -> Tensor:
        """Token mixer of layer i on `[w, H]`: writes its part of the cache, commits nothing."""
        module, index = self.split.mixers[i], self.split.kind_index[i]
        if self.split.layer_types[i] == "linear_attention":
            return self.gated_delta_net(module, index, hidden)
        return self.attention(module, index, hidden)

    def gated_delta_net(self, module: Any, index: int, hidden: Tensor) -> Tensor:
        """Projections and convolution; verification; gated norm and output projection: one launch each."""
        gdn, params, rows, w = self.cache.gdn, self.split.gdn_params[index], self.split.gdn_rows[index], len(hidden)
        assert rows is not None
        projection = GDNProjection(*self.split.projection_weights(module), rows)
        mixed_qkv, z, a, b = gdn.project(index, hidden, projection, params, overlap=True)
        out = gdn.verify_convolved(index, mixed_qkv, a, b, params, overlap=True)
        norm, weight = module.norm, module.out_proj.weight
        parts = self.sums.room(w, *weight.shape)
        gated_linear(out, z, norm.weight, weight, parts, eps=norm.variance_epsilon, overlap=True)
        return parts

    def attention(self, module: Any, index: int, hidden: Tensor) -> Tensor:
        """Joint projection; attention over the visible slots, norms and rotation included; output projection."""
        cache, w = self.cache, len(hidden)
        projected, mixed = self.projected[:w], self.mixed[:w]
        linear(hidden, (module.q_proj.weight, module.k_proj.weight, module.v_proj.weight), projected, overlap=True)
        attention_verify(
            projected, module.q_norm.weight, module.k_norm.weight, self.cos, self.sin, cache.length,
            cache.keys[index], cache.values[index], mixed, self.attention_scratch, gated=True, zero_centered=True,
            eps=module.q_norm.eps, scale=module.scaling, overlap=True,
        )  # fmt: skip
        return self.sums.linear(mixed, module.o_proj.weight)

    def resume_mlp(self, w: int, boundary: RouterBoundary) -> Delta:
        """Layer 0's MLP output for the first w boundary rows, without running its router."""
        mlp, hidden = self.split.layers[0].mlp, boundary.hidden[:w]
        if not self.top_k:
            return self.mlp(mlp, hidden)
        front = self.boundary_front[:w]
        self.route(front, boundary_routing(boundary), self.slots, choose=False)
        return self.run_experts(mlp, hidden, front)

    def route(self, front: Tensor, routing: Routing | None, slots: ExpertSlots | None, *, choose: bool = True) -> None:
        """`moe_route` with this model's sizes."""
        moe_route(
            front, routing, slots, experts=self.num_experts, dtype=self.hidden.dtype, choose=choose, overlap=True
        )  # fmt: skip

    def mlp(self, module: Any, hidden: Tensor) -> Delta:
        """A layer's MLP or MoE block on `[w, H]`."""
        w = len(hidden)
        if hasattr(module, "experts"):
            front = self.sums.linear(hidden, *front_weights(module))
            self.route(front, None, self.slots)
            return self.run_experts(module, hidden, front)
        inner = self.dense[:w]
        swiglu_linear(hidden, module.gate_proj.weight, module.up_proj.weight, inner, overlap=True)
        return self.sums.linear(inner, module.down_proj.weight)

    def run_experts(self, module: Any, hidden: Tensor, front: Tensor) -> Delta:
        """Routed and shared experts of the listed slots; the norm behind them adds up each token's."""
        weights = expert_weights(module)
        moe_experts(hidden, self.slots, self.top_k, weights, front, self.act, self.expert_outputs, overlap=True)
        return self.slots


def boundary_routing(boundary: RouterBoundary) -> Routing:
    """The boundary's experts, where the routing kernel writes and reads them."""
    return Routing(boundary.expert_ids, boundary.expert_weights)


def expert_weights(module: Any) -> ExpertWeights:
    """The weights of an MoE block where transformers keeps them."""
    experts = module.experts
    return ExpertWeights(experts.gate_up_proj, experts.down_proj, module.shared_expert.down_proj.weight)


def front_weights(module: Any) -> tuple[Tensor, ...]:
    """What of an MoE block does not wait for its router: the router, the shared expert's gate, and its projections."""
    shared = module.shared_expert
    return (
        module.gate.weight, module.shared_expert_gate.weight, shared.gate_proj.weight, shared.up_proj.weight
    )  # fmt: skip
