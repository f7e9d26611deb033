"""A config's JSON types <-> a folder or a Hub repository: one small JSON, and its long tables as safetensors."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG_NAME, TABLES_NAME = "hybridspec_config.json", "hybridspec_tables.safetensors"
# of the JSON file; without one, the tables are in the JSON themselves
FORMAT = 1


def write_folder(folder: str | Path, values: dict[str, Any]) -> None:
    """Write both files into `folder`, created if missing; a table file that is not needed any more goes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Tensor] = {}
    rest = split(values, "", tables)
    # each replaces the old file in one step, so that an interrupted call leaves no half of one
    if tables:
        save_file(tables, folder / f"{TABLES_NAME}.part", metadata={"format": "pt"})
        os.replace(folder / f"{TABLES_NAME}.part", folder / TABLES_NAME)
    text = json.dumps({"format": FORMAT, **rest, "tables": sorted(tables)}, indent=2)
    (folder / f"{CONFIG_NAME}.part").write_text(text + "\n", encoding="utf-8")
    os.replace(folder / f"{CONFIG_NAME}.part", folder / CONFIG_NAME)
    if not tables:
        (folder / TABLES_NAME).unlink(missing_ok=True)


def read_folder(folder: Path) -> dict[str, Any]:
    """Inverse of `write_folder`; a JSON file of an older version, with the tables in it, does too.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a newer version wrote it, or a file is damaged.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"No {CONFIG_NAME} in {folder}. Save one with HybridSpecConfig.save_pretrained.")
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). Calibrate again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object, but {type(values).__name__}. Calibrate again.")
    if "format" not in values:
        return values
    found = values.pop("format")
    if found != FORMAT:
        raise ValueError(
            f"{path} has format {found!r}, this version of hybridspec_hf reads {FORMAT}. "
            "Update hybridspec_hf, or calibrate again."
        )
    join(values, read_tables(folder / TABLES_NAME, values.pop("tables", [])))
    return values


def read_tables(path: Path, names: list[str]) -> dict[str, Tensor]:
    """The named tables of a file; without names there is none."""
    if not names:
        return {}
    if not path.is_file():
        raise FileNotFoundError(
            f"No {path.name} in {path.parent}, but {CONFIG_NAME} there refers to its tables. Copy both files."
        )
    try:
        tables = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}). Calibrate again.") from error
    if sorted(tables) != sorted(names):
        raise ValueError(
            f"{path} holds the tables {sorted(tables)}, but {CONFIG_NAME} beside it refers to {sorted(names)}. "
            "Copy both files from the same calibration."
        )
    return tables


def split(value: Any, name: str, tables: dict[str, Tensor]) -> Any:
    """`value` without its lists of numbers, which go to `tables` in fp64 by their place ("cost.0.target_cost")."""
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        inside = {key: split(part, f"{prefix}{key}", tables) for key, part in value.items()}
        return {key: part for key, part in inside.items() if f"{prefix}{key}" not in tables}
    if not isinstance(value, list | tuple):
        return value
    if value and isinstance(value[0], dict):
        return [split(part, f"{prefix}{i}", tables) for i, part in enumerate(value)]
    tables[name] = torch.tensor(value, dtype=torch.float64)
    return None


def join(values: dict[str, Any], tables: dict[str, Tensor]) -> None:
    """Put the tables back to their places.

    Raises:
        ValueError: if there is no such place.
    """
    for name, table in tables.items():
        *path, last = name.split(".")
        place: Any = values
        try:
            for step in path:
                place = place[int(step) if isinstance(place, list) else step]
            place[last] = table.tolist()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{CONFIG_NAME} has no place for its table {name!r}. Calibrate again.") from error


def find_folder(name: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """The folder itself, or the files of a Hub repository of that name, downloaded or from the Hub's cache.

    Raises:
        FileNotFoundError: if there is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        files = [CONFIG_NAME, TABLES_NAME]
        return Path(snapshot_download(str(name), revision=revision, token=token, allow_patterns=files))
    # not a repository's name, no such repository, no network
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"No {CONFIG_NAME} in {name}: there is no such folder, and no such repository on the Hub ({error})."
        ) from error


def upload(
    save: Callable[[str], object],
    repo_id: str,
    *,
    commit_message: str | None,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
) -> str:
    """What `save(folder)` writes -> a Hub repository; returns the commit's URL."""
    from huggingface_hub import create_repo, upload_folder

    repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    with TemporaryDirectory() as folder:
        save(folder)
        message = commit_message or "Upload HybridSpecConfig"
        commit = upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, token=token, revision=revision
        )
    return str(commit.commit_url)
