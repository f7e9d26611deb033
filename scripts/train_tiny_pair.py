"""Train the tiny target and its DFlash drafter from the shipped corpus; the last line is one JSON object of numbers.

    python scripts/train_tiny_pair.py                       # one GPU, about 19 minutes
    python scripts/train_tiny_pair.py --scale 0.1           # a tenth of every phase's time

A run that was cut short continues where its folder left off.
"""

import argparse
import json
from pathlib import Path

import torch

from hybridspec_hf.training.pair import PairRun, train_pair

ROOT = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny_pair"))
    parser.add_argument("--chat", type=Path, default=ROOT / "data" / "chat.jsonl.xz")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for phase, minutes in (("target", 5.2), ("unlearn", 0.7), ("answer", 1.0), ("drafter", 4.5), ("refine", 4.0)):
        parser.add_argument(f"--{phase}-minutes", type=float, default=minutes)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the minutes of every phase")
    parser.add_argument("--max-steps", type=int, help="limit the steps of every phase (for a quick check)")
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--answer-batch", type=int, default=2048)
    parser.add_argument("--per-category", type=int, default=40)
    args = parser.parse_args()
    run = PairRun(
        out=args.out,
        chat=args.chat,
        device=torch.device(args.device),
        target_minutes=args.target_minutes * args.scale,
        unlearn_minutes=args.unlearn_minutes * args.scale,
        answer_minutes=args.answer_minutes * args.scale,
        drafter_minutes=args.drafter_minutes * args.scale,
        refine_minutes=args.refine_minutes * args.scale,
        max_steps=args.max_steps,
        tokens_per_batch=args.tokens_per_batch,
        answer_batch=args.answer_batch,
        per_category=args.per_category,
    )
    print(json.dumps(train_pair(run)))


if __name__ == "__main__":
    main()
