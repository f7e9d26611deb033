"""Folder → drafter: every weight from the file and from nowhere else, in bf16 or fp32."""

import json
import logging
from pathlib import Path

import pytest
import torch
from drafter_cases import SUPPORTED, random_drafter, tiny, tiny_raw, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridspec_hf.drafters.dflash import DFlashDrafter

Weights = dict[str, Tensor]


def weights_of(drafter: DFlashDrafter) -> Weights:
    return {name: weight.detach().clone() for name, weight in drafter.state_dict().items()}


def assert_same_weights(drafter: DFlashDrafter, weights: Weights) -> None:
    found = drafter.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.fixture
def weights() -> Weights:
    return weights_of(random_drafter(tiny_raw()))


@pytest.mark.parametrize("name", SUPPORTED)
def test_from_pretrained_reads_every_known_format(name: str, tmp_path: Path) -> None:
    raw = tiny(SUPPORTED[name]())
    expected = weights_of(random_drafter(raw))
    drafter = DFlashDrafter.from_pretrained(write_checkpoint(tmp_path, raw, expected), local_files_only=True)
    assert_same_weights(drafter, expected)
    assert not drafter.training and drafter.dtype == torch.float32
    assert drafter.fc.in_features == len(drafter.config.target_layer_ids) * 32


@pytest.mark.parametrize(
    "alias",
    [
        pytest.param(lambda name: "model." + name, id="model_prefix"),
        pytest.param(
            lambda name: name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."),
            id="encoder",
        ),
        pytest.param(lambda name: "model." + name.replace("fc.", "encoder.fc."), id="both"),
    ],
)
def test_aliases_are_read_and_not_written(alias, weights: Weights, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    renamed = {alias(name): weight for name, weight in weights.items()}
    assert renamed.keys() != weights.keys()
    drafter = DFlashDrafter.from_pretrained(write_checkpoint(tmp_path / "alias", tiny_raw(), renamed))
    assert_same_weights(drafter, weights)
    drafter.save_pretrained(tmp_path / "copy")
    assert load_file(tmp_path / "copy" / "model.safetensors").keys() == weights.keys()


def test_same_weight_under_two_names_raises(weights: Weights, tmp_path: Path) -> None:
    twice = weights | {"encoder.fc.weight": weights["fc.weight"] + 1}
    with pytest.raises(ValueError, match=r"encoder\.fc\.weight"):
        DFlashDrafter.from_pretrained(write_checkpoint(tmp_path, tiny_raw(), twice))


def test_sharded_files(tmp_path: Path) -> None:
    drafter = random_drafter(tiny_raw())
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and not (tmp_path / "model.safetensors").exists()
    assert_same_weights(DFlashDrafter.from_pretrained(tmp_path), weights_of(drafter))


def test_missing_shard_raises(tmp_path: Path) -> None:
    random_drafter(tiny_raw()).save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(OSError):
        DFlashDrafter.from_pretrained(tmp_path)


def test_subfolder(weights: Weights, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "inner", tiny_raw(), weights)
    assert_same_weights(DFlashDrafter.from_pretrained(tmp_path, subfolder="inner"), weights)


def test_every_bad_weight_is_listed(weights: Weights, tmp_path: Path) -> None:
    bad = weights | {"extra.weight": torch.ones(2), "fc.weight": torch.ones(32, 96)}
    del bad["norm.weight"], bad["layers.1.self_attn.q_norm.weight"]
    with pytest.raises(ValueError) as error:
        DFlashDrafter.from_pretrained(write_checkpoint(tmp_path, tiny_raw(), bad))
    text = str(error.value)
    assert "missing in the file: norm.weight" in text
    assert "missing in the file: layers.1.self_attn.q_norm.weight" in text
    assert "unexpected in the file: extra.weight" in text
    assert "fc.weight: [32, 96] in the file, [32, 64] by config.json" in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("embed_tokens.weight", "borrows the target's"),
        ("lm_head.weight", "borrows the target's"),
        ("d2t", "reduced draft vocabulary"),
        ("layers.0.attention_conv.base_kernel", "unexpected"),
        ("mask_embedding", "unexpected"),
        ("layers.0.self_attn.attention_sink_bias", "unexpected"),
    ],
)
def test_one_weight_too_many_raises(name: str, hint: str, weights: Weights, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_raw(), weights | {name: torch.ones(64, 32)})
    with pytest.raises(ValueError, match=hint):
        DFlashDrafter.from_pretrained(folder)


