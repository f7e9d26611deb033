"""A pair of random weights, traces, modes -> timed requests whose tokens were checked: the decoding benchmark."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import HybridSpecConfig

from ..calibration.latency import synchronize
from ..engine import release
from .decode_contexts import compare_contexts
from .decode_floors import DecodeFloors
from .decode_launches import compare_launches, compare_split
from .decode_models import RandomPair, follow
from .decode_parts import time_parts
from .decode_report import (
    ALL,
    DecodeBenchmark,
    Row,
    Stock,
    context_lines,
    head_lines,
    launch_line,
    mean_lines,
    part_lines,
    row_line,
    split_line,
    table_lines,
)
from .decode_script import Script, scripted
from .decode_traces import Trace, load_acceptance
from .rows import ABLATIONS, AUTOREGRESSIVE, SYSTEMS, BenchRow, parse_row, parse_rows

# plain generate is a hundred times slower: a difference of two short lengths is enough
STOCK_TOKENS = (4, 12)
SPLIT_ROUNDS = 3000
STOCK: dict[str, dict[str, Any]] = {
    "default": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "experts batched_mm": {"experts": "batched_mm"},
}


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        modes: of "stock", "ar", "dflash", "static" and "hybridspec"; "systems" and "ablations" (the rows of the
            paper's Tables 1 and 3, see `rows`); on a GPU, with the first trace "launches" (ways to launch a round) and
            "split" (with and without the boundary behind Layer 0's router), and "contexts" (latency behind prompts of
            several lengths).
        policies: more rows, by their names in `rows`.
        lengths: of "static" and of the parts.
        context, new_tokens: tokens of the prompt and of an answer. repeats: timed requests of each kind.
    """

    modes: Sequence[str]
    policies: Sequence[str]
    lengths: Sequence[int]
    context: int
    new_tokens: int
    repeats: int

    def rows(self) -> list[BenchRow]:
        """What drafts; rows of one GDN backend behind each other, because each has its own buffers and graphs.

        Raises:
            ValueError: for a policy that is unknown, or does not draft.
        """
        for name in self.policies:
            if not parse_row(name).drafts:
                raise ValueError(f'{name!r} does not draft. Leave it out: the mode "ar" times AR.')
        names = ["full"] if "dflash" in self.modes else []
        names += [f"static:{w}" for w in self.lengths if w > 1] if "static" in self.modes else []
        names += ["hybridspec"] if "hybridspec" in self.modes else []
        names += SYSTEMS if "systems" in self.modes else ()
        names += ABLATIONS if "ablations" in self.modes else ()
        rows = [row for row in parse_rows([*names, *self.policies]) if row.drafts]
        return sorted(rows, key=lambda row: (not row.is_default, row.gdn_backend))


def run_benchmark(
    pair: RandomPair, traces: Sequence[Trace], plan: Plan, bandwidth: float | None, say: Callable[[str], None] = print
) -> DecodeBenchmark:
    """Time everything of the plan.

    Args:
        pair: of `decode_models.build`. traces: one per category. bandwidth: bytes per second for the floors.
        say: gets every line for people once its numbers are there: a run that is stopped has said what it knew.
    """
    prompt, block = pair.text(plan.context), pair.drafter.config.block_size
    floors = DecodeFloors(pair.target, pair.drafter, pair.routing.distinct if pair.routing else {}, plan.context)
    report = DecodeBenchmark(floors.to_dict(sorted({1, *plan.lengths, block}), bandwidth))
    drafting = plan.rows()
    requests = plan.repeats * (len(drafting) * len(traces) + ("ar" in plan.modes))
    # one script for all traces, because graphs are captured with it
    script = Script(traces[0], pair.successor, block - 1)
    requests += len(STOCK) * ("stock" in plan.modes)
    with tqdm(total=requests, desc="decode", unit="request", disable=None) as bar:
        if "stock" in plan.modes:
            report.stock += [time_stock(pair, prompt, name, bar) for name in STOCK]
        say_all(say, head_lines(report))
        wanted: list[tuple[BenchRow, Trace | None, bool]] = [
            (row, trace, i > 0) for row in drafting for i, trace in enumerate(traces)
        ]
        if "ar" in plan.modes:
            wanted.insert(0, (BenchRow(AUTOREGRESSIVE), None, False))
        for row, trace, warm in wanted:
            report.rows.append(time_requests(pair, prompt, row, trace, plan, bar, script, warm=warm))
            say(row_line(report, report.rows[-1]))
    say_all(say, mean_lines(report))
    say_all(say, table_lines(report))
    report.parts += time_parts(pair, prompt, plan.lengths, floors, bandwidth)
    say_all(say, part_lines(report.parts))
    release(pair.target)
    script.load(traces[0])
    if "split" in plan.modes:
        report.split = compare_split(pair, prompt, script, SPLIT_ROUNDS)
        say(split_line(report.split))
    for way in compare_launches(pair, prompt, script, plan.new_tokens) if "launches" in plan.modes else ():
        report.launches.append(way)
        say(launch_line(way))
    if "contexts" in plan.modes:
        release(pair.target)
        script.drafter = None
        report.contexts += compare_contexts(pair, script, say)
        say_all(say, context_lines(report.contexts))
    return report


