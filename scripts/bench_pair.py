"""Judge every length policy on real held-out rounds of the pair that ships: tables from one half of its prompts.

    python scripts/bench_pair.py                  # on a CPU, minutes; the table of docs/bench.md
    python scripts/bench_pair.py --limit 6 --max-new-tokens 64 --output runs/quick       # a quick look

Both halves are decoded once with the whole block verified, in fp32 on one CPU thread; every policy then chooses
lengths in the held-out rounds, and a round takes what it would on an H200 with the 35B's shape
(hybridspec_hf/bench/example_cost.py). A run that was cut short continues in its folder, one that was not prints the
same again.

Writes bench_pair.md and bench_pair.json beside the rounds; the last line of stdout is the JSON object.
"""

import argparse
import json
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_pair"), metavar="DIR")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many prompts of a category (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of a prompt (default: 128)")
    args = parser.parse_args()
    import torch

    from hybridspec_hf.bench.held_out import capture_halves, fit_config, judge, report
    from hybridspec_hf.bench.held_out_tables import held_out_lines
    from hybridspec_hf.bench.machine import describe, provenance
    from hybridspec_hf.bench.pair_prompts import load_bench_prompts
    from hybridspec_hf.calibration.calibrate import require_sklearn
    from hybridspec_hf.pair import TINY_PAIR, load_pair, quiet_transformers

    torch.set_num_threads(1)
    try:
        require_sklearn()
        with quiet_transformers():
            pair = load_pair(str(TINY_PAIR / "target"), str(TINY_PAIR / "drafter"), dtype="float32", device_map="cpu")
            prompts = load_bench_prompts(TINY_PAIR / "prompts.jsonl", pair.tokenizer, split="all", limit=args.limit)
            halves = capture_halves(pair, prompts, args.output, max_new_tokens=args.max_new_tokens)
        config = fit_config(halves.calibration, pair)
        result = judge(halves.held_out, config)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted: the same command goes on where it stopped.")
    fitted = f"Tables fitted to {config.acceptance.source}.\n"
    lines = ["# The pair that ships\n", describe(), "", fitted, *held_out_lines(result)]
    print(*lines, sep="\n")
    text = json.dumps(provenance() | {"max_new_tokens": args.max_new_tokens} | report(result))
    (args.output / "bench_pair.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (args.output / "bench_pair.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
