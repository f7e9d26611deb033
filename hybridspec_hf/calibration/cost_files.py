"""Measured latency curves on disk: in the user's cache folder, so that a machine measures a pair once; and those of
a calibration that is not finished, so that it can be resumed.

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
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants

from hybridspec_generation.storage import read_bytes, replace_file
from hybridspec_generation.tables import CostTable

from ..drafters.dflash import DFlashDrafter
from ..engine import Engine, sizes
from .latency import device_name

CACHE_VARIABLE = "HYBRIDSPEC_CACHE"
UNFINISHED_NAME = "latency.jsonl"
# of every line of it
FIRST_BYTES = b'{"facts": {'
# of the files, and of how curves are measured
FORMAT = 2
# what a text that is no curve makes `parse_cost` raise
DAMAGED = (KeyError, TypeError, AttributeError, ValueError, RecursionError)


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


@contextmanager
def without_cache_folder() -> Iterator[None]:
    """Within the block, no curve is read from the cache folder or kept there."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before


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
        return parse_cost(text, facts)
    except DAMAGED as error:
        warnings.warn(
            f"HybridSpec: the latency curve in {path} is damaged ({error!r}): it is measured again.", stacklevel=2
        )
        return None


def parse_cost(text: bytes, facts: dict[str, Any]) -> CostTable:
    """A curve that was kept with its facts.

    Raises:
        one of DAMAGED: if it is none, or belongs to something else.
    """
    kept = json.loads(text)
    if kept["facts"] != facts:
        raise ValueError("it belongs to something else")
    cost = CostTable.from_dict(kept["cost"])
    if cost.block != facts["block"]:
        raise ValueError(f"it is for a block of {cost.block} tokens")
    return cost


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


class UnfinishedCosts:
    """The curves that a calibration has measured so far, one a line.

    Attributes:
        path: the file. costs: by context. dropped: lines that are damaged, or belong to something else.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """Read the file, if there is one; only `add` writes.

        Args:
            facts: what the curves belong to, as JSON types.

        Raises:
            ValueError: if it is no such file.
        """
        self.path, self._facts = path, facts
        self.costs: dict[int, CostTable] = {}
        self.dropped = 0
        lines = read_bytes(path).splitlines() if path.exists() else []
        if lines and not lines[0].startswith(FIRST_BYTES):
            raise ValueError(f"{path} is not a calibration's. Choose another output folder, or move it away.")
        for line in lines:
            try:
                cost = parse_cost(line, facts)
                self.costs[cost.context] = cost
            except DAMAGED:
                self.dropped += 1

    def add(self, cost: CostTable) -> None:
        """Keep one curve more."""
        self.costs[cost.context] = cost
        lines = (json.dumps({"facts": self._facts, "cost": each.to_dict()}) for each in self.costs.values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, "".join(line + "\n" for line in lines).encode())

    def remove(self) -> None:
        """Delete the file: what was asked for is measured, and the next calibration measures anew."""
        self.path.unlink(missing_ok=True)


def triton_version() -> str | None:
    """The installed Triton."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
