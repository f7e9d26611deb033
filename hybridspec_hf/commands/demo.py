"""`hybridspec demo`: the tiny pair that ships → streamed text, one table of policies, and whether each is exact."""

import argparse
import contextlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hybridspec_generation import DecodeReport
from hybridspec_hf.commands.options import pick_device, policy_name, positive
from hybridspec_hf.evals.exactness import provenance
from hybridspec_hf.pair import (
    AUTOREGRESSIVE,
    TINY_PAIR,
    Pair,
    encode,
    load_pair,
    quiet_transformers,
    read_prompts,
    run_plain,
    run_policy,
)

LABELS = {AUTOREGRESSIVE: "AR", "full": "DFlash", "hybridspec": "HybridSpec"}
LEGEND = """AL: tokens emitted per round. mean w: tokens verified per round. saved: share of the full
blocks' tokens that were not verified. target work: tokens through the target per emitted token.
Times are decoding only, streaming included. The adaptive policies measure the target at their first prompt, so the
lengths they choose vary a little from run to run; the tokens never do.
On a model this small a round takes as long for many tokens as for few, so tokens/s hardly tells the policies apart;
on a large one the verified tokens are what costs time."""
# longer than a block, so that every policy has met every step of a round before its clock counts
WARM_UP_TOKENS = 24


class Run(NamedTuple):
    """One policy on one prompt: what it did, and whether its tokens are plain generate's."""

    report: DecodeReport
    identical: bool


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("demo", help="compare decoding policies on the pair that ships with the package")
    parser.add_argument(
        "--policies",
        nargs="+",
        type=policy_name,
        default=list(LABELS),
        metavar="POLICY",
        help="ar, full (vanilla DFlash), hybridspec, nominal, dcut, evict, dspark, static:N "
        "(default: ar full hybridspec)",
    )
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="number of prompts (default: 4)")
    parser.add_argument("--max-new-tokens", type=positive, default=96, metavar="N")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ... (default: auto)")
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="CPU threads (default: 1, for a small pair)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--pair", type=Path, default=TINY_PAIR, metavar="DIR", help="folder with target/, drafter/ and prompts.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="make the last line of stdout one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 if a policy differs from plain generate in fp32, where it must not."""
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    check_pair(args.pair)
    prompts = read_prompts(args.pair / "prompts.jsonl", args.prompts)
    with quiet_transformers(), exact_convolutions():
        pair = load_pair(str(args.pair / "target"), str(args.pair / "drafter"), dtype=args.dtype, device_map=device)
        rows = compare(pair, prompts, args.policies, args.max_new_tokens)
    print_table(rows)
    if args.json:
        setup = {"device": device, "dtype": args.dtype, "threads": args.threads, "prompts": len(prompts)}
        print(json.dumps({**provenance(), **setup, "max_new_tokens": args.max_new_tokens, "rows": rows}))
    exact = all(row["identical"] for row in rows)
    return 0 if exact or args.dtype != "float32" else 1


def check_pair(folder: Path) -> None:
    """Raise FileNotFoundError for a folder that holds no pair."""
    missing = [name for name in ("target", "drafter", "prompts.jsonl") if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"--pair {folder} has no {', '.join(missing)}. Leave it out for the pair that ships, or use "
            "`hybridspec generate` for a target and a drafter."
        )


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """fp32 means fp32: cuDNN convolutions default to TF32, which rounds the two sides of a comparison differently."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def compare(
    pair: Pair, prompts: list[dict[str, str]], policies: list[str], max_new_tokens: int
) -> list[dict[str, Any]]:
    """Stream every prompt with every policy and sum up each policy as one row."""
    warm_up(pair, prompts[0]["prompt"], policies)
    runs: dict[str, list[Run]] = {policy: [] for policy in policies}
    with tqdm(total=len(prompts) * (len(policies) + 1), unit="run", file=sys.stderr) as bar:
        for prompt in prompts:
            inputs = encode(pair, prompt["prompt"], chat_template=True)
            plain = run_plain(pair, inputs, max_new_tokens=max_new_tokens)
            bar.update()
            # the bar makes room for text on the same terminal and comes back below it
            bar.clear()
            print(f"\n=== {prompt['category']}: {textwrap.shorten(prompt['prompt'], 300)}")
            for policy in policies:
                bar.clear()
                print(f"\n--- {LABELS.get(policy, policy)}", flush=True)
                output = run_policy(pair, inputs, policy, max_new_tokens=max_new_tokens, stream=True)
                runs[policy].append(Run(output.report, torch.equal(output.sequences, plain)))
                bar.update()
    return [summarise(policy, runs[policy]) for policy in policies]


def warm_up(pair: Pair, prompt: str, policies: list[str]) -> None:
    """One short request per policy: first-use work (tables, buffers, libraries) is no decode time."""
    inputs = encode(pair, prompt, chat_template=True)
    for policy in policies:
        run_policy(pair, inputs, policy, max_new_tokens=WARM_UP_TOKENS, stream=False)


def summarise(policy: str, runs: list[Run]) -> dict[str, Any]:
    """One policy over all prompts: ratios of sums, so that long answers count for more."""
    reports = [run.report for run in runs]
    rounds = max(sum(report.rounds for report in reports), 1)
    emitted = sum(sum(report.emitted) for report in reports)
    verified = sum(report.verified_tokens for report in reports)
    seconds = sum(report.decode_seconds for report in reports)
    return {
        "policy": policy,
        "tokens_per_second": emitted / seconds if seconds else 0.0,
        "acceptance_length": emitted / rounds,
        "mean_verify_length": verified / rounds,
        "verified_tokens": verified,
        "saved": 1 - verified / (rounds * reports[0].block),
        "target_tokens_per_token": verified / max(emitted, 1),
        "identical": all(run.identical for run in runs),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows for people."""
    print(f"\n{'policy':<12}{'tokens/s':>10}{'AL':>7}{'mean w':>8}{'verified':>10}{'saved':>8}{'target work':>13}"
          "  identical to plain generate")  # fmt: skip
    for row in rows:
        print(
            f"{LABELS.get(row['policy'], row['policy']):<12}{row['tokens_per_second']:>10.1f}"
            f"{row['acceptance_length']:>7.2f}{row['mean_verify_length']:>8.2f}{row['verified_tokens']:>10}"
            f"{row['saved']:>8.0%}{row['target_tokens_per_token']:>13.2f}  {'yes' if row['identical'] else 'no'}"
        )
    print(f"\n{LEGEND}")
