"""Files of a drafter → its raw config, and the checks that every weight of the loaded drafter came from them."""

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)
Path = str | os.PathLike[str]

# other spellings of z-lab's weight names, as regular expressions
ALIASES = {
    r"^model\.": "",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
}
DTYPES = (torch.bfloat16, torch.float32)
_OUTLIERS = "The fused features have outliers beyond fp16's range, and acceptance collapses."


def check_folder(path: str | os.PathLike[str], owner: str) -> None:
    """Raise FileNotFoundError for a folder that is not there, which would be taken for a malformed Hub name."""
    looks_local = os.path.isabs(path) or os.fspath(path).startswith(".") or os.fspath(path).count("/") > 1
    if looks_local and not os.path.isdir(path):
        raise FileNotFoundError(f"There is no folder {path}. Pass a {owner}'s folder, or a repository as owner/name.")


def read_raw_config(path: Path, source: Mapping[str, Any]) -> dict[str, Any]:
    """Read config.json as it lies on disk, past every config class.

    Args:
        path: folder or Hub repository.
        source: keyword arguments of `cached_file`: `revision`, `token`, `cache_dir`, `local_files_only`, ...

    Raises:
        OSError: there is no config.json.
        ValueError: it is not a JSON object.
    """
    check_folder(path, "drafter")
    file = cached_file(path, "config.json", **source)
    if file is None:
        raise OSError(f"{path} has no config.json. Pass a drafter's folder or repository.")
    with open(file, encoding="utf-8") as stream:
        raw = json.load(stream)
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a JSON {type(raw).__name__}, not an object. Pass a drafter's folder.")
    return raw


def refuse_duplicate_weights(path: Path, source: Mapping[str, Any]) -> None:
    """Raise if a file holds one weight under two of its names; transformers would take either.

    Args:
        path: folder or Hub repository with safetensors.
        source: as in `read_raw_config`.

    Raises:
        ValueError: names the two.
        OSError: there are no safetensors.
    """
    seen: dict[str, str] = {}
    for name in _weight_names(path, source):
        plain = name
        for alias, replacement in ALIASES.items():
            plain = re.sub(alias, replacement, plain)
        if plain in seen:
            raise ValueError(
                f"{path}: the weights {seen[plain]} and {name} are two names of {plain}. Only one can be the trained "
                "one. Remove the other from the file."
            )
        seen[plain] = name


def _weight_names(path: Path, source: Mapping[str, Any]) -> list[str]:
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **source)
    if index is not None:
        with open(index, encoding="utf-8") as stream:
            return list(json.load(stream)["weight_map"])
    file = cached_file(path, SAFE_WEIGHTS_NAME, **source)
    assert file is not None
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def check_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return `"auto"` or one of `DTYPES`; names of dtypes are accepted.

    Raises:
        ValueError: any other dtype.
    """
    if dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found in DTYPES:
        return found
    reason = _OUTLIERS if found is torch.float16 else "Drafters run in bf16 or fp32 only."
    raise ValueError(f"Got dtype={dtype!r} for a DFlash drafter. {reason} Pass torch.bfloat16 or torch.float32.")


def settle_dtype(path: Path, model: Model) -> Model:
    """Turn a drafter that was loaded in its file's dtype into one of `DTYPES`.

    Args:
        path: where it came from, for the messages.
        model: the loaded drafter; fp16 becomes bf16, with a warning.

    Raises:
        ValueError: the file's dtype has no counterpart here.
    """
    found = model.dtype
    if found is torch.float16:
        logger.warning("%s: the drafter's weights are fp16 and are read as bf16. %s", path, _OUTLIERS)
        model.config.dtype = torch.bfloat16
        return model.to(torch.bfloat16)
    if found not in DTYPES:
        raise ValueError(
            f"{path}: the drafter's weights are {found}. Drafters run in bf16 or fp32 only. "
            "Pass dtype=torch.bfloat16 or dtype=torch.float32."
        )
    return model


def refuse_bad_weights(path: Path, info: Mapping[str, Any]) -> None:
    """Raise unless names and shapes of file and drafter agree one to one.

    Args:
        path: where the drafter came from.
        info: transformers' loading info: `missing_keys`, `unexpected_keys`, `mismatched_keys`.

    Raises:
        ValueError: lists every missing, unexpected and mismatched weight, the latter with both shapes.
    """
    lines = [f"missing in the file: {name}" for name in sorted(info["missing_keys"])]
    lines += [f"unexpected in the file: {name}{_hint(name)}" for name in sorted(info["unexpected_keys"])]
    for name, in_file, in_drafter in sorted(info["mismatched_keys"]):
        lines.append(f"{name}: {list(in_file)} in the file, {list(in_drafter)} by config.json")
    lines += [str(message) for message in info.get("error_msgs", ())]
    if lines:
        raise ValueError(
            f"{path}: the weights do not match config.json:\n  "
            + "\n  ".join(lines)
            + "\nA drafter with other weights than it was trained with drafts badly without an error. "
            "Check that config.json and the weights belong together, or pass another drafter."
        )


def _hint(name: str) -> str:
    if name in ("t2d", "d2t"):
        return " (a reduced draft vocabulary, which is not supported)"
    if name.startswith(("embed_tokens.", "lm_head.")):
        return " (the drafter borrows the target's; speculators 0.9 and z-lab write none)"
    return ""
