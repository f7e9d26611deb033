"""Write the chat part of the tiny pair's corpus with a small teacher model, then pack it (see scripts/data/README.md).

python scripts/make_tiny_corpus.py write --teacher FOLDER --out worker_0.jsonl.xz --minutes 3 --seed 0
python scripts/make_tiny_corpus.py pack worker_*.jsonl.xz --out scripts/data/chat.jsonl.xz
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch

from hybridspec_hf.training import corpus


def write(args: argparse.Namespace) -> dict[str, object]:
    """Sample answers for the time given; progress goes to stdout, one line a batch."""
    from hybridspec_hf.training import teacher

    start, count, chars = time.monotonic(), 0, 0

    def rows() -> corpus.Iterator[corpus.Row]:
        nonlocal count, chars
        for batch in teacher.write_answers(args.teacher, args.device, args.minutes, args.batch, args.seed):
            count += len(batch)
            chars += sum(len(row["answer"]) for row in batch)
            print(f"{time.monotonic() - start:.1f} s  {count} rows  {chars} characters", flush=True)
            yield from batch

    corpus.write_rows(args.out, rows(), preset=3)
    return {"rows": count, "answer_characters": chars, "seconds": round(time.monotonic() - start, 1)}


def pack(args: argparse.Namespace) -> dict[str, object]:
    """Merge, shuffle, cap and compress."""
    rows = corpus.pack(args.workers, args.max_chars)
    corpus.write_rows(args.out, rows)
    return {
        "rows": len(rows),
        "categories": Counter(row["category"] for row in rows),
        "bytes": args.out.stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("write", help="sample answers with the teacher")
    one.add_argument("--teacher", required=True, help="folder with a .gguf file or a transformers checkpoint")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--minutes", type=float, default=3.0)
    one.add_argument("--batch", type=int, default=2048)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.set_defaults(run=write)
    two = commands.add_parser("pack", help="merge worker files into the shipped one")
    two.add_argument("workers", type=Path, nargs="+")
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--max-chars", type=int, default=24_000_000)
    two.set_defaults(run=pack)
    args = parser.parse_args()
    print(json.dumps(args.run(args)))


if __name__ == "__main__":
    main()
