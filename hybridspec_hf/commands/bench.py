"""`hybridspec bench`: a pair and prompts → the paper's tables; a capture → policies by modelled cost."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridspec_hf import DFlashDrafter, HybridSpecConfig
from hybridspec_hf.bench.analysis import Analysis, analyse, load_capture, to_dict
from hybridspec_hf.bench.machine import describe, provenance
from hybridspec_hf.bench.pair_prompts import SHIPPED, SPLITS, load_bench_prompts
from hybridspec_hf.bench.pair_report import PairReport, summarise
from hybridspec_hf.bench.pair_run import run_rows
from hybridspec_hf.bench.pair_tables import analysis_lines, bench_lines
from hybridspec_hf.bench.plots import analysis_plots, bench_plots, can_plot
from hybridspec_hf.bench.rows import STATIC_LENGTHS, SYSTEMS, ablation_names, parse_row, parse_rows
from hybridspec_hf.calibration.calibrate import model_eos
from hybridspec_hf.calibration.store import CAPTURE_NAME
from hybridspec_hf.commands.pair import pick_device


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("bench", help="compare decoding methods on a pair, as the paper's tables do")
    parser.add_argument("--target", help="target model: a folder or a Hub name")
    parser.add_argument("--drafter", help="its DFlash drafter")
    parser.add_argument("--tokenizer", help="default: the target's")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=SHIPPED,
        metavar="FILE.jsonl",
        help='one JSON object a line with "prompt" or "messages", "category" and "split" (default: 56 that ship)',
    )
    parser.add_argument("--split", choices=SPLITS, default="test", help="of the prompts (default: test)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many prompts of a category")
    parser.add_argument("--config", metavar="DIR", help="what `hybridspec calibrate` wrote (default: shipped tables)")
    parser.add_argument(
        "--policies",
        nargs="+",
        type=row_name,
        metavar="ROW",
        help="ar, hybridspec, nominal, dcut, evict, dspark, full or static:N, each also with +recurrent or +replay: "
        f"another GDN backend; AR always runs (default, the paper's Table 1: {' '.join(SYSTEMS)})",
    )
    parser.add_argument(
        "--ablations", action="store_true", help="the rows of the paper's Table 3, alone or besides --policies"
    )
    parser.add_argument(
        "--static-lengths",
        nargs="+",
        type=int,
        default=STATIC_LENGTHS,
        metavar="N",
        help="fixed lengths of --ablations, of which the fastest is shown (default: 4 6 8)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=1024, metavar="N", help="of a prompt (default: 1024)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes over the prompts (default: 3)")
    parser.add_argument(
        "--analyze",
        type=Path,
        metavar="DIR",
        help="judge all policies by modelled cost on the rounds that `hybridspec calibrate` captured in DIR; needs no "
        "pair (default: the rounds in --config's folder, if there are any)",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ... (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's; 1 for a tiny model)")
    parser.set_defaults(run=run)


def row_name(text: str) -> str:
    """A row given on the command line, checked by argparse before any model is loaded."""
    try:
        parse_row(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def run(args: argparse.Namespace) -> int:
    """Measure, analyse, print and save; 1 if a row differs from AR in fp32, where it must not."""
    check(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    report, exact = None, True
    if args.target:
        report, setup = measure(args)
        exact = report.identical or setup["dtype"] != "float32"
        write(args.output, "bench", list(bench_lines(report)), {**provenance(), **setup, **report.to_dict()})
    folder = capture_folder(args)
    analysis = None if folder is None else analyse(load_capture(folder), HybridSpecConfig.from_pretrained(folder))
    if analysis is not None:
        write(args.output, "analysis", list(analysis_lines(analysis)), {**provenance(), **to_dict(analysis)})
    draw(args.output, report, analysis)
    return 0 if exact else 1


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot run, before anything is loaded.

    Raises:
        ValueError: naming the argument.
    """
    if bool(args.target) != bool(args.drafter):
        raise ValueError("--target and --drafter belong together: pass both, or --analyze DIR alone.")
    if not args.target and args.analyze is None:
        raise ValueError("Nothing to do: pass --target and --drafter to measure, or --analyze DIR.")
    for name in ("max_new_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    if args.analyze is not None and importlib.util.find_spec("sklearn") is None:
        raise ImportError('the analysis needs scikit-learn: pip install "hybridspec-hf[calibration]".')


def measure(args: argparse.Namespace) -> tuple[PairReport, dict[str, Any]]:
    """Decode every prompt with every row; the report, and what it was measured on."""
    names = [*(args.policies or []), *(ablation_names(args.static_lengths) if args.ablations else [])]
    rows = parse_rows(names or SYSTEMS)
    tables = None if args.config is None else HybridSpecConfig.from_pretrained(args.config)
    # before the weights: a wrong file shows at once
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.target)
    prompts = load_bench_prompts(args.prompts, tokenizer, split=args.split, limit=args.limit)
    device = pick_device(args.device)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype, device_map=device)
    drafter = DFlashDrafter.from_pretrained(args.drafter, dtype=args.dtype, device_map=device)
    eos = model_eos(model) or [token for token in (tokenizer.eos_token_id,) if token is not None]
    # fp32 means fp32: cuDNN convolutions default to TF32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        recording = run_rows(
            model, drafter, prompts, rows, tables, max_new_tokens=args.max_new_tokens, repeats=args.repeats, eos=eos
        )
    setup = {
        "target": args.target,
        "drafter": args.drafter,
        "config": args.config,
        "device": device,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompts": [{"name": prompt.name, "category": prompt.category, "tokens": prompt.input_ids.shape[1]}
                    for prompt in prompts],
        "split": args.split,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
    }  # fmt: skip
    return summarise(recording, prompts, rows), setup


def capture_folder(args: argparse.Namespace) -> Path | None:
    """The folder whose rounds are analysed, if any."""
    if args.analyze is not None or args.config is None or not (Path(args.config) / CAPTURE_NAME).is_file():
        return args.analyze
    if importlib.util.find_spec("sklearn") is None:
        print('No analysis of the captured rounds: it needs scikit-learn (pip install "hybridspec-hf[calibration]").')
        return None
    return Path(args.config)


def write(folder: Path, name: str, lines: list[str], data: dict[str, Any]) -> None:
    """Print the Markdown, and write it and the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# hybridspec {name}\n", describe(), "", *lines, ""])
    print(f"\n{text}")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


def draw(folder: Path, report: PairReport | None, analysis: Analysis | None) -> None:
    """Plots, if matplotlib is there."""
    if not can_plot():
        print(f'Saved to {folder}. No plots: they need matplotlib (pip install "hybridspec-hf[plots]").')
        return
    paths = bench_plots(report, folder) if report else []
    paths += analysis_plots(analysis, folder, report) if analysis else []
    print(f"Saved to {folder}, with {', '.join(path.name for path in paths)}.")
