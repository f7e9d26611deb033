"""The rounds of a capture run on disk: a file that grows by a prompt at a time, so that a run can be resumed."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..drafters.dflash import DFlashDrafter
from ..engine import get_engine
from ..identity import fingerprint
from .capture import CaptureRounds
from .contexts import typical_context

CAPTURE_NAME = "capture.jsonl"
FORMAT = 2
# a softmax may round beyond 1
TOLERANCE = 1e-4
# what must agree, what a refusal calls it, and the entry that names it
IDENTITY = {
    "format": ("another version of hybridspec_hf", "format"),
    "dtype": ("another dtype", "dtype"),
    "target_weights": ("another target", "target"),
    "drafter_weights": ("another drafter", "drafter"),
    "prompt_tokens": ("other prompts (or another tokenizer)", "prompts"),
    "max_new_tokens": ("another max_new_tokens", "max_new_tokens"),
    "eos": ("other EOS ids", "eos"),
    "block": ("another block size", "block"),
}


class CaptureStore:
    """One header line, then the rounds of a prompt a line.

    Attributes:
        path: the file. captured: rounds by the index of their prompt.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Read the file, if there is one; only `add` writes.

        Args:
            header: what `capture_header` returned.

        Raises:
            ValueError: if the file belongs to another capture run, or is damaged.
        """
        self.path, self._header = path, header
        self.captured: dict[int, CaptureRounds] = {}
        text = path.read_bytes() if path.is_file() else b""
        # an interrupted run leaves half a line
        self._whole = text.rfind(b"\n") + 1
        lines = text[: self._whole].splitlines()
        if not lines:
            return
        found = parse(path, 1, lines[0])
        try:
            check_header(path, found, header)
        except KeyError as error:
            raise ValueError(f"{path} is damaged (its header has no {error}). Delete it to capture again.") from error
        for number, line in enumerate(lines[1:], start=2):
            row = parse(path, number, line)
            try:
                self.captured[prompt_index(row, found)] = rounds_from(row, found)
            except (KeyError, TypeError, RuntimeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{path} is damaged in line {number} ({error!r}). Delete it to capture again."
                ) from error

    def add(self, index: int, rounds: CaptureRounds) -> None:
        """Keep the rounds of one prompt."""
        row = {"prompt": index, **{name: rounded(part) for name, part in rounds._asdict().items()}}
        lines = [row] if self._whole else [self._header, row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        with self.path.open("ab") as file:
            file.truncate(self._whole)
            file.write(text)
        self._whole += len(text)
        self.captured[index] = rounds


def capture_header(
    model: nn.Module,
    drafter: DFlashDrafter,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    eos: Sequence[int],
    names: dict[str, str],
) -> dict[str, Any]:
    """What makes two capture runs the same, and `names` of the target, the drafter and the prompts for people."""
    text = hashlib.sha256(json.dumps([ids.tolist() for ids in prompts]).encode())
    target = get_engine(model, drafter).target
    return {
        "format": FORMAT,
        **names,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "target_weights": fingerprint(model),
        "drafter_weights": fingerprint(drafter),
        "prompt_tokens": text.hexdigest()[:16],
        "max_new_tokens": max_new_tokens,
        "eos": sorted(eos),
        "block": drafter.config.block_size,
        "context": typical_context(prompts, max_new_tokens),
        # what rows are checked by
        "num_prompts": len(prompts),
        "top_k": target.top_k,
        "num_moe_layers": target.num_moe_layers,
    }


def check_header(path: Path, found: dict[str, Any], header: dict[str, Any]) -> None:
    """Refuse to resume another run.

    Raises:
        KeyError: for a header without a block size. ValueError: naming what differs.
    """
    if "format" not in found or "block" not in found:
        raise KeyError("format" if "block" in found else "block")
    for key, (what, name) in IDENTITY.items():
        if found.get(key) != header.get(key):
            was, now = found.get(name), header.get(name)
            raise ValueError(
                f"{path} holds a capture run with {what}: {was}, now {now}"
                f"{', whose content has changed' if was == now else ''}. "
                "Choose another output folder, or delete the file to capture again."
            )


def rounded(part: Tensor) -> Any:
    """JSON types; 9 digits are all that fp32 has."""
    if not part.is_floating_point():
        return part.tolist()
    return [[float(f"{value:.9g}") for value in row] for row in part.tolist()]


def parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """A line of the file.

    Raises:
        ValueError: naming file and line, if it is no JSON object.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("no JSON object")
    # nested too deeply, too
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged in line {number} ({error}). Delete it to capture again.") from error
    return row


def prompt_index(row: dict[str, Any], header: dict[str, Any]) -> int:
    """Which prompt a line is of.

    Raises:
        ValueError: if there is no such prompt.
    """
    index = row["prompt"]
    if type(index) is not int or not 0 <= index < header.get("num_prompts", math.inf):
        raise ValueError(f"there is no prompt {index!r}")
    return index


def rounds_from(row: dict[str, Any], header: dict[str, Any]) -> CaptureRounds:
    """Inverse of what `add` writes; a prompt may have no rounds.

    Raises:
        KeyError, TypeError, RuntimeError, ValueError, OverflowError: if it is ragged, or holds what no round can have.
    """
    block, top_k = header["block"], header.get("top_k", math.inf)
    # of the layers behind the first
    most = math.inf if math.isinf(top_k) else top_k * max(header["num_moe_layers"] - 1, 0)
    shape = (len(row["accepted"]),)
    draft, whole = (*shape, block - 1), (*shape, block)
    return CaptureRounds(
        confidence=part_of(row, "confidence", draft, -TOLERANCE, 1 + TOLERANCE).float(),
        entropy=part_of(row, "entropy", draft, -TOLERANCE, torch.finfo(torch.float32).max).float(),
        accepted=count_of(row, "accepted", shape, block - 1),
        new_layer0=count_of(row, "new_layer0", whole, top_k),
        new_later=count_of(row, "new_later", whole, most),
    )


def count_of(row: dict[str, Any], name: str, shape: tuple[int, ...], most: float) -> Tensor:
    """Whole numbers from 0 to `most`, int64."""
    values = part_of(row, name, shape, 0, most)
    if not torch.equal(values, values.floor()):
        raise ValueError(f"{name} must be whole numbers")
    return values.long()


def part_of(row: dict[str, Any], name: str, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    """Numbers of a line in fp64, in this shape and range."""
    values = torch.tensor(row[name], dtype=torch.float64)
    # no rounds: an empty list, whatever the width
    if not shape[0] and not values.numel():
        return values.new_empty(shape)
    if values.shape != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(values.shape)}")
    # NaN fails, too
    if not ((values >= low) & (values <= high)).all():
        raise ValueError(f"{name} must lie between {low} and {high}")
    return values
