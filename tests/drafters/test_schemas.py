"""Raw config.json → DFlashConfig: every known file, every refusal, the round trip."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from drafter_cases import (
    FULL,
    SLIDING,
    SUPPORTED,
    Raw,
    speculators,
    tiny_raw,
    zlab_122b,
    zlab_dflash2,
    zlab_legacy,
    zlab_nested,
)

from hybridspec_hf.drafters.config import DFlashConfig
from hybridspec_hf.drafters.schemas import normalise

TABLE = {
    "zlab_legacy": (8, 32, 4, 128, 2048, 6144, [1, 10, 19, 28, 37], 248070, 16, None, [FULL] * 8, 40),
    "zlab_nested": (6, 32, 8, 128, 2048, 6144, [1, 6, 11, 16, 22, 27, 32, 37], 248077, 16, 4096, None, 40),
    "zlab_122b": (6, 32, 8, 128, 3072, 9216, [1, 7, 14, 20, 26, 32, 39, 45], 248077, 16, 4096, None, 48),
    "speculators": (5, 16, 2, 256, 2048, 6144, [1, 19, 36], 248077, 8, 2048, [SLIDING] * 4 + [FULL], None),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_from_raw_reads_every_known_file(name: str) -> None:
    config = DFlashConfig.from_raw(SUPPORTED[name]())
    layers, heads, kv, dim, hidden, inner, ids, mask, block, window, types, target_layers = TABLE[name]
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (layers, heads, kv)
    assert (config.head_dim, config.hidden_size, config.intermediate_size) == (dim, hidden, inner)
    assert (config.target_layer_ids, config.mask_token_id, config.block_size) == (ids, mask, block)
    assert (config.sliding_window, config.layer_types) == (window, types or [SLIDING] * 5 + [FULL])
    assert (config.num_target_layers, config.rope_theta, config.vocab_size) == (target_layers, 1e7, 248320)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 262144)
    assert config.get_text_config().vocab_size == 248320


def test_from_raw_leaves_the_file_alone() -> None:
    raw = zlab_nested()
    before = deepcopy(raw)
    DFlashConfig.from_raw(raw)
    assert raw == before


@pytest.mark.parametrize(
    ("changes", "causal", "window"),
    [
        pytest.param({}, [True] * 5 + [False], [4096] * 5 + [None], id="by_layer_type"),
        pytest.param({"is_causal": False}, [False] * 6, [4096] * 5 + [None], id="is_causal_false"),
        pytest.param({"is_causal": True}, [True] * 6, [4096] * 5 + [None], id="is_causal_true"),
        pytest.param({"is_causal": None}, [True] * 5 + [False], [4096] * 5 + [None], id="is_causal_null"),
        pytest.param({"layer_types": [FULL] * 6}, [False] * 6, [None] * 6, id="all_full"),
    ],
)
def test_causal_and_window_per_layer(changes: Raw, causal: list[bool], window: list[int | None]) -> None:
    config = DFlashConfig.from_raw(zlab_nested() | changes)
    assert [config.causal(layer) for layer in range(6)] == causal
    assert [config.window(layer) for layer in range(6)] == window


def test_is_causal_goes_before_dflash_config_causal() -> None:
    raw = zlab_nested()
    raw["dflash_config"]["causal"] = True
    assert DFlashConfig.from_raw(raw).is_causal is True
    assert DFlashConfig.from_raw(raw | {"is_causal": False}).is_causal is False


def test_window_survives_without_use_sliding_window() -> None:
    # Qwen3Config would drop the window here and keep the causality
    raw = zlab_nested()
    del raw["use_sliding_window"], raw["max_window_layers"]
    assert DFlashConfig.from_raw(raw).window(0) == 4096


def test_layers_are_full_without_layer_types() -> None:
    raw = zlab_legacy()
    del raw["layer_types"]
    assert DFlashConfig.from_raw(raw).layer_types == [FULL] * 8


def test_speculators_counts_states_and_anchors_the_window() -> None:
    config = DFlashConfig.from_raw(speculators())
    assert config.window_anchor == "block"
    assert [config.causal(layer) for layer in range(5)] == [True] * 4 + [False]
    config = DFlashConfig.from_raw(speculators() | {"sliding_window_non_causal": True})
    assert not any(config.causal(layer) for layer in range(5))


def test_head_dim_defaults_to_the_share_of_a_head() -> None:
    raw = zlab_legacy()
    del raw["head_dim"]
    assert DFlashConfig.from_raw(raw).head_dim == 64


def _without(make: Callable[[], Raw], *path: str) -> Raw:
    raw = make()
    holder = raw
    for name in path[:-1]:
        holder = holder[name]
    del holder[path[-1]]
    return raw


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        pytest.param(_without(zlab_legacy, "block_size"), "block_size", id="legacy_block_size"),
        pytest.param(_without(zlab_nested, "dflash_config", "block_size"), "block_size", id="nested_block_size"),
        pytest.param(_without(zlab_nested, "dflash_config", "mask_token_id"), "mask_token_id", id="mask"),
        pytest.param(_without(zlab_nested, "dflash_config", "target_layer_ids"), "target_layer_ids", id="ids"),
        pytest.param(_without(zlab_nested, "rope_parameters"), "rope_theta", id="rope"),
        pytest.param(_without(zlab_nested, "rms_norm_eps"), "rms_norm_eps", id="eps"),
        pytest.param(_without(zlab_nested, "num_key_value_heads"), "num_key_value_heads", id="kv_heads"),
        pytest.param(_without(zlab_nested, "hidden_size"), "hidden_size", id="hidden_size"),
        pytest.param(_without(speculators, "block_size"), "block_size", id="speculators_block_size"),
        pytest.param(_without(speculators, "mask_token_id"), "mask_token_id", id="speculators_mask"),
        pytest.param(
            _without(speculators, "aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids", id="speculators_ids"
        ),
        pytest.param(_without(speculators, "transformer_layer_config"), "transformer_layer_config", id="decoder"),
    ],
)
def test_missing_key_raises(raw: Raw, name: str) -> None:
    with pytest.raises(ValueError, match=rf"has no {name}\..*Add {name} to"):
        DFlashConfig.from_raw(raw)


def _nested_with(**changes: Any) -> Raw:
    raw = zlab_nested()
    raw["dflash_config"] |= changes
    return raw


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        pytest.param(zlab_dflash2(), "DFlash2DraftModel", id="dflash2"),
        pytest.param(zlab_dflash2() | {"architectures": None}, "convolutions of DFlash2", id="dflash2_keys"),
        pytest.param(zlab_nested() | {"model_type": "laguna"}, "model_type='laguna'", id="model_type"),
        pytest.param(_nested_with(projector_type="domino"), "projector_type='domino'", id="domino"),
        pytest.param(_nested_with(projector_type="dspark"), "projector_type='dspark'", id="dspark"),
        pytest.param(zlab_nested() | {"markov_rank": 256}, "Markov head", id="markov_top"),
        pytest.param(_nested_with(markov_head_type="vanilla"), "Markov head", id="markov_nested"),
        pytest.param(_nested_with(attention_sink_bias=True), "sinks", id="sinks"),
        pytest.param(_nested_with(use_swa=True), "use_swa", id="use_swa"),
        pytest.param(_nested_with(final_logit_softcapping=30.0), "soft-capped", id="softcap_nested"),
        pytest.param(zlab_nested() | {"final_logit_softcapping": 30.0}, "soft-capped", id="softcap"),
        pytest.param(zlab_nested() | {"output_multiplier": 0.5}, "scaled draft logits", id="multiplier"),
        pytest.param(zlab_nested() | {"input_embedding_scale": 2.0}, "scaled embeddings", id="embedding_scale"),
        pytest.param(zlab_nested() | {"quantization_config": {"bits": 4}}, "quantised", id="quantised"),
        pytest.param(zlab_nested() | {"is_neox_style": False}, "interleaved", id="interleaved"),
        pytest.param(_nested_with(mystery=1), "mystery=1 in dflash_config", id="unknown_nested"),
        pytest.param(zlab_nested() | {"mystery": 1}, "mystery=1 in config.json", id="unknown_top"),
        pytest.param(zlab_nested() | {"layer_types": None}, "without layer_types", id="guessed_layers"),
        pytest.param(zlab_nested() | {"use_sliding_window": False}, "disagree", id="contradicting_flag"),
        pytest.param(zlab_nested() | {"sliding_window": None}, "sliding_window=None", id="no_window"),
        pytest.param(zlab_nested() | {"layer_types": [FULL]}, "layer_types", id="short_layer_types"),
        pytest.param(zlab_nested() | {"layer_types": ["linear_attention"] * 6}, "layer_types", id="linear"),
        pytest.param(zlab_nested() | {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn", id="yarn"),
        pytest.param(zlab_nested() | {"rope_scaling": {"type": "linear"}}, "linear", id="linear_rope"),
        pytest.param(zlab_nested() | {"partial_rotary_factor": 0.25}, "0.25", id="partial_rotary"),
        pytest.param(zlab_nested() | {"rope_scaling": {"rope_dim": 64}}, "rope_dim=64", id="rope_dim"),
        pytest.param(zlab_nested() | {"rope_theta": 1e4}, "Only one can be right", id="two_thetas"),
        pytest.param(zlab_nested() | {"block_size": 8}, "block_size=16 in dflash_config", id="two_block_sizes"),
        pytest.param(zlab_nested() | {"target_hidden_size": 4096}, "target_hidden_size=4096", id="target_hidden"),
        pytest.param(_nested_with(block_size=1), "block_size=1", id="block_of_one"),
        pytest.param(_nested_with(mask_token_id=248320), "mask_token_id=248320", id="mask_out_of_range"),
        pytest.param(_nested_with(mask_token_id=-1), "mask_token_id=-1", id="mask_negative"),
        pytest.param(_nested_with(target_layer_ids=[]), "target_layer_ids", id="no_ids"),
        pytest.param(_nested_with(target_layer_ids=[1, 1]), "target_layer_ids", id="same_id_twice"),
        pytest.param(zlab_nested() | {"num_key_value_heads": 5}, "num_key_value_heads=5", id="ragged_groups"),
        pytest.param(zlab_nested() | {"dflash_config": None}, "must be an object", id="null_dflash_config"),
        pytest.param(speculators() | {"draft_vocab_size": 32000}, "t2d/d2t", id="reduced_vocabulary"),
        pytest.param(speculators() | {"speculators_model_type": "eagle3"}, "eagle3", id="eagle3"),
        pytest.param(speculators() | {"sample_from_anchor": True}, "anchor's own row", id="sample_from_anchor"),
        pytest.param(speculators() | {"aux_hidden_state_layer_ids": [0, 2]}, "State 0", id="embedding_feature"),
        pytest.param(speculators() | {"mystery": 1}, "mystery", id="speculators_unknown"),
        pytest.param(_nested_with(block_size="16"), "wrong type", id="text_for_a_number"),
        pytest.param(_nested_with(target_layer_ids=7), "wrong type", id="number_for_a_list"),
        pytest.param(_nested_with(target_layer_ids=[1.5]), "wrong type", id="half_a_layer"),
        pytest.param(zlab_nested() | {"num_target_layers": "40"}, "wrong type", id="text_for_an_optional"),
        pytest.param({"model_type": "qwen3", "hidden_size": 8}, "does not describe a DFlash drafter", id="a_target"),
    ],
)
def test_refused_config_says_what_and_why(raw: Raw, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DFlashConfig.from_raw(raw)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(zlab_nested() | {"final_logit_softcapping": None, "output_multiplier": 1.0}, id="top"),
        pytest.param(_nested_with(input_embedding_scale=1, projector_type="dflash"), id="nested"),
        pytest.param(_nested_with(mask_token="<|MASK|>", use_aux_hidden_state=True), id="other_engines"),
        pytest.param(zlab_nested() | {"rope_scaling": {"rope_type": "default", "rope_dim": 128}}, id="rope"),
        pytest.param(zlab_122b() | {"tie_word_embeddings": True}, id="nothing_to_tie"),
    ],
)
def test_neutral_values_are_accepted(raw: Raw) -> None:
    DFlashConfig.from_raw(raw)


@pytest.mark.parametrize("name", ["zlab_legacy", "zlab_nested", "zlab_122b"])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_saved_config_reads_back_equal(name: str, is_causal: bool | None, tmp_path: Any) -> None:
    config = DFlashConfig.from_raw(SUPPORTED[name]() | {"is_causal": is_causal})
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "qwen3" and raw["architectures"] == ["DFlashDraftModel"]
    assert set(raw["dflash_config"]) == {"block_size", "mask_token_id", "target_layer_ids"}
    assert DFlashConfig(**normalise(raw)).to_dict() == config.to_dict()


def test_save_refuses_what_the_schema_cannot_say(tmp_path: Any) -> None:
    config = DFlashConfig.from_raw(speculators())
    with pytest.raises(ValueError, match="num_target_layers=None"):
        config.save_pretrained(tmp_path)
    config.num_target_layers = 40
    with pytest.raises(ValueError, match="window_anchor='block'"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_window_of_a_block_without_sliding_layers(tmp_path: Any) -> None:
    raw = speculators()
    raw["transformer_layer_config"] |= {"layer_types": [FULL] * 5, "use_sliding_window": False}
    config = DFlashConfig.from_raw(raw)
    config.num_target_layers = 40
    config.save_pretrained(tmp_path)
    assert normalise(json.loads((tmp_path / "config.json").read_text()))["target_layer_ids"] == [1, 19, 36]


def test_tiny_raw_is_a_valid_file() -> None:
    assert DFlashConfig.from_raw(tiny_raw(is_causal=False)).is_causal is False
