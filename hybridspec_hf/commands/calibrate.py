"""`hybridspec calibrate`: a pair and a file of prompts → a folder with its HybridSpecConfig, and a report."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridspec_hf import DFlashDrafter
from hybridspec_hf.calibration.calibrate import Calibration, Names, calibrate, model_eos, require_sklearn
from hybridspec_hf.calibration.prompts import load_prompts
from hybridspec_hf.commands.options import DTYPES, pick_device, positive
from hybridspec_hf.drafters.loading import check_folder


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("calibrate", help="fit the length policy to a pair on this machine")
    parser.add_argument("--target", required=True, help="target model: a folder or a Hub name")
    parser.add_argument("--drafter", required=True, help="its DFlash drafter")
    parser.add_argument("--tokenizer", help="default: the target's")
    parser.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="FILE.jsonl",
        help='one JSON object a line with "prompt" or "messages"; those with another "split" than "calibration" are '
        "left out",
    )
    parser.add_argument(
        "--max-new-tokens", type=positive, default=512, metavar="N", help="of each prompt (default: 512)"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="folder for the result; run again to resume"
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens before the timed rounds; between several, lengths are chosen by interpolation (default: half an "
        "answer behind a prompt, on a GPU 1024, 8192 and 32768 too)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ... (default: auto)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: auto, the checkpoint's")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: torch's; 1 for a tiny model)"
    )
    parser.add_argument("--json", action="store_true", help="make the last line of stdout one JSON object")
    parser.set_defaults(run=run, interrupted="the same command goes on where it stopped")


def run(args: argparse.Namespace) -> int:
    """Calibrate, save and report."""
    require_sklearn()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    check_folder(args.target, "target")
    # before the weights: a wrong file shows at once
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.target)
    prompts = load_prompts(args.prompts, tokenizer)
    if prompts.left_out:
        print(f'{prompts.left_out} prompts of another split than "calibration" are left out.')
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype, device_map=device)
    drafter = DFlashDrafter.from_pretrained(args.drafter, dtype=args.dtype, device_map=device)
    eos = model_eos(model) or [tokenizer.eos_token_id]
    result = calibrate(
        model,
        drafter,
        prompts.input_ids,
        max_new_tokens=args.max_new_tokens,
        output=args.output,
        names=Names(short_name(args.target), short_name(args.drafter), args.prompts.name),
        eos=[token for token in eos if token is not None],
        context=args.context,
    )
    print_report(result)
    print(f"\nSaved to {args.output}. Use it: HybridSpecConfig.from_pretrained({str(args.output)!r})")
    if args.json:
        print(json.dumps({"output": str(args.output), **result.report}))
    return 0


def short_name(name: str) -> str:
    """A Hub name as it is; of a folder the last two parts, so that a shared file tells no paths of this machine."""
    path = Path(name)
    return "/".join(path.absolute().parts[-2:]) if path.is_dir() else name


def print_report(result: Calibration) -> None:
    """The figures for people."""
    report: dict[str, Any] = result.report
    errors = report["calibration_error"]
    print(f"\nrounds               {report['rounds']} at full length, of {report['prompts']} prompts")
    print(f"acceptance length    {report['acceptance_length']:.2f} tokens a round")
    judged = "prompts it was not fitted on" if errors["unseen"] else "the prompts it was fitted on: too few for others"
    print(f"calibration error    {errors['confidence']:.4f} before, {errors['table']:.4f} after (on {judged})")
    if errors["table"] >= errors["confidence"]:
        print("                     no better than the drafter's confidence alone: use more prompts or longer answers")
    if report["routing_correlation"] is not None:
        print(f"routing correlation  {report['routing_correlation']:.2f}, new experts of Layer 0 with later ones")
    print(f"rho                  {report['throughput']:.1f} tokens/s")
    print(f"cost                 {report['cost_source']}")
    print(
        f"                     fixed {report['fixed_ms']:.3f} ms, s {report['stage0_token_us']:.2f} us, "
        f"eta {report['expert_us']:.2f} us"
    )
    print(f"\n{'ms/round':<10}" + "".join(f"{f'w={w}':>8}" for w in report["round_ms"]) + f"{'rho':>10}{'gain':>8}")
    for context, cost in report["contexts"].items():
        times = "".join(f"{ms:>8.3f}" for ms in cost["round_ms"].values())
        gain = 100 * (report["interpolation_gain"][context] - 1)
        print(f"{context:<10}{times}{cost['throughput']:>10.1f}{gain:>7.2f}%")
    print("by context; gain: modelled throughput over that with one curve, the prompts' own, for every context")
