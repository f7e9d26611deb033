"""`hybridspec bench`: a pair and prompts → the paper's tables; a capture → policies by modelled cost."""

import argparse
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridspec_generation.storage import CONFIG_NAME
from hybridspec_hf import DFlashDrafter, HybridSpecConfig
from hybridspec_hf.bench.analysis import Analysis, analyse, checked_tables, to_dict
from hybridspec_hf.bench.captured import Capture, load_capture
from hybridspec_hf.bench.machine import describe, provenance
from hybridspec_hf.bench.pair_prompts import SHIPPED, SPLITS, calibrated_prompts, load_bench_prompts
from hybridspec_hf.bench.pair_report import PairReport, summarise
from hybridspec_hf.bench.pair_run import run_rows
from hybridspec_hf.bench.pair_tables import analysis_lines, bench_lines, calibrated_warning
from hybridspec_hf.bench.plots import analysis_plots, bench_plots, can_plot
from hybridspec_hf.bench.rows import STATIC_LENGTHS, SYSTEMS, ablation_names, check_block, parse_row, parse_rows
from hybridspec_hf.calibration.calibrate import model_eos
from hybridspec_hf.calibration.store import CAPTURE_NAME
from hybridspec_hf.commands.options import DTYPES, pick_device, positive
from hybridspec_hf.drafters.config import DFlashConfig
from hybridspec_hf.drafters.loading import check_folder, read_raw_config

BENCH_FILES = ("bench.md", "bench.json", "categories.png", "lengths.png")
ANALYSIS_FILES = ("analysis.md", "analysis.json", "cost.png", "reliability.png")


class Captured(NamedTuple):
    """What is analysed: rounds, and the config that was calibrated on them."""

    capture: Capture
    config: HybridSpecConfig


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
        "another GDN backend, and hybridspec and nominal with +online: rho estimated anew in each request; AR always "
        f"runs (default, the paper's Table 1: {' '.join(SYSTEMS)})",
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
        help="fixed lengths of --ablations, of which the fastest is shown "
        f"(default: {' '.join(map(str, STATIC_LENGTHS))})",
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
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: auto, the checkpoint's")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads (default: torch's; 1 for a tiny model)"
    )
    parser.set_defaults(run=run)


def row_name(text: str) -> str:
    """A row given on the command line, checked by argparse before any model is loaded."""
    try:
        parse_row(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{error} Or "ar": autoregressive.') from error
    return text


def run(args: argparse.Namespace) -> int:
    """Measure, analyse, print and save; 1 if a row differs from AR in fp32, where it must not."""
    check(args)
    captured = find_captured(args)
    prepare(args.output)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    report, analysis, exact, written = None, None, True, []
    if args.target:
        report, setup = measure(args)
        exact = report.identical or setup["dtype"] != "float32"
        warning = calibrated_warning(len(setup["calibrated_prompts"] or ()), len(setup["prompts"]))
        written += write(args.output, "bench", list(bench_lines(report, warning)), setup | report.to_dict())
    if captured is not None:
        capture, config = captured
        analysis = analyse(capture.rounds, config, context=capture.context)
        written += write(args.output, "analysis", list(analysis_lines(analysis)), to_dict(analysis))
    written += draw(args.output, report, analysis)
    # an analysis alone leaves what was measured for hours
    remove_stale(args.output, (*BENCH_FILES, *ANALYSIS_FILES) if report else ANALYSIS_FILES, written)
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
    if args.max_new_tokens < 2:
        raise ValueError(
            f"--max-new-tokens must be at least 2, got {args.max_new_tokens}: the prefill writes the first token, and "
            "decoding begins with the second."
        )
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}.")
    if args.analyze is not None and importlib.util.find_spec("sklearn") is None:
        raise ImportError('the analysis needs scikit-learn: pip install "hybridspec-hf[calibration]".')


