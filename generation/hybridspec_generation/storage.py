"""A config's JSON types <-> a folder or a Hub repository: one small JSON, and its long tables as safetensors."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
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
    rest |= {"format": FORMAT, "tables": sorted(tables)}
    if tables:
        data = save(tables, metadata={"format": "pt"})
        # an interrupted call leaves two files that do not belong together: reading says so
        rest["tables_hash"] = short_hash(data)
        replace_file(folder / TABLES_NAME, data)
    replace_file(folder / CONFIG_NAME, (json.dumps(rest, indent=2) + "\n").encode())
    if not tables:
        (folder / TABLES_NAME).unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file in one step: who reads it meanwhile, or after an interruption, finds the old or the new content.

    Raises:
        OSError: if it cannot be written; nothing half-written stays.
    """
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def short_hash(data: bytes) -> str:
    """16 hexadecimal digits that tell one file from another."""
    return hashlib.sha256(data).hexdigest()[:16]


def read_folder(folder: Path) -> dict[str, Any]:
    """Inverse of `write_folder`; a JSON file of an older version, with the tables in it, does too.

    Raises:
        FileNotFoundError: if a file is missing. OSError: if it cannot be read.
        ValueError: if a newer version wrote it, a file is damaged, or the two do not belong together.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"No {CONFIG_NAME} in {folder}. `hybridspec calibrate` and save_pretrained write one.")
    try:
        values: Any = json.loads(read_bytes(path))
    # nested too deeply, too
    except (ValueError, RecursionError) as error:
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
    names, written = values.pop("tables", []), values.pop("tables_hash", None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} needs a list of names as its tables, got {names!r}. Calibrate again.")
    join(values, read_tables(folder / TABLES_NAME, names, written))
    return values


def read_bytes(path: Path) -> bytes:
    """A file's content.

    Raises:
        OSError: naming the file.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error}).") from error


def read_tables(path: Path, names: list[str], written: str | None) -> dict[str, Tensor]:
    """The named tables of a file, whose hash was `written` (None: by an older version); without names none."""
    if not names:
        return {}
    if not path.is_file():
        raise FileNotFoundError(
            f"No {path.name} in {path.parent}, but {CONFIG_NAME} there refers to its tables. Copy both files."
        )
    data = read_bytes(path)
    try:
        tables = load(data)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}). Calibrate again.") from error
    if sorted(tables) != sorted(names):
        raise ValueError(
            f"{path} holds the tables {sorted(tables)}, but {CONFIG_NAME} beside it refers to {sorted(names)}. "
            "Copy both files from the same calibration."
        )
    if written not in (None, short_hash(data)):
        raise ValueError(
            f"{path} holds other values than those that {CONFIG_NAME} beside it was saved with. "
            "Copy both files from the same calibration, or calibrate again."
        )
    return tables


def split(value: Any, name: str, tables: dict[str, Tensor]) -> Any:
    """`value` without its lists of numbers, which go to `tables` in fp64 by their place ("cost.0.target_cost")."""
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        inside = {key: split(part, f"{prefix}{key}", tables) for key, part in value.items()}
        return {key: part for key, part in inside.items() if f"{prefix}{key}" not in tables}
    if not isinstance(value, list | tuple) or not value:
        return value
    if isinstance(value[0], dict):
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
        ValueError: if it is a file.
    """
    if Path(name).is_file():
        raise ValueError(f"{name} is a file. Pass its folder: {Path(name).parent}.")
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
    from huggingface_hub import create_branch, create_repo, upload_folder

    repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
    # a pull request's is there
    if revision is not None and not revision.startswith("refs/pr"):
        create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    with TemporaryDirectory() as folder:
        save(folder)
        message = commit_message or "Upload HybridSpecConfig"
        commit = upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, token=token, revision=revision
        )
    return str(commit.commit_url)
