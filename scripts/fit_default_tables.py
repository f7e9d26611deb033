"""Fit the acceptance and expert tables that ship with the package, on the calibration half of the tiny pair's prompts.

    python scripts/fit_default_tables.py --max-new-tokens 128

Every second prompt of a category is a calibration prompt; the others stay unseen and give the held-out numbers. Rounds
that scripts/bench_pair.py captured are taken as they are. Writes hybridspec_hf/assets/default_tables.json; the last
line of stdout is one JSON object.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

import hybridspec_hf
from hybridspec_hf.bench.held_out import capture_halves
from hybridspec_hf.bench.pair_prompts import load_bench_prompts
from hybridspec_hf.calibration.acceptance import acceptance_quality
from hybridspec_hf.calibration.calibrate import fit_tables
from hybridspec_hf.calibration.capture import merge_rounds
from hybridspec_hf.calibration.experts import routing_correlation
from hybridspec_hf.calibration.tables import DEFAULTS
from hybridspec_hf.engine import get_engine
from hybridspec_hf.pair import TINY_PAIR, load_pair

ASSETS = Path(hybridspec_hf.__file__).parent / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many prompts of a category (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=Path, default=Path("runs/bench_pair"), help="folder of the captured rounds")
    parser.add_argument("--out", type=Path, default=ASSETS / DEFAULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)

    pair = load_pair(str(TINY_PAIR / "target"), str(TINY_PAIR / "drafter"), dtype="float32", device_map="cpu")
    prompts = load_bench_prompts(TINY_PAIR / "prompts.jsonl", pair.tokenizer, split="all", limit=args.limit)
    halves = capture_halves(pair, prompts, args.rounds, max_new_tokens=args.max_new_tokens)
    seen, held_out = (merge_rounds(half) for half in halves)

    source = f"tiny pair, {len(seen.accepted)} rounds of its calibration prompts"
    acceptance, experts = fit_tables(seen, get_engine(pair.model, pair.drafter).target, source)
    tables = {"acceptance": asdict(acceptance), "experts": asdict(experts)}
    args.out.write_text(json.dumps(tables, separators=(",", ":")) + "\n", encoding="utf-8")
    figures = {"calibration_rounds": len(seen.accepted), "held_out_rounds": len(held_out.accepted)}
    figures |= acceptance_quality(held_out, acceptance) | {"routing_correlation": routing_correlation(held_out)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