def prepare(folder: Path) -> None:
    """Make the output folder and write into it, before hours of measuring.

    Raises:
        ValueError: if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--output {folder} cannot be written to ({error}). Choose another folder.") from error


def measure(args: argparse.Namespace) -> tuple[PairReport, dict[str, Any]]:
    """Decode every prompt with every row; the report, and what it was measured on."""
    names = [*(args.policies or []), *(ablation_names(args.static_lengths) if args.ablations else [])]
    rows = parse_rows(names or SYSTEMS)
    tables = None if args.config is None else HybridSpecConfig.from_pretrained(args.config)
    if tables is not None and tables.online_throughput:
        print("online_throughput of --config is left out: rows whose names end in +online re-estimate rho.")
    check_folder(args.target, "target")
    # before the weights: a wrong file or row shows at once
    check_block(rows, tables, DFlashConfig.from_raw(read_raw_config(args.drafter, {})).block_size)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.target)
    prompts = load_bench_prompts(args.prompts, tokenizer, split=args.split, limit=args.limit)
    calibrated = calibrated_prompts(prompts, tables)
    if calibrated:
        warnings.warn(calibrated_warning(len(calibrated), len(prompts)), stacklevel=2)
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
        "calibrated_prompts": calibrated,
        "split": args.split,
        "max_new_tokens": args.max_new_tokens,
        "repeats": args.repeats,
    }  # fmt: skip
    return summarise(recording, prompts, rows), setup


def find_captured(args: argparse.Namespace) -> Captured | None:
    """What --analyze names, else what lies beside --config, if anything does; the latter, unasked, may be unusable.

    Raises:
        FileNotFoundError, ValueError: if what --analyze names cannot be analysed.
    """
    if args.analyze is not None:
        return load_captured(args.analyze)
    if args.config is None or not (Path(args.config) / CAPTURE_NAME).is_file():
        return None
    if importlib.util.find_spec("sklearn") is None:
        print('No analysis of the captured rounds: it needs scikit-learn (pip install "hybridspec-hf[calibration]").')
        return None
    try:
        return load_captured(Path(args.config))
    except (OSError, ValueError) as error:
        print(f"No analysis of the captured rounds beside --config: {error}")
        return None


def load_captured(folder: Path) -> Captured:
    """A calibration's rounds and config, once it is clear that they belong together.

    Raises:
        FileNotFoundError: if a file is missing. ValueError: if one is damaged, or they do not belong together.
    """
    capture = load_capture(folder)
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"The calibration in {folder} is not finished. Run the same command again.")
    config = HybridSpecConfig.from_pretrained(folder)
    checked_tables(capture.rounds, config)
    capture.check_drafter(config.calibrated_for)
    return Captured(capture, config)


def write(folder: Path, name: str, lines: list[str], data: dict[str, Any]) -> list[Path]:
    """Print the Markdown, then write it and the JSON, which also says where it was made; the files."""
    text = "\n".join([f"# hybridspec {name}\n", describe(), "", *lines, ""])
    print(f"\n{text}", flush=True)
    contents = {folder / f"{name}.md": text, folder / f"{name}.json": json.dumps(provenance() | data) + "\n"}
    for path, content in contents.items():
        path.write_text(content, encoding="utf-8")
    return list(contents)


def draw(folder: Path, report: PairReport | None, analysis: Analysis | None) -> list[Path]:
    """Plots, if matplotlib is there; the files."""
    if not can_plot():
        print(f'Saved to {folder}. No plots: they need matplotlib (pip install "hybridspec-hf[plots]").')
        return []
    paths = bench_plots(report, folder) if report else []
    paths += analysis_plots(analysis, folder, report) if analysis else []
    print(f"Saved to {folder}, with {', '.join(path.name for path in paths)}.")
    return paths


def remove_stale(folder: Path, names: Sequence[str], written: Sequence[Path]) -> None:
    """Delete what an earlier run left under these names and this one did not write again."""
    for path in (folder / name for name in names):
        if path not in written:
            path.unlink(missing_ok=True)
