"""Whether a target computes just what the kernels compute: its sizes, and every module that rounds will not call."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from hybridspec_generation.cache import TargetCache

from .base import SplitTarget, plain_linear

# layers of transformers and of our drafter that the kernels stand for, by the end of their names
KNOWN = (
    "RMSNorm", "RMSNormGated", "TopKRouter", "Experts", "SparseMoeBlock", "MLP", "GatedDeltaNet", "Attention",
    "DecoderLayer", "DFlashLayer",
)  # fmt: skip
HOMES = ("transformers.models.qwen3", "hybridspec_hf.drafters.modules")
SILU = ("SiLU", "SiLUActivation")
MOST_HEAD_CHANNELS, MOST_COLUMNS, MOST_EXPERTS = 256, 8192, 4096


def why_not(split: SplitTarget, cache: TargetCache) -> str | None:
    """None if the kernels can run this target's rounds on this cache, else the reason in words."""
    if not cache.gdn.kernels:
        return "the GDN kernels do not run here"
    if reason := unsuited_sizes(split):
        return reason
    if any(rows is None for rows in split.gdn_rows):
        return "a GDN projection is more than a plain linear layer"
    dtypes, mixers = set(), set(map(id, split.mixers))
    called = mixers | set(map(id, split.layers))
    for name, module in replaced_modules(split):
        if not computes_plainly(module, called_by_rounds=id(module) in called):
            return f"{name} ({type(module).__name__}) is more than its plain transformers layer"
        # a GDN layer's own parameters are read as they are
        if id(module) not in mixers:
            dtypes |= {parameter.dtype for parameter in module.parameters(recurse=False)}
    if dtypes != {split.cache_shape.dtype}:
        return f"the layers mix dtypes ({', '.join(sorted(map(str, dtypes)))})"
    return None


def unsuited_sizes(split: SplitTarget) -> str | None:
    """Sizes and routing rules that the kernels do not have."""
    if split.num_moe_layers and not split.top_k:
        return "Layer 0 is dense and later layers are mixtures of experts"
    if split.cache_shape.head_dim > MOST_HEAD_CHANNELS:
        return f"attention heads have {split.cache_shape.head_dim} channels, the kernels take {MOST_HEAD_CHANNELS}"
    if split.hidden_size > MOST_COLUMNS or split.num_experts > MOST_EXPERTS:
        return f"hidden size {split.hidden_size} or {split.num_experts} experts are more than the kernels take"
    for layer in split.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None and not (getattr(gate, "norm_topk_prob", True) and gate.top_k == split.top_k):
            return "a router does not renormalise its weights, or chooses another number of experts"
    return None


def replaced_modules(split: SplitTarget) -> Iterator[tuple[str, Any]]:
    """Every module that rounds do not call, because the kernels read its weights."""
    yield from (("embed_tokens", split.embed_tokens), ("lm_head", split.lm_head), ("norm", split.norm))
    for i, layer in enumerate(split.layers):
        for name, module in layer.named_modules():
            # projections of GDN layers are looked at where their rows are
            if not name.split(".")[-1].startswith("in_proj"):
                yield f"layers.{i}.{name}".rstrip("."), module


def computes_plainly(module: Any, called_by_rounds: bool) -> bool:
    """Whether a module is of a kind that the kernels know and does nothing besides.

    Args:
        called_by_rounds: of a layer or mixer; `check_plain_forwards` has looked at what hangs on these.
    """
    if isinstance(module, nn.Linear):
        return plain_linear(module)
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    parameters = list(module.parameters(recurse=False))
    if (hooked and not called_by_rounds) or not all(type(p) is nn.Parameter and p.is_contiguous() for p in parameters):
        return False
    kind = type(module)
    if kind is nn.Embedding:
        return module.max_norm is None
    if kind in (nn.Conv1d, nn.ModuleList) or kind.__name__ in SILU:
        return True
    return kind.__module__.startswith(HOMES) and kind.__name__.endswith(KNOWN)
