"""Drafter against target config: each mismatch raises with both values."""

from typing import Any

import pytest
from drafter_cases import random_drafter, tiny_raw
from transformers import PreTrainedConfig, Qwen3_5MoeConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from hybridspec_hf.drafters.compatibility import TARGET_MODEL_TYPES, check_compatible

SIZES = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 5}


def target(**changes: Any) -> PreTrainedConfig:
    return Qwen3_5MoeTextConfig(**SIZES | changes)


@pytest.mark.parametrize(
    "config",
    [
        target(),
        Qwen3_5TextConfig(**SIZES),
        Qwen3NextConfig(**SIZES),
        Qwen3_5MoeConfig(text_config=target().to_dict()),
    ],
    ids=lambda config: config.model_type,
)
def test_check_compatible_accepts_every_family(config: PreTrainedConfig) -> None:
    assert config.get_text_config().model_type in TARGET_MODEL_TYPES
    check_compatible(random_drafter(tiny_raw()), config)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        pytest.param(target(hidden_size=48), ("hidden_size=32", "hidden_size=48"), id="hidden_size"),
        pytest.param(target(vocab_size=65), ("vocab_size=64", "vocab_size=65"), id="vocab_size"),
        pytest.param(target(num_hidden_layers=3), ("[1, 3]", "has 3"), id="too_shallow"),
        pytest.param(target(num_hidden_layers=6), ("num_target_layers=5", "has 6"), id="other_depth"),
        pytest.param(Qwen3Config(**SIZES), ("'qwen3'", "qwen3_5_moe_text"), id="model_type"),
    ],
)
def test_check_compatible_names_both_values(config: PreTrainedConfig, values: tuple[str, str]) -> None:
    with pytest.raises(ValueError) as error:
        check_compatible(random_drafter(tiny_raw()), config)
    assert all(value in str(error.value) for value in values)


def test_last_layer_may_be_an_anchor() -> None:
    raw = tiny_raw()
    raw["dflash_config"]["target_layer_ids"] = [1, 4]
    check_compatible(random_drafter(raw), target())


def test_drafter_cast_to_fp16_after_loading_raises() -> None:
    with pytest.raises(ValueError, match="float16"):
        check_compatible(random_drafter(tiny_raw()).half(), target())


def test_depth_is_not_checked_without_num_target_layers() -> None:
    check_compatible(random_drafter(tiny_raw(num_target_layers=None)), target(num_hidden_layers=9))
