"""Measured latency curves in the user's cache folder, so that a machine measures a pair once.

A curve belongs to everything that decides a round's time: GPU, versions, sizes and dtype of the pair, and what runs
the rounds. Weights count too, a few elements of each: the time of an MoE layer is that of the distinct experts that w
tokens choose, so a pair with the same sizes and other routers (random ones, say) has another curve.
"""

import hashlib
import json
import os
import platform
import re
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from hybridspec_generation.storage import replace_file
from hybridspec_generation.tables import CostTable

from ..drafters.dflash import DFlashDrafter
from ..engine import Engine, sizes
from .latency import device_name

CACHE_VARIABLE = "HYBRIDSPEC_CACHE"
FORMAT = 1


def cache_folder() -> Path | None:
    """`$HYBRIDSPEC_CACHE`, by default `hybridspec` in Hugging Face's cache folder; None if the variable is "off".

    Raises:
        OSError: if the variable names the home of a user that there is not.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    if chosen.lower() == "off":
        return None
    try:
        return Path(chosen).expanduser() if chosen else Path(constants.HF_HOME) / "hybridspec"
    except RuntimeError as error:
        raise OSError(f"{CACHE_VARIABLE}={chosen!r}: {error}") from error


def cost_facts(engine: Engine, drafter: DFlashDrafter, runtime: str) -> dict[str, Any]:
    """What a curve of this pair belongs to, as JSON types."""
    from .. import __version__

    device = engine.target.cache_shape.device
    pair = engine.identity(drafter)
    facts = {
        "format": FORMAT,
        "device": device_name(device),
        "runtime": runtime,
        "target": pair.target,
        "drafter": pair.drafter,
        "sizes": re.sub(r"device\(.*?\)", device.type, repr(sizes(engine.target))),
        "block": drafter.config.block_size,
        "hybridspec_hf": __version__,
        "torch": torch.__version__,
        "triton": triton_version(),
    }
    # of a GPU the name says it all
    if device.type == "cpu":
        facts |= {"machine": f"{platform.node()}, {platform.machine()}", "threads": torch.get_num_threads()}
    return facts


def cost_path(facts: dict[str, Any]) -> Path | None:
    """The file of these facts; None without a cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "costs" / f"{re.sub(r'[^A-Za-z0-9]+', '-', facts['device'])}-{digest}.json"


def read_cost(facts: dict[str, Any]) -> CostTable | None:
    """The curve that was kept; None if there is none, with a warning if its file cannot be read or is damaged."""
    try:
        path = cost_path(facts)
        text = None if path is None else path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warnings.warn(f"HybridSpec: no kept latency curve can be read ({error}): it is measured.", stacklevel=2)
        return None
    if text is None:
        return None
    try:
        kept = json.loads(text)
        if kept["facts"] != facts:
            raise ValueError("it belongs to something else")
        cost = CostTable.from_dict(kept["cost"])
        if cost.block != facts["block"]:
            raise ValueError(f"it is for a block of {cost.block} tokens")
        return cost
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        warnings.warn(
            f"HybridSpec: the latency curve in {path} is damaged ({error!r}): it is measured again.", stacklevel=2
        )
        return None


def write_cost(facts: dict[str, Any], cost: CostTable) -> str | None:
    """Keep a curve; what went wrong if it could not be kept."""
    try:
        path = cost_path(facts)
        if path is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        # another process may read or write the same file
        replace_file(path, (json.dumps({"facts": facts, "cost": cost.to_dict()}, indent=2) + "\n").encode())
    except OSError as error:
        return f"it cannot be kept ({error}); set {CACHE_VARIABLE} to a folder that can be written, or to off"
    return None


def triton_version() -> str | None:
    """The installed Triton."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
