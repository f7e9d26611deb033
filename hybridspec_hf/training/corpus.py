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


def varied(text: str) -> bool:
    """Whether a text hardly repeats itself: a model that learns from text that does will loop."""
    words = text.lower().split()
    grams = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(grams)) >= 0.91 * len(grams) and (len(words) <= 50 or len(set(words)) >= 0.45 * len(words))


def pack(paths: list[Path], max_chars: int, seed: int = 0) -> list[Row]:
    """Merge worker files: no row twice, no copies of a passage as its summary, varied answers, up to `max_chars`.

    Rows come out grouped by category: neighbours that look alike compress better.
    """
    rows = {(row["prompt"], row["answer"]): row for path in paths for row in read_rows(path)}
    kept, chars = [], 0
    for row in random.Random(seed).sample(list(rows.values()), len(rows)):
        # the teacher's tokenizer sometimes loses the space in its most frequent opening
        row = row | {"answer": row["answer"].replace("upona ", "upon a ")}
        if row["answer"] in row["prompt"] or not varied(row["answer"]):
            continue
        chars += len(row["prompt"]) + len(row["answer"])
        if chars > max_chars:
            break
        kept.append(row)
    return sorted(kept, key=lambda row: (row["category"], row["prompt"]))
