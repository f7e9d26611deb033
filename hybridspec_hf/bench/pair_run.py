"""A pair, prompts, rows -> every prompt decoded by every row, next to each other, and checked against AR's tokens."""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation import DecodeReport, HybridSpecConfig

from ..calibration.cost_files import without_cache_folder
from ..drafters.dflash import DFlashDrafter
from ..engine import get_engine
from ..evals.exactness import Divergence, divergence
from .pair_prompts import BenchPrompt
from .rows import BenchRow


@dataclass(frozen=True)
class Request:
    """One prompt decoded once.

    Attributes:
        row: name of the row. prompt: its index. repetition: from 0.
        tokens: emitted in rounds, so without the prefill's. rounds, seconds: of decoding.
        lengths: rounds by their verification length.
        identical: whether the tokens are those of the first repetition's AR.
    """

    row: str
    prompt: int
    repetition: int
    tokens: int
    rounds: int
    seconds: float
    lengths: dict[int, int]
    identical: bool


@dataclass
class Recording:
    """All requests of a run.

    Attributes:
        divergences: by row, the first difference of each prompt from AR's tokens, with the margin it happened at.
        ran: by row, how it ran: GDN verification and launches.
        notes: by row, what the reports note. captures: requests that had to capture graphs while they were timed.
    """

    requests: list[Request] = field(default_factory=list)
    divergences: dict[str, list[Divergence]] = field(default_factory=dict)
    ran: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    captures: int = 0


def run_rows(
    model: Any,
    drafter: DFlashDrafter,
    prompts: Sequence[BenchPrompt],
    rows: Sequence[BenchRow],
    tables: HybridSpecConfig | None,
    *,
    max_new_tokens: int,
    repeats: int,
    eos: list[int] | None = None,
) -> Recording:
    """Decode greedily; all rows of a prompt run one after the other, in an order that turns from prompt to prompt.

    Args:
        rows: what `parse_rows` returned, AR first. tables: calibrated tables for rows that choose lengths.
        repeats: passes over all prompts. eos: ids that end an answer; None takes those of the generation config.

    Raises:
        ValueError: if a row does not fit the pair.
    """
    recording = Recording()
    drafters = one_drafter_per_backend(drafter, rows)
    calls = [Call(model, drafters, row, tables, max_new_tokens, eos) for row in rows]
    # curves that rows measure are of the same prompt then, whatever ran before
    get_engine(model, drafter).costs.clear()
    with without_cache_folder(), tqdm(total=len(rows) * len(prompts) * repeats, desc="bench", unit="request") as bar:
        bar.set_postfix_str("warming up")
        for call in calls:
            warm_up(call, prompts, recording)
        expected: list[Tensor] = []
        for repetition in range(repeats):
            for index, prompt in enumerate(prompts):
                bar.set_postfix_str(prompt.category)
                outputs = in_turn(calls, index + repetition, prompt)
                bar.update(len(calls))
                # AR is the first row, whenever it ran
                if repetition == 0:
                    expected.append(outputs[0].sequences[0])
                for call, output in zip(calls, outputs, strict=True):
                    same = torch.equal(output.sequences[0], expected[index])
                    if not same:
                        keep_difference(recording, call, index, prompt, expected[index], output.sequences[0])
                    add(recording, call.row, index, repetition, output.report, same)
    return recording


class Call:
    """generate with everything but the prompt."""

    def __init__(
        self, model: Any, drafters: dict[str, DFlashDrafter], row: BenchRow, tables: HybridSpecConfig | None,
        max_new_tokens: int, eos: list[int] | None,
    ) -> None:  # fmt: skip
        self.model, self.row = model, row
        self.options: dict[str, Any] = {
            "generation_mode": "hybridspec", "return_dict_in_generate": True, "do_sample": False,
            "max_new_tokens": max_new_tokens,
        }  # fmt: skip
        if eos is not None:
            self.options["eos_token_id"] = eos
        if row.drafts:
            self.options |= {"assistant_model": drafters[row.gdn_backend], "hybridspec_config": row.config(tables)}
        elif (config := row.config(tables)) != HybridSpecConfig(policy=config.policy):
            self.options["hybridspec_config"] = config

    def __call__(self, prompt: BenchPrompt) -> Any:
        """The output of generate, with `sequences` `[1, T + new]` and `report`."""
        ids = prompt.input_ids.to(self.model.device)
        return self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **self.options)


def one_drafter_per_backend(drafter: DFlashDrafter, rows: Sequence[BenchRow]) -> dict[str, DFlashDrafter]:
    """The drafter and copies of it that share its weights, by GDN backend.

    An engine keeps the buffers and graphs of one backend; each copy has an engine of its own, so that rows that
    alternate do not build them again for every request.
    """
    backends = dict.fromkeys(row.gdn_backend for row in rows if row.drafts)
    return {backend: shared_copy(drafter) if i else drafter for i, backend in enumerate(backends)}


def shared_copy(drafter: DFlashDrafter) -> DFlashDrafter:
    """Another module over the same parameters."""
    parameters = {id(p): p for p in (*drafter.parameters(), *drafter.buffers())}
    return copy.deepcopy(drafter, parameters)


def warm_up(call: Call, prompts: Sequence[BenchPrompt], recording: Recording) -> None:
    """First-use work is no decode time: tables behind a prompt of middle length, buffers for the longest prompt."""
    by_length = sorted(prompts, key=lambda prompt: prompt.input_ids.shape[1])
    note(recording, call.row, call(by_length[len(prompts) // 2]).report.notes)
    report = call(by_length[-1]).report
    recording.ran[call.row.name] = f"{report.gdn}; {report.launches}"


def in_turn(calls: Sequence[Call], turn: int, prompt: BenchPrompt) -> list[Any]:
    """One output per call, in the calls' order; which one runs first depends on the turn."""
    order = [(turn + i) % len(calls) for i in range(len(calls))]
    outputs = {i: calls[i](prompt) for i in order}
    return [outputs[i] for i in range(len(calls))]


def keep_difference(
    recording: Recording, call: Call, index: int, prompt: BenchPrompt, want: Tensor, got: Tensor
) -> None:
    """Where a row leaves AR's tokens on a prompt, the first time that it does."""
    mine = recording.divergences.setdefault(call.row.name, [])
    if all(known.prompt != index for known in mine):
        mine.append(divergence(index, call.model, call.model, prompt.input_ids.shape[1], want, got))


def add(
    recording: Recording, row: BenchRow, prompt: int, repetition: int, report: DecodeReport, identical: bool
) -> None:
    """Keep what one request did."""
    lengths = dict(sorted(Counter(report.verify_lengths).items()))
    recording.requests.append(
        Request(row.name, prompt, repetition, sum(report.emitted), report.rounds, report.decode_seconds, lengths,
                identical)
    )  # fmt: skip
    recording.captures += report.capture_seconds > 0
    # which latency curve is read depends on the request; the warm-up has told where it comes from
    note(recording, row, [text for text in report.notes if not text.startswith("cost:")])


def note(recording: Recording, row: BenchRow, notes: list[str]) -> None:
    """Keep each note of a row once."""
    mine = recording.notes.setdefault(row.name, [])
    mine += [text for text in notes if text not in mine]
