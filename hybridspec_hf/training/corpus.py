"""Files of the chat corpus: JSON lines under xz, one answered prompt a line."""

import json
import lzma
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

Row = dict[str, str]


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of one .jsonl.xz file; a file that was cut short ends with its last whole line."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        try:
            for line in file:
                yield json.loads(line)
        except (EOFError, json.JSONDecodeError):
            return


def write_rows(path: str | Path, rows: Iterable[Row], preset: int = 9) -> int:
    """Write rows and return how many."""
    count = 0
    with lzma.open(path, "wt", encoding="utf-8", preset=preset) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def pack(paths: list[Path], max_chars: int, seed: int = 0) -> list[Row]:
    """Merge worker files: one row per prompt, shuffled, up to `max_chars` characters of prompts and answers.

    Rows come out grouped by category: neighbours that look alike compress better.
    """
    rows = {row["prompt"]: row for path in paths for row in read_rows(path)}
    shuffled = random.Random(seed).sample(list(rows.values()), len(rows))
    kept, chars = [], 0
    for row in shuffled:
        chars += len(row["prompt"]) + len(row["answer"])
        if chars > max_chars:
            break
        kept.append(row)
    return sorted(kept, key=lambda row: (row["category"], row["prompt"]))
