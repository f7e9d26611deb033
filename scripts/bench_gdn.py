"""Time the GDN verifiers on a GPU beside their floors (the paper's Table 5), or only check them against float64.

    python scripts/bench_gdn.py --check --device cpu       # references, and kernels in Triton's interpreter
    python scripts/bench_gdn.py --check --device cuda      # kernels
    python scripts/bench_gdn.py --json bench_gdn.json      # all rows; SGLang's, ReplaySSM's and fla's where installed
    python scripts/bench_gdn.py --lengths 2 16 --scopes core --backends block recurrent
    python scripts/bench_gdn.py --producer                 # projections and convolution, joint and separate

Prints a table; the last line of stdout is one JSON object. Exits with 1 when a bound of the check breaks.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

BACKENDS = ["block", "recurrent", "replay", "sglang", "replayssm", "fla"]
DTYPES = ["float32", "float16", "bfloat16"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare our backends with float64, no timing")
    parser.add_argument("--producer", action="store_true", help="time the layers' front end instead of the verifiers")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        choices=range(1, 17),
        metavar="W",
        help="default: 1 2 3 4 8 12 16; all that --check covers",
    )
    parser.add_argument("--scopes", nargs="+", default=["core", "conv"], choices=["core", "conv"])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="default: all; with --check the first three")
    parser.add_argument("--shape", default="35b", choices=["35b", "122b", "tiny"], help="of the timed layers")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="of --check; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes of --check on a GPU, to compile in parallel")
    parser.add_argument("--json", type=Path, help="also write the JSON object here")
    args = parser.parse_args()
    if args.check and args.producer:
        parser.error("--check and --producer are two different runs: give one of them.")
    if args.jobs < 1:
        parser.error(f"--jobs needs a positive number, got {args.jobs}.")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.absolute().parent}.")
    return args


def main() -> int:
    args = parse()
    on_cpu = args.check and args.device == "cpu"
    # Triton decides at import whether it interprets its kernels, which is the only way to run them on a CPU
    os.environ["TRITON_INTERPRET"] = "1" if on_cpu else "0"
    import torch

    from hybridspec_hf.bench.gdn_backends import COMPETITORS, OURS
    from hybridspec_hf.bench.gdn_inputs import SHAPES, shape_of
    from hybridspec_hf.bench.gdn_plan import run_check
    from hybridspec_hf.bench.gdn_producer import HIDDEN_SIZES, time_producers
    from hybridspec_hf.bench.gdn_tables import check_lines, producer_lines, timing_lines
    from hybridspec_hf.bench.gdn_timing import LENGTHS, time_backends
    from hybridspec_hf.bench.machine import describe, provenance

    if not on_cpu and (args.device == "cpu" or not torch.cuda.is_available()):
        sys.exit("This needs --device cuda and an NVIDIA GPU that torch finds; else only --check --device cpu runs.")
    torch.set_num_threads(1)
    report: Any
    lengths, timing = args.lengths or LENGTHS, {"samples": args.samples, "replays": args.replays}
    unknown = sorted(set(args.backends or ()) - set(OURS if args.check else COMPETITORS))
    if unknown:
        sys.exit(f"--backends {' '.join(unknown)}: choose from {' '.join(OURS if args.check else COMPETITORS)}.")
    if args.check:
        backends = args.backends or OURS
        only = {"lengths": args.lengths, "dtypes": args.dtypes}
        report = run_check(args.device, backends, args.scopes, **only, jobs=args.jobs)
        lines = check_lines(report)
    else:
        shape = shape_of(SHAPES[args.shape], torch.bfloat16, torch.device(args.device))
        if args.producer:
            report = time_producers(shape, HIDDEN_SIZES[args.shape], lengths, **timing)
            lines = producer_lines(report)
        else:
            names = args.backends or tuple(COMPETITORS)
            report = time_backends(shape, names, lengths=lengths, scopes=args.scopes, **timing)
            lines = timing_lines(report)
    print(describe(), *lines, sep="\n")
    text = json.dumps({**provenance(), **report.to_dict()})
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(not report.passed)


if __name__ == "__main__":
    sys.exit(main())
