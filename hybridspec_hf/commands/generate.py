"""`hybridspec generate`: one prompt, any target and drafter → text."""

import argparse
import json

import torch

from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.commands.options import DTYPES, pick_device, policy_name, positive
from hybridspec_hf.pair import AUTOREGRESSIVE, encode, load_pair, run_policy


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("generate", help="decode one prompt with any target and drafter")
    parser.add_argument("--target", required=True, help="target model: a folder or a Hub name")
    parser.add_argument("--drafter", help="its DFlash drafter; without one the target decodes autoregressively")
    parser.add_argument("--prompt", required=True)
    parser.add_argument(
        "--policy",
        type=policy_name,
        help="hybridspec (default), nominal, dcut, evict, dspark, full, static:N or ar",
    )
    parser.add_argument("--config", metavar="DIR", help="what `hybridspec calibrate` wrote, a folder or a Hub name")
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: auto, the checkpoint's")
    parser.add_argument(
        "--device", "--device-map", dest="device_map", default="auto", metavar="DEVICE",
        help="cpu, cuda:0, ..., or another device_map of from_pretrained (default: auto)",
    )  # fmt: skip
    parser.add_argument("--chat-template", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="make the last line of stdout one JSON object")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: torch's; 1 for a tiny model)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Decode the prompt, print its text and, with --json, what the run measured."""
    policy = args.policy or ("hybridspec" if args.drafter else AUTOREGRESSIVE)
    if policy != AUTOREGRESSIVE and args.drafter is None:
        raise ValueError(f"--policy {policy} drafts tokens, but no --drafter was given. Pass one, or --policy ar.")
    if args.config is not None and policy == AUTOREGRESSIVE:
        raise ValueError(
            "--config holds tables for drafting, but nothing is drafted. Leave it out, or pass --drafter and another "
            "--policy than ar."
        )
    config = None if args.config is None else HybridSpecConfig.from_pretrained(args.config)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.device_map.startswith("cuda"):
        pick_device(args.device_map)
    pair = load_pair(args.target, args.drafter, dtype=args.dtype, device_map=args.device_map)
    inputs = encode(pair, args.prompt, chat_template=args.chat_template)
    if config is not None:
        # the file's own policy, unless another one is asked for
        policy = args.policy or config.policy
    output = run_policy(pair, inputs, policy, max_new_tokens=args.max_new_tokens, stream=args.stream, config=config)
    text = pair.tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if not args.stream:
        print(text)
    if args.json:
        print(json.dumps({"text": text, **output.report.to_dict()}))
    return 0
