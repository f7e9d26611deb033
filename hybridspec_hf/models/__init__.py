"""Targets whose forward can stop at the router boundary of Layer 0, one file per model family."""

from torch import nn

from .base import SplitTarget


def split_target(model: nn.Module, feature_layers: tuple[int, ...] = ()) -> SplitTarget:
    """The split view of a loaded transformers model; it uses the model's own modules and copies no weight.

    Args:
        model: a causal LM, or the image-text class, of qwen3_5_moe, qwen3_5 or qwen3_next.
        feature_layers: decoder layers whose outputs the drafter reads.

    Raises:
        ValueError: for another model, or one whose weights are spread over several devices.
    """
    from .qwen3_5 import Qwen3_5Target
    from .qwen3_5_moe import Qwen3_5MoeTarget
    from .qwen3_next import Qwen3NextTarget

    families = (Qwen3_5MoeTarget, Qwen3_5Target, Qwen3NextTarget)
    for family in families:
        if any(base.__name__ in family.MODEL_CLASSES for base in type(model).__mro__):
            return family(model, feature_layers)
    known = ", ".join(name for family in families for name in family.MODEL_CLASSES)
    raise ValueError(
        f"HybridSpec has no split forward for {type(model).__name__}. Supported classes: {known}. "
        "Drop generation_mode to use plain generate."
    )


__all__ = ["SplitTarget", "split_target"]