def test_layer_too_many_in_the_file_raises(weights: Weights, tmp_path: Path) -> None:
    raw = tiny_raw(num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ValueError, match=r"unexpected in the file: layers\.1\.input_layernorm\.weight"):
        DFlashDrafter.from_pretrained(write_checkpoint(tmp_path, raw, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_auto_is_the_files(dtype: torch.dtype, weights: Weights, tmp_path: Path) -> None:
    # what the config says about dtypes does not count: this one lies
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    folder = write_checkpoint(tmp_path, tiny_raw(dtype="float16", torch_dtype="float16"), cast)
    assert_same_weights(DFlashDrafter.from_pretrained(folder), cast)


def test_fp16_file_is_read_as_bf16_with_a_warning(
    weights: Weights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = {name: weight.half() for name, weight in weights.items()}
    with caplog.at_level(logging.WARNING, "hybridspec_hf"):
        drafter = DFlashDrafter.from_pretrained(write_checkpoint(tmp_path, tiny_raw(), half))
    assert "fp16 and are read as bf16" in caplog.text
    assert_same_weights(drafter, {name: weight.bfloat16() for name, weight in half.items()})
    assert drafter.config.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, "float32", torch.bfloat16, "bfloat16"], ids=str)
def test_dtype_as_asked(dtype: str | torch.dtype, weights: Weights, tmp_path: Path) -> None:
    half = {name: weight.half() for name, weight in weights.items()}
    drafter = DFlashDrafter.from_pretrained(write_checkpoint(tmp_path, tiny_raw(), half), dtype=dtype)
    assert drafter.dtype == (getattr(torch, dtype) if isinstance(dtype, str) else dtype)


@pytest.mark.parametrize("dtype", [torch.float16, "float16", torch.float64, "int8", "nonsense"], ids=str)
def test_other_dtypes_raise_before_reading(dtype: str | torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Pass torch\.bfloat16 or torch\.float32"):
        DFlashDrafter.from_pretrained(tmp_path / "nowhere", dtype=dtype)


def test_fp64_file_asks_for_a_dtype(weights: Weights, tmp_path: Path) -> None:
    wide = {name: weight.double() for name, weight in weights.items()}
    folder = write_checkpoint(tmp_path, tiny_raw(), wide)
    with pytest.raises(ValueError, match=r"are torch\.float64"):
        DFlashDrafter.from_pretrained(folder)
    assert_same_weights(DFlashDrafter.from_pretrained(folder, dtype=torch.float32), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_round_trip(dtype: torch.dtype, tmp_path: Path) -> None:
    drafter = random_drafter(tiny(SUPPORTED["zlab_nested"]())).to(dtype)
    drafter.save_pretrained(tmp_path / "once")
    again = DFlashDrafter.from_pretrained(tmp_path / "once")
    assert_same_weights(again, weights_of(drafter))
    assert again.rules == drafter.rules
    again.save_pretrained(tmp_path / "twice")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    assert sorted(file.name for file in (tmp_path / "once").iterdir()) == ["config.json", "model.safetensors"]


def test_loading_needs_config_and_safetensors(weights: Weights, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"config\.json"):
        DFlashDrafter.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_raw()))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        DFlashDrafter.from_pretrained(tmp_path)


def test_config_that_is_no_object_raises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON list"):
        DFlashDrafter.from_pretrained(tmp_path)


def test_a_targets_folder_is_refused_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "architectures": ["X"]}))
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not the target's"):
        DFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/folder", "./drafer", "some/where/else"])
def test_a_folder_that_is_not_there_is_named(path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        DFlashDrafter.from_pretrained(path)
