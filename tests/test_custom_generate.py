"""The folder generation/ as a `custom_generate` repository: the same tokens as the registered mode."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_drafter, tiny_target

REPOSITORY = Path(__file__).resolve().parent.parent / "generation"


@pytest.fixture(autouse=True)
def private_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies remote code into a cache; keep the user's out of it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))


@pytest.mark.parametrize("with_drafter", [True, False], ids=["drafter", "autoregressive"])
def test_custom_generate_equals_the_registered_mode(with_drafter: bool) -> None:
    try:
        version("hybridspec-hf")
    except PackageNotFoundError:
        pytest.skip("transformers asks for an installed hybridspec-hf, as requirements.txt says")
    target = tiny_target()
    options = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "assistant_model": tiny_drafter(target) if with_drafter else None,
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "hybridspec_config": {"policy": "full"},
    }
    direct = target.generate(**options, generation_mode="hybridspec")
    custom = target.generate(**options, custom_generate=str(REPOSITORY), trust_remote_code=True)
    assert torch.equal(custom.sequences, direct.sequences)
    assert custom.report.policy == direct.report.policy == ("full" if with_drafter else "ar")
