"""A transformers Qwen hybrid -> the two stages of a round, over the model's own modules.

The forwards here follow transformers' `DecoderLayer.forward`, `GatedDeltaNet.forward` and `Attention.forward` with the
same order and names; they differ in three ways: one sequence without a batch dimension, our static cache, and a stop
at the router boundary of Layer 0. tests/models/test_fingerprints.py fails when a release changes what they follow.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks

from hybridspec_generation.cache import CacheShape, TargetCache
from hybridspec_generation.gdn import GDNParams, GDNShape
from hybridspec_generation.state import RouterBoundary
from hybridspec_kernels import GDNProjection

Rotary = tuple[Tensor, Tensor]

LINEAR_FORWARD = nn.Linear.forward

# modules whose forward hooks only look: transformers leaves its own in place after output_hidden_states=True, and
# another thread's prefill may have ours on at the same time
PASSIVE_HOOKS = ("transformers.utils.output_capturing", "hybridspec_hf.prefill")


class GDNInputs(NamedTuple):
    """Projections of a GDN layer: mixed_qkv `[w, C]`, gate z `[w, HV*V]`, raw b and a `[w, HV]`."""

    mixed_qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor


class SplitTarget:
    """Base of the families; implements `hybridspec_generation.protocols.Target`.

    Attributes:
        MODEL_CLASSES: names of the transformers classes that the family accepts.
        rotary_axes: rows of the rotary positions (3 for the multimodal rotary of qwen3_5, else 1).
        layers, norm, embed_tokens, lm_head: the model's modules. mixers: each layer's GDN or attention module.
    """

    MODEL_CLASSES: ClassVar[tuple[str, ...]]
    rotary_axes: ClassVar[int] = 1
    apply_rotary: ClassVar[Callable[..., Rotary]]

    def __init__(self, model: nn.Module, feature_layers: tuple[int, ...] = ()) -> None:
        text: Any = model.model
        text = getattr(text, "language_model", text)
        config = text.config
        check_one_device(model)
        check_plain_forwards(bypassed_modules(model, text))
        check_config(config)
        self.layers = text.layers[: config.num_hidden_layers]
        self.norm, self.embed_tokens = text.norm, text.embed_tokens
        self.rotary_emb: Any = text.rotary_emb
        self.lm_head: Any = model.lm_head
        self.feature_layers = feature_layers
        self.hidden_size: int = config.hidden_size
        # the layers' own, which may have been put into another order
        self.layer_types: list[str] = [layer.block_type for layer in self.layers]
        self.mixers = [
            layer.linear_attn if kind == "linear_attention" else layer.self_attn
            for layer, kind in zip(self.layers, self.layer_types, strict=True)
        ]
        # index of each layer among those of its kind
        self.kind_index = [self.layer_types[:i].count(kind) for i, kind in enumerate(self.layer_types)]
        moe_layers = [layer for layer in self.layers if hasattr(layer.mlp, "experts")]
        self.num_moe_layers = len(moe_layers)
        self.top_k: int = config.num_experts_per_tok if hasattr(self.layers[0].mlp, "experts") else 0
        self.num_experts: int = config.num_experts if self.top_k else 0
        self.cache_shape = self._cache_shape(config)
        gdn_modules = [m for m, kind in zip(self.mixers, self.layer_types, strict=True) if kind == "linear_attention"]
        self.gdn_params = [gdn_params(module) for module in gdn_modules]
        # rows only: the weights are taken from the module at each use, so that none outlives it here
        self.gdn_rows = [self.projection_rows(module) for module in gdn_modules]

    def _cache_shape(self, config: Any) -> CacheShape:
        dtype, device = self.embed_tokens.weight.dtype, self.embed_tokens.weight.device
        return CacheShape(
            attention_layers=self.layer_types.count("full_attention"),
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            gdn=GDNShape(
                layers=self.layer_types.count("linear_attention"),
                key_heads=config.linear_num_key_heads,
                value_heads=config.linear_num_value_heads,
                key_dim=config.linear_key_head_dim,
                value_dim=config.linear_value_head_dim,
                taps=config.linear_conv_kernel_dim,
                dtype=dtype,
                device=device,
            ),
            rotary_axes=self.rotary_axes,
            dtype=dtype,
            device=device,
        )

    # ---- the two stages

    def stage0(self, tokens: Tensor, cache: TargetCache, boundary: RouterBoundary) -> None:
        """Layer 0 up to its router, see `Target.stage0`."""
        u, layer = len(tokens), self.layers[0]
        hidden_states = self.embed_tokens(tokens)
        hidden_states = hidden_states + self.mix_tokens(0, layer.input_layernorm(hidden_states), cache)
        boundary.residual[:u] = hidden_states
        hidden_states = layer.post_attention_layernorm(hidden_states)
        boundary.hidden[:u] = hidden_states
        if self.top_k:
            _, routing_weights, selected_experts = layer.mlp.gate(hidden_states)
            boundary.expert_ids[:u] = selected_experts
            boundary.expert_weights[:u] = routing_weights

    def stage1(self, w: int, cache: TargetCache, boundary: RouterBoundary, features: Tensor | None) -> Tensor:
        """Layer 0 from its experts on, then the other layers, see `Target.stage1`."""
        hidden_states = boundary.residual[:w] + self.resume_mlp(w, boundary)
        self.record_features(0, hidden_states, features)
        rotary = self.rotary(hidden_states, cache)
        for i in range(1, len(self.layers)):
            layer = self.layers[i]
            hidden_states = hidden_states + self.mix_tokens(i, layer.input_layernorm(hidden_states), cache, rotary)
            # the MoE block wants a batch dimension
            hidden_states = hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states)[None])[0]
            self.record_features(i, hidden_states, features)
        return self.norm(hidden_states)

    def next_tokens(self, hidden: Tensor, out: Tensor) -> None:
        """Greedy choice after each row; fp32 first, as generate does, so that ties fall the same way."""
        torch.argmax(self.lm_head(hidden).float(), -1, out=out)

    # ---- their parts

    def resume_mlp(self, w: int, boundary: RouterBoundary) -> Tensor:
        """Layer 0's MLP output for the first w boundary rows, without running its router (SparseMoeBlock.forward)."""
        mlp, hidden_states = self.layers[0].mlp, boundary.hidden[:w]
        if not self.top_k:
            return mlp(hidden_states)
        expert_output = mlp.experts(hidden_states, boundary.expert_ids[:w], boundary.expert_weights[:w])
        return expert_output + F.sigmoid(mlp.shared_expert_gate(hidden_states)) * mlp.shared_expert(hidden_states)

    def record_features(self, layer: int, hidden_states: Tensor, features: Tensor | None) -> None:
        """Copy the layer's output `[w, H]` into its column block of the drafter's features `[W, A*H]`."""
        if features is None:
            return
        size = self.hidden_size
        for column, wanted in enumerate(self.feature_layers):
            if wanted == layer:
                features[: len(hidden_states), column * size : (column + 1) * size] = hidden_states

    def mix_tokens(self, i: int, hidden_states: Tensor, cache: TargetCache, rotary: Rotary | None = None) -> Tensor:
        """Token mixer of layer i on `[w, H]`: writes its part of the cache, commits nothing."""
        if self.layer_types[i] == "linear_attention":
            return self.gated_delta_net(self.mixers[i], self.kind_index[i], hidden_states, cache)
        rotary = self.rotary(hidden_states, cache) if rotary is None else rotary
        return self.attention(self.mixers[i], self.kind_index[i], hidden_states, cache, rotary)

    def rotary(self, hidden_states: Tensor, cache: TargetCache) -> Rotary:
        """cos and sin `[1, w, D]` at this round's positions."""
        positions = cache.position_offset[:, None] + cache.slots(len(hidden_states))
        return self.rotary_emb(hidden_states, positions[:, None] if self.rotary_axes == 3 else positions)

    def project_gdn(self, module: Any, hidden_states: Tensor) -> GDNInputs:
        """Input projections of a GDN layer; the families differ in how they store them."""
        raise NotImplementedError

    def projection_rows(self, module: Any) -> Tensor | None:
        """`GDNProjection.row` of the same projections; None if one of them is more than a plain linear layer."""
        raise NotImplementedError

    def projection_weights(self, module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The other fields of `GDNProjection`."""
        raise NotImplementedError

    def gated_delta_net(self, module: Any, index: int, hidden_states: Tensor, cache: TargetCache) -> Tensor:
        """`GatedDeltaNet.forward` on w tokens: outputs from S0, what the commit needs into the cache (Eq. 3, 10)."""
        gdn, params, rows = cache.gdn, self.gdn_params[index], self.gdn_rows[index]
        w = len(hidden_states)
        if gdn.kernels and rows is not None:
            projection = GDNProjection(*self.projection_weights(module), rows)
            mixed_qkv, z, a, b = gdn.project(index, hidden_states.contiguous(), projection, params)
            core_attn_out = gdn.verify_convolved(index, mixed_qkv, a, b, params)
        else:
            mixed_qkv, z, b, a = self.project_gdn(module, hidden_states)
            gdn.inputs(index, w).copy_(mixed_qkv)
            core_attn_out = gdn.verify(index, w, a.contiguous(), b.contiguous(), params)
        value_dim = gdn.shape.value_dim
        core_attn_out = module.norm(core_attn_out.reshape(-1, value_dim), z.reshape(-1, value_dim))
        return module.out_proj(core_attn_out.reshape(w, -1))

    def attention(self, module: Any, index: int, hidden_states: Tensor, cache: TargetCache, rotary: Rotary) -> Tensor:
        """`Attention.forward` on w tokens against the static cache."""
        w, head_dim = len(hidden_states), module.head_dim
        query_states, gate = module.q_proj(hidden_states).view(w, -1, 2 * head_dim).chunk(2, dim=-1)
        query_states = module.q_norm(query_states).transpose(0, 1)[None]
        key_states = module.k_norm(module.k_proj(hidden_states).view(w, -1, head_dim)).transpose(0, 1)[None]
        value_states = module.v_proj(hidden_states).view(w, -1, head_dim).transpose(0, 1)
        query_states, key_states = type(self).apply_rotary(query_states, key_states, *rotary)
        cache.write_kv(index, key_states[0], value_states)
        visible = torch.arange(cache.capacity, device=cache.length.device) <= cache.slots(w)[:, None]
        attn_output = F.scaled_dot_product_attention(
            query_states,
            cache.keys[index][None],
            cache.values[index][None],
            attn_mask=visible,
            scale=module.scaling,
            enable_gqa=True,
        )
        attn_output = attn_output[0].transpose(0, 1).reshape(w, -1)
        return module.o_proj(attn_output * torch.sigmoid(gate.reshape(w, -1)))


def gdn_params(module: Any) -> GDNParams:
    """A GDN layer's parameters besides its projections; the convolution's weight is transposed."""
    with torch.inference_mode(False):
        conv_weight = module.conv1d.weight.detach()[:, 0].t().contiguous()
    return GDNParams(conv_weight, module.A_log.detach(), module.dt_bias.detach())


def plain_linear(module: Any) -> bool:
    """Whether a module only computes `x @ weight.T` on plain numbers, so that another kernel may read its weight."""
    return (
        type(module) is nn.Linear
        and nn.Linear.forward is LINEAR_FORWARD
        and not (module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks)
        and module.bias is None
        # quantized weights are subclasses that show another dtype
        and type(module.weight) is nn.Parameter
        and module.weight.is_contiguous()
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
    )


def check_one_device(model: nn.Module) -> None:
    """Raise if the model's weights are on several devices or offloaded."""
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ValueError(
            f"HybridSpec needs the whole target on one device, found its weights on {devices}. "
            'Load it with device_map={"": "cuda:0"} (or "cpu"), without offloading.'
        )


def bypassed_modules(model: Any, text: Any) -> list[Any]:
    """The modules whose parts rounds call one by one: what hangs on their own forward would be left out."""
    mixers = [
        getattr(layer, name) for layer in text.layers for name in ("linear_attn", "self_attn") if hasattr(layer, name)
    ]
    first_mlp = text.layers[0].mlp
    return [model, model.model, text, *text.layers, *mixers, *([first_mlp] if hasattr(first_mlp, "experts") else [])]


def check_plain_forwards(modules: list[Any]) -> None:
    """Raise if one of the modules runs more than its transformers class does: hooks, or another forward."""
    for module in modules:
        hooks = [*list(module._forward_hooks.values()), *list(module._forward_pre_hooks.values())]
        foreign = [hook for hook in hooks if getattr(hook, "__module__", None) not in PASSIVE_HOOKS]
        if foreign or not runs_own_forward(module):
            what = "has forward hooks" if foreign else "does not run the forward of its transformers class"
            raise ValueError(
                f"{type(module).__name__} {what}, which HybridSpec's rounds would not run. Remove the hook or the "
                "override (hooks on linear layers, norms and routers do run), or drop generation_mode."
            )


def runs_own_forward(module: Any) -> bool:
    """Whether a call ends in the forward of the module's transformers class, perhaps compiled or under accelerate."""
    # torch.compile(module)
    module = getattr(module, "_orig_mod", module)
    kind: Any = type(module)
    own: Any = next((base for base in kind.__mro__ if base.__module__.startswith("transformers.")), None)
    if own is None or kind.forward is not own.forward:
        return False
    # torch.compile(module.forward)
    forward = vars(module).get("forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    # accelerate keeps its device hook on the instance and says so
    return forward is None or hasattr(module, "_hf_hook") or getattr(forward, "__func__", None) is own.forward


def check_config(config: Any) -> None:
    """Raise for an activation that the GDN forward here does not have, or rotary angles that depend on the call."""
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(
            f"The target has hidden_act={config.hidden_act!r}; HybridSpec's GDN forward is written for silu. "
            "Drop generation_mode to use plain generate."
        )
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"The target's rope_type is {rope_type!r}: its angles change with the text's length, so tokens verified "
            'together would be rotated differently. Use "default", "linear", "yarn" or "llama3", or drop '
            "generation_mode."
        )
