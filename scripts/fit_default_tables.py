"""Fit the acceptance and expert tables that ship with the package, on the calibration half of the tiny pair's prompts.

    python scripts/fit_default_tables.py --max-new-tokens 128

Every second prompt of a category is a calibration prompt; the others stay unseen and give the held-out numbers. Writes
hybridspec_hf/assets/default_tables.json; the last line of stdout is one JSON object.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import hybridspec_hf
from hybridspec_hf.calibration.acceptance import acceptance_quality
from hybridspec_hf.calibration.calibrate import fit_tables, model_eos
from hybridspec_hf.calibration.capture import CaptureRounds, capture_rounds
from hybridspec_hf.calibration.experts import routing_correlation
from hybridspec_hf.calibration.tables import DEFAULTS
from hybridspec_hf.commands.demo import read_prompts
from hybridspec_hf.commands.pair import TINY_PAIR, Pair, encode, load_pair
from hybridspec_hf.engine import get_engine

ASSETS = Path(hybridspec_hf.__file__).parent / "assets"


def capture(pair: Pair, rows: list[dict[str, Any]], max_new_tokens: int, name: str) -> CaptureRounds:
    """A capture run over chat prompts."""
    prompts: list[Tensor] = [encode(pair, row["prompt"], chat_template=True)["input_ids"] for row in rows]
    assert pair.drafter is not None
    bar = tqdm(prompts, desc=name, unit="prompt")
    return capture_rounds(pair.model, pair.drafter, bar, max_new_tokens=max_new_tokens, eos=model_eos(pair.model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000, help="at most this many, categories in turn")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=ASSETS / DEFAULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)

    pair = load_pair(str(TINY_PAIR / "target"), str(TINY_PAIR / "drafter"), dtype="float32", device_map="cpu")
    rows = read_prompts(TINY_PAIR / "prompts.jsonl", args.prompts)
    turns: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        turns.setdefault(row["category"], []).append(row)
    seen = capture(pair, [r for c in turns.values() for r in c[::2]], args.max_new_tokens, "calibration")
    held_out = capture(pair, [r for c in turns.values() for r in c[1::2]], args.max_new_tokens, "held-out")

    source = f"tiny pair, {len(seen.accepted)} rounds of its calibration prompts"
    acceptance, experts = fit_tables(seen, get_engine(pair.model, pair.drafter).target, source)
    tables = {"acceptance": asdict(acceptance), "experts": asdict(experts)}
    args.out.write_text(json.dumps(tables, separators=(",", ":")) + "\n", encoding="utf-8")
    figures = {"calibration_rounds": len(seen.accepted), "held_out_rounds": len(held_out.accepted)}
    figures |= acceptance_quality(held_out, acceptance) | {"routing_correlation": routing_correlation(held_out)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
