"""Time decoding of a whole model of true size: stock generate, AR, vanilla DFlash, every fixed length, HybridSpec.

    python scripts/bench_decode.py --shape 35b --json bench_decode.json
    python scripts/bench_decode.py --shape tiny --device cpu            # that everything runs
    python scripts/bench_decode.py --shape 35b --modes ar dflash hybridspec --categories coding roleplay
    python scripts/bench_decode.py --shape 35b --modes ar dflash static systems ablations --policies dspark
    python scripts/bench_decode.py --shape 35b --modes launches split --categories roleplay    # ways to launch
    python scripts/bench_decode.py --shape 35b --modes contexts                # latency behind 1k, 8k, 32k tokens

Scripted acceptance, random weights: the target and its drafter have the sizes of the named models and random weights,
made so that the target's greedy text is known. The drafter runs at its true cost; its proposals are then overwritten
by that text, wrong from where a trace of accepted lengths says (hybridspec_hf/assets/traces). What is measured is
speed at a given acceptance, not acceptance.

Prints tables; the last line of stdout is one JSON object. Exits with 1 when a request did not write the known text.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

SHAPES = ["35b", "122b", "80b", "27b", "9b", "4b", "tiny"]
MODES = ["stock", "ar", "dflash", "static", "hybridspec"]
# the rows of the paper's Tables 1 and 3, when asked for
TABLES = ["systems", "ablations"]
# on a GPU, when asked for
MORE_MODES = ["launches", "split", "contexts"]
CATEGORIES = ["coding", "math", "reasoning", "rag", "summarization", "writing", "roleplay"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="35b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="only so many of the target's layers, for a GPU that is too small")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, help="of each request; default: 512 on a GPU, else 64")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=[*MODES, *TABLES, *MORE_MODES])
    parser.add_argument(
        "--policies", nargs="+", default=[], metavar="ROW", help="more rows, such as dcut, dspark, full+recurrent"
    )
    parser.add_argument("--categories", nargs="+", default=CATEGORIES, choices=[*CATEGORIES, "recorded"])
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        choices=range(2, 17),
        metavar="W",
        help="of the mode static, and of the parts of a round; default: 2 to 16 on a GPU, else 2 4 8 16",
    )
    parser.add_argument("--repeats", type=int, help="timed requests of each kind; default: 3 on a GPU, else 1")
    parser.add_argument("--json", type=Path, help="also write the JSON object here")
    args = parser.parse_args()
    for name in ("context", "new_tokens", "repeats"):
        value = getattr(args, name)
        if value is not None and value < (2 if name == "new_tokens" else 1):
            parser.error(f"--{name.replace('_', '-')} {value} is too small.")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.absolute().parent}.")
    if args.json and args.json.is_dir():
        parser.error(f"--json {args.json} is a folder: name a file.")
    # each once, in order
    args.categories = list(dict.fromkeys(args.categories))
    on_gpu = args.device == "cuda"
    if not on_gpu and set(args.modes) & set(MORE_MODES):
        parser.error(f"the modes {', '.join(MORE_MODES)} measure CUDA graphs: they need --device cuda.")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.new_tokens = args.new_tokens or (512 if on_gpu else 64)
    args.repeats = args.repeats or (3 if on_gpu else 1)
    args.lengths = args.lengths or (list(range(2, 17)) if on_gpu else [2, 4, 8, 16])
    return args


def main() -> int:
    args = parse()
    # advice on faster kernels, and bars of weights that are not loaded
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # latency curves are measured in this process
    os.environ["HYBRIDSPEC_CACHE"] = "off"
    import torch

    from hybridspec_hf.bench.decode_models import build
    from hybridspec_hf.bench.decode_report import routing_lines
    from hybridspec_hf.bench.decode_run import Plan, run_benchmark
    from hybridspec_hf.bench.decode_shapes import SHAPES as SIZES
    from hybridspec_hf.bench.decode_shapes import drafter_config
    from hybridspec_hf.bench.decode_traces import load_trace
    from hybridspec_hf.bench.gdn_floors import copy_bandwidth
    from hybridspec_hf.bench.machine import describe, provenance
    from hybridspec_hf.bench.rows import check_block

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs an NVIDIA GPU that torch finds. Without one: --shape tiny --device cpu.")
    plan = Plan(args.modes, args.policies, args.lengths, args.context, args.new_tokens, args.repeats)
    try:
        check_block(plan.rows(), None, drafter_config(SIZES[args.shape]).block_size)
    except ValueError as error:
        sys.exit(f"--policies: {error}")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device, samples=10) if device.type == "cuda" else None
    torch.cuda.empty_cache()
    print(describe())
    print(f"{args.shape}: {SIZES[args.shape].source}", flush=True)
    try:
        pair = build(args.shape, device, getattr(torch, args.dtype), layers=args.layers)
    except ValueError as error:
        sys.exit(str(error))
    print(*routing_lines(pair.routing), sep="\n", flush=True)

    traces = [load_trace(name) for name in args.categories]
    print(*(f"trace {t.name}: AL {t.mean_al:.2f}, {t.source}" for t in traces), sep="\n", flush=True)
    report = run_benchmark(pair, traces, plan, bandwidth, partial(print, flush=True))
    setup = {
        "shape": args.shape,
        "layers": pair.target.config.num_hidden_layers,
        "sizes": SIZES[args.shape].source,
        "dtype": args.dtype,
        "device": args.device,
        **vars(plan),
        "traces": {t.name: {"mean_al": t.mean_al, "rounds": len(t.accepted), "source": t.source} for t in traces},
        "routing": pair.routing and {
            "distinct": pair.routing.distinct,
            "layers": pair.routing.layers,
            "correlation": pair.routing.correlation,
            "strength": pair.routing.strength,
        },
    }  # fmt: skip
    text = json.dumps({**provenance(), **setup, **report.to_dict()})
    print(text, flush=True)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
