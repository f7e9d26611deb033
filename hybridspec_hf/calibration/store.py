"""The rounds of a capture run on disk: a file that grows by a prompt at a time, so that a run can be resumed."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..drafters.dflash import DFlashDrafter
from ..identity import fingerprint
from .capture import CaptureRounds

CAPTURE_NAME = "capture.jsonl"
FORMAT = 1
# what must agree, what a refusal calls it, and the entry that names it
IDENTITY = {
    "format": ("another version of hybridspec_hf", "format"),
    "dtype": ("another dtype", "dtype"),
    "target_weights": ("another target", "target"),
    "drafter_weights": ("another drafter", "drafter"),
    "prompt_tokens": ("other prompts (or another tokenizer)", "prompts"),
    "max_new_tokens": ("another max_new_tokens", "max_new_tokens"),
}


class CaptureStore:
    """One header line, then the rounds of a prompt a line.

    Attributes:
        path: the file. captured: rounds by the index of their prompt.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open the file, or begin it.

        Args:
            header: what `capture_header` returned.

        Raises:
            ValueError: if the file belongs to another capture run, or is damaged.
        """
        self.path = path
        self.captured: dict[int, CaptureRounds] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        # an interrupted run leaves half a line
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
            path.write_bytes(b"".join(lines))
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")
            return
        try:
            found, *rows = map(json.loads, lines)
            check_header(path, found, header)
            for row in rows:
                self.captured[int(row["prompt"])] = rounds_from(row, header["block"])
        except (KeyError, TypeError, RuntimeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}). Delete it to capture again.") from error

    def add(self, index: int, rounds: CaptureRounds) -> None:
        """Keep the rounds of one prompt."""
        row = {"prompt": index, **{name: rounded(part) for name, part in rounds._asdict().items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.captured[index] = rounds


def capture_header(
    model: nn.Module, drafter: DFlashDrafter, prompts: Sequence[Tensor], *, max_new_tokens: int, names: dict[str, str]
) -> dict[str, Any]:
    """What makes two capture runs the same, and `names` of the target, the drafter and the prompts for people."""
    text = hashlib.sha256(json.dumps([ids.tolist() for ids in prompts]).encode())
    return {
        "format": FORMAT,
        **names,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "target_weights": fingerprint(model),
        "drafter_weights": fingerprint(drafter),
        "prompt_tokens": text.hexdigest()[:16],
        "max_new_tokens": max_new_tokens,
        "block": drafter.config.block_size,
    }


def check_header(path: Path, found: dict[str, Any], header: dict[str, Any]) -> None:
    """Refuse to resume another run.

    Raises:
        ValueError: naming what differs.
    """
    for key, (what, name) in IDENTITY.items():
        if found[key] != header[key]:
            was, now = found[name], header[name]
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


def rounds_from(row: dict[str, Any], block: int) -> CaptureRounds:
    """Inverse of what `add` writes; a prompt may have no rounds."""
    accepted = torch.tensor(row["accepted"], dtype=torch.int64)
    widths = {"confidence": block - 1, "entropy": block - 1, "new_layer0": block, "new_later": block}
    parts = {name: torch.tensor(row[name]).reshape(len(accepted), width) for name, width in widths.items()}
    counts = {name: parts[name].long() for name in ("new_layer0", "new_later")}
    return CaptureRounds(accepted=accepted, **{**parts, **counts})
