"""A JSONL file of prompts -> token ids by category, of one split: what `hybridspec bench` decodes."""

from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from hybridspec_generation import HybridSpecConfig

from ..calibration.prompts import encode_row, parse_row, prompt_hash

SHIPPED = Path(str(resources.files("hybridspec_hf.assets"))) / "prompts" / "prompts.jsonl"
SPLITS = ("test", "calibration", "all")
# of a line that names none
NO_CATEGORY = "prompts"


class BenchPrompt(NamedTuple):
    """One prompt: its `id` (or line number), its category, and token ids `[1, T]`, int64."""

    name: str
    category: str
    input_ids: Tensor


def load_bench_prompts(
    path: Path, tokenizer: Any, *, split: str = "test", limit: int | None = None
) -> list[BenchPrompt]:
    """Tokenise the prompts of a split, as `hybridspec calibrate` does: categories in the order of the file.

    Args:
        path: one JSON object a line, with `prompt` or `messages`, and `category`, `split` and `id` where they matter.
        split: "test", "calibration" or "all"; a line that names no split belongs to each.
        limit: at most so many of each category.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a line cannot be used, with its number; or if none is left.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no prompt file {path}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 prompt of a category, got {limit}.")
    found: dict[str, list[BenchPrompt]] = {}
    left_out: Counter[str] = Counter()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line)
            if split != "all" and row.get("split", split) != split:
                left_out[str(row["split"])] += 1
                continue
            category = str(row.get("category", NO_CATEGORY))
            mine = found.setdefault(category, [])
            if limit is None or len(mine) < limit:
                mine.append(BenchPrompt(str(row.get("id", number)), category, encode_row(row, tokenizer)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        others = ", ".join(f"{count} of split {name!r}" for name, count in left_out.items())
        advice = f" ({others}): choose another" if others else ""
        raise ValueError(f"{path} has no prompts of split {split!r}{advice}.")
    return [prompt for prompts in found.values() for prompt in prompts]


def calibrated_prompts(prompts: Sequence[BenchPrompt], tables: HybridSpecConfig | None) -> list[str] | None:
    """Names of the prompts that `tables` were calibrated on; None if they do not say on which."""
    made_for = tables and tables.calibrated_for
    if not made_for or not made_for.prompt_hashes:
        return None
    seen = set(made_for.prompt_hashes)
    return [prompt.name for prompt in prompts if prompt_hash(prompt.input_ids) in seen]
