"""A drafter and its target's config → an error before any token, if the two were not made for each other."""

from typing import TYPE_CHECKING

from transformers import PreTrainedConfig

from hybridspec_hf.drafters.loading import check_dtype

if TYPE_CHECKING:
    from hybridspec_hf.drafters.dflash import DFlashDrafter

TARGET_MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def check_compatible(drafter: "DFlashDrafter", target_config: PreTrainedConfig) -> None:
    """Raise unless the drafter can read the target's features and borrow its embedding and lm_head.

    Args:
        drafter: the loaded drafter.
        target_config: the target's config, composite or text.

    Raises:
        ValueError: names both values and what to do. Also if the drafter has been cast to fp16 since it was loaded.
    """
    check_dtype(drafter.dtype)
    config, target = drafter.config, target_config.get_text_config()
    if target.model_type not in TARGET_MODEL_TYPES:
        raise ValueError(
            f"The target's model_type is {target.model_type!r}. Drafters are paired with {list(TARGET_MODEL_TYPES)} "
            "only, whose features and state HybridSpec can handle. Drop assistant_model for this model."
        )
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(
                f"The drafter has {name}={ours}, the target {name}={theirs}. The drafter reads the target's hidden "
                "states and borrows its embedding and lm_head, so they must be equal. Load the drafter that was "
                "trained for this target."
            )
    _check_layers(config.target_layer_ids, config.num_target_layers, target.num_hidden_layers)


def _check_layers(ids: list[int], expected: int | None, layers: int) -> None:
    if max(ids) >= layers:
        raise ValueError(
            f"The drafter reads target layers {ids}, the target has {layers} (0 to {layers - 1}). It was trained on "
            "a deeper model. Load the drafter that was trained for this target."
        )
    if expected not in (None, layers):
        raise ValueError(
            f"The drafter was trained for a target with num_target_layers={expected}, this one has {layers}. Its "
            "features come from other depths than in training. Load the drafter that was trained for this target, "
            "or set drafter.config.num_target_layers if its config.json is wrong."
        )
