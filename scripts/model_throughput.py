"""What two refinements of the length policy gain in modelled throughput, on recorded rounds; no model runs.

    python scripts/model_throughput.py                  # online rho on the traces that ship, by category
    python scripts/model_throughput.py --config DIR     # and what DIR's several contexts gain over a single curve

The traces' latency curve is a quadratic through measured lengths of the 35B's shape (bench/example_cost.py). The last
line of stdout is one JSON object.
"""

import argparse
import json
from statistics import fmean

from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.bench.decode_online import online_gain
from hybridspec_hf.bench.decode_traces import PAPER_AL
from hybridspec_hf.bench.markdown import table
from hybridspec_hf.calibration.gains import config_gain


def main() -> None:
    """Compute, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=256, help="of each request (default: 256)")
    parser.add_argument("--wrong", type=float, nargs="+", default=[0.5, 0.75, 1.0, 1.5, 2.0], metavar="X",
                        help="start with X times the calibrated rho")  # fmt: skip
    parser.add_argument("--config", metavar="DIR", help="what hybridspec calibrate wrote")
    args = parser.parse_args()

    result: dict[str, object] = {"new_tokens": args.new_tokens, "online": {}}
    rows = []
    for wrong in args.wrong:
        gains = {name: online_gain(name, wrong, args.new_tokens) for name in PAPER_AL}
        result["online"] |= {str(wrong): gains}  # type: ignore[operator]
        rows.append([f"{wrong:g}", *(f"{100 * (gain - 1):.2f}" for gain in (*gains.values(), fmean(gains.values())))])
    print("online rho over the one that it starts with, percent\n")
    print(*table(["rho x", *PAPER_AL, "mean"], rows), sep="\n")
    if args.config:
        result["contexts"] = config_gain(HybridSpecConfig.from_pretrained(args.config))
        print("\nthe context's own curve over a single one:", result["contexts"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
