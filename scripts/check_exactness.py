"""Compare every length policy with plain generate, token for token, on the tiny pair or any other.

    python scripts/check_exactness.py --prompts 200 --max-new-tokens 64                  # fp32
    python scripts/check_exactness.py --dtype bfloat16 --device cuda --max-margin 4

Prints a line per policy; the last line of stdout is one JSON object. Exits with 1 when an fp32 output differs, or when
a bf16 output differs where the two best logits are more than --max-margin spacings of the dtype apart.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from hybridspec_hf.evals.exactness import check_exactness, provenance, worst_margin
from hybridspec_hf.pair import TINY_PAIR, encode, load_pair, read_prompts

ALL = ["ar", "full", "nominal", "hybridspec", "dcut", "evict", "dspark", *(f"static:{n}" for n in range(2, 17))]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TINY_PAIR / "target"), help="default: the shipped tiny pair's")
    parser.add_argument("--drafter", default=str(TINY_PAIR / "drafter"), help="default: the shipped tiny pair's")
    parser.add_argument("--prompt-file", type=Path, default=TINY_PAIR / "prompts.jsonl")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--policies", nargs="+", default=ALL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--max-margin", type=float, default=4.0, help="allowed margin of a bf16 difference, in spacings"
    )
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.device == "cpu":
        torch.set_num_threads(1)
    # fp32 means fp32: TF32 rounds a block and a single token differently
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    pair = load_pair(args.target, args.drafter, dtype=args.dtype, device_map=args.device)
    exact = load_pair(args.target, None, dtype="float32", device_map=args.device).model
    rows = read_prompts(args.prompt_file, args.prompts)
    prompts = [encode(pair, row["prompt"], chat_template=True)["input_ids"] for row in rows]
    results = check_exactness(
        pair.model, pair.drafter, prompts, args.policies, max_new_tokens=args.max_new_tokens, fp32_model=exact
    )
    for result in results:
        print(
            f"{result.policy:>10}  identical {result.identical}/{result.prompts}  rounds {result.rounds}  "
            f"AL {(result.tokens - result.prompts) / max(result.rounds, 1):.2f}  "
            f"worst margin {worst_margin(result):.2f} spacings"
        )
    print(json.dumps({**provenance(), "dtype": args.dtype, "results": [result.to_dict() for result in results]}))
    allowed = 0.0 if args.dtype == "float32" else args.max_margin
    return int(any(worst_margin(result) > allowed or (allowed == 0 and result.divergences) for result in results))


if __name__ == "__main__":
    sys.exit(main())