def say_all(say: Callable[[str], None], lines: Iterable[str]) -> None:
    """Say one line after the other."""
    for line in lines:
        say(line)


def request(prompt: Tensor, new_tokens: int) -> dict[str, Any]:
    """What all modes give to generate; with a mask, because the text may hold the padding token."""
    mask = torch.ones_like(prompt)
    return {"input_ids": prompt, "attention_mask": mask, "do_sample": False, "max_new_tokens": new_tokens}


def options(pair: RandomPair, row: BenchRow) -> dict[str, Any]:
    """Keyword arguments of generate for a row; the tables fit the traces and the random routers."""
    wanted: dict[str, Any] = {"generation_mode": "hybridspec", "return_dict_in_generate": True}
    if not row.drafts:
        return wanted
    tables, acceptance = HybridSpecConfig(), load_acceptance()
    if acceptance.block == pair.drafter.config.block_size:
        tables = HybridSpecConfig(acceptance=acceptance, experts=pair.routing.table if pair.routing else None)
    return wanted | {"assistant_model": pair.drafter, "hybridspec_config": row.config(tables)}


def time_requests(
    pair: RandomPair,
    prompt: Tensor,
    row: BenchRow,
    trace: Trace | None,
    plan: Plan,
    bar: Any,
    script: Script,
    *,
    warm: bool,
) -> Row:
    """Decode the prompt as one row does `repeats` times, by a script that starts anew each time.

    Args:
        trace: None for AR, which drafts nothing.
        warm: the row ran before; otherwise a request goes ahead that does not count.
    """
    wanted = follow(pair.successor, prompt[0, -1:], plan.new_tokens + 1)[1:]
    bar.set_postfix_str(f"{trace.name if trace else ''} {row.name}")
    runs, right = [], True
    scope: AbstractContextManager[None] = nullcontext()
    if trace is not None:
        scope = scripted(pair.target, pair.drafter, script)
    with scope:
        for _ in range(plan.repeats + (not warm)):
            if trace is not None:
                script.load(trace)
            out = pair.target.generate(**request(prompt, plan.new_tokens), **options(pair, row))
            right = right and torch.equal(out.sequences[0, plan.context :], wanted)
            runs.append(out.report)
    bar.update(plan.repeats)
    timed = runs[-plan.repeats :]
    last, speeds = timed[-1], [r.tokens_per_second for r in timed]
    return Row(
        policy=row.name,
        category=trace.name if trace else ALL,
        tokens_per_second=median(speeds),
        spread=max(speeds) - min(speeds) if len(speeds) > 1 else None,
        round_ms=median(1e3 * r.decode_seconds / r.rounds for r in timed),
        rounds=last.rounds,
        acceptance_length=median(r.acceptance_length for r in timed),
        mean_verify_length=median(r.mean_verify_length for r in timed),
        known_text=right,
        notes=sorted({note for r in runs for note in r.notes}),
    )


def time_stock(pair: RandomPair, prompt: Tensor, name: str, bar: Any) -> Stock:
    """Milliseconds a token of transformers' own generate, as the difference of two lengths."""
    bar.set_postfix_str(f"stock {name}")
    few, many = STOCK_TOKENS
    settings = dict(STOCK[name])
    before = pair.target.config._experts_implementation
    if experts := settings.pop("experts", None):
        pair.target.set_experts_implementation(experts)

    def generate(new_tokens: int) -> float:
        synchronize()
        started = time.perf_counter()
        out = pair.target.generate(**request(prompt, new_tokens), **settings)
        synchronize()
        if not torch.equal(out[0, prompt.shape[1] :], follow(pair.successor, prompt[0, -1:], new_tokens + 1)[1:]):
            raise RuntimeError(f"Stock generate ({name}) left the text that its weights were made for.")
        return time.perf_counter() - started

    generate(few)
    times = {tokens: median(generate(tokens) for _ in range(2)) for tokens in STOCK_TOKENS}
    if experts:
        pair.target.set_experts_implementation(before)
    bar.update()
    return Stock(name, 1e3 * (times[many] - times[few]) / (many - few))
