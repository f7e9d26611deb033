"""A trained target and prompts → its own greedy answers, which of them loop, and a short training against loops."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import Any

import torch
from torch import Tensor

from hybridspec_hf.training.code_tasks import LIBRARY_PROMPT, code_row
from hybridspec_hf.training.corpus import Row
from hybridspec_hf.training.loop import Budget, Documents, TrainLog, adamw, autocast, run_steps
from hybridspec_hf.training.math_problems import math_row
from hybridspec_hf.training.target import target_loss
from hybridspec_hf.training.teacher import sample_prompt
from hybridspec_hf.training.text import encode_prompts

NGRAM = 6
SHORT = 50


@dataclass
class Answered:
    """Prompts with the target's answers, as token ids; `answers` include the end token if it was reached."""

    prompts: list[list[int]]
    answers: list[list[int]]

    def __len__(self) -> int:
        return len(self.prompts)


@torch.no_grad()
def greedy_answers(
    model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int = 256, batch: int = 1024
) -> Answered:
    """Greedy answers of many prompts through transformers' generate, left-padded, longest prompts first."""
    model.eval()
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        width = len(prompts[rows[0]])
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in rows], device=model.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=(ids != pad).long(),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=pad,
        )
        for i, tokens in zip(rows, out[:, width:].tolist(), strict=True):
            answers[i] = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return Answered(prompts, answers)


def loops(answers: list[list[int]], longest_period: int = 40, least: int = 24) -> list[bool]:
    """Which answers repeat themselves: one block again and again, or mostly 4-grams that were there before."""
    lengths = torch.tensor([len(answer) for answer in answers])
    width = int(lengths.max())
    # [N, T]; padding differs from itself everywhere, so that it never repeats
    x = torch.tensor([answer + list(range(-1, len(answer) - width - 1, -1)) for answer in answers])
    found = torch.zeros(len(x), dtype=torch.bool)
    for period in range(1, min(longest_period, width // 3) + 1):
        count = (x[:, period:] == x[:, :-period]).long().cumsum(1)
        restart = torch.where(x[:, period:] == x[:, :-period], 0, count).cummax(1).values
        found |= (count - restart).amax(1) >= max(2 * period, least)
    if width < 4:
        return found.tolist()
    grams = sum(x[:, i : width - 3 + i].clamp_min(0) << (15 * i) for i in range(4))
    total = (lengths - 3).clamp_min(0)
    inside = torch.arange(width - 3) < total[:, None]
    grams = torch.where(inside, grams, -1 - torch.arange(width - 3)).sort(1).values
    distinct = ((grams[:, 1:] != grams[:, :-1]) & (grams[:, 1:] >= 0)).sum(1) + (grams[:, 0] >= 0)
    return (found | ((total >= 20) & (distinct < 0.5 * total))).tolist()


def repeated(tokens: list[int]) -> list[float]:
    """1 for each token that completes an n-gram already in the answer, else 0."""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for i in range(len(tokens)):
        gram = tuple(tokens[max(0, i - NGRAM + 1) : i + 1])
        flags.append(float(len(gram) == NGRAM and gram in seen))
        seen.add(gram)
    return flags


def prompt_stream(seed: int, rows: list[Row], split: str = "train") -> Iterator[Row]:
    """Endless prompts of all categories in about equal parts; summarization and library prompts come from rows."""
    rng = random.Random(seed)
    fixed = {
        "summarization": [row for row in rows if row["category"] == "summarization"],
        "library": [row for row in rows if row["prompt"].startswith(LIBRARY_PROMPT)],
    }
    makers: list[Callable[[], Row]] = [lambda: sample_prompt(rng, split)] * 3
    makers += [lambda: math_row(rng, split), lambda: code_row(rng, split)]
    makers += [lambda kept=kept: rng.choice(kept) for kept in fixed.values() if kept]  # type: ignore[misc]
    while True:
        yield rng.choice(makers)()


def collect(
    model: Any, tokenizer: Any, prompts: Iterator[Row], minutes: float, batch: int, max_new_tokens: int = 256
) -> Answered:
    """Greedy answers to a stream of prompts until the time is used up; at least one batch."""
    start, found = time.monotonic(), Answered([], [])
    while True:
        ids = encode_prompts(tokenizer, [next(prompts)["prompt"] for _ in range(batch)])
        done = greedy_answers(model, tokenizer, [x for x in ids if len(x) < 400], max_new_tokens, batch)
        found = Answered(found.prompts + done.prompts, found.answers + done.answers)
        if time.monotonic() - start > 60 * minutes:
            return found


def unlearn_loops(
    model: Any, answered: Answered, train: Documents, eos: int, budget: Budget, log: TrainLog, lr: float = 3e-4
) -> None:
    """Train on the target's own good answers, which end and do not loop, in turn with text as before; at the same
    time tokens that it repeated in its looping answers become less probable."""
    looping = loops(answered.answers)
    rows = list(zip(answered.prompts, answered.answers, looping, strict=True))
    size = train.tokens_per_batch
    # short answers end most easily: learning from them would make all answers shorter
    good = [(p, a) for p, a, loop in rows if a[-1] == eos and len(a) >= SHORT and not loop]
    bad = [(p, a) for p, a, loop in rows if loop]
    kept = Documents([p + a for p, a in good], [[0.0] * len(p) + [1.0] * len(a) for p, a in good], size)
    flagged = Documents([p + a for p, a in bad], [[0.0] * len(p) + repeated(a) for p, a in bad], size // 2)
    sources = [train.batches(model.device, seed=1)] * 2
    sources += [kept.batches(model.device, seed=2)] if good else []
    unlikely = flagged.batches(model.device, seed=3) if bad else repeat(None)
    batches = ((next(source), next(unlikely)) for source in cycle(sources))
    optimizer = adamw(model, lr, weight_decay=0.0)

    def step(batch: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast(model.device):
            loss, ce = target_loss(model, *batch[0])
        loss.backward()
        if batch[1] is not None:
            with autocast(model.device):
                (0.3 * unlikelihood(model, *batch[1])).backward()
        return ce

    run_steps(model, optimizer, step, batches, budget, log, lambda: 0.0)


def unlikelihood(model: Any, ids: Tensor, flags: Tensor) -> Tensor:
    """Mean of `-log(1 - p)` over flagged tokens; `ids`, `flags`: `[B, T]`."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    p = logits.softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(torch.log1p(-p.clamp_max(0.999)) * flags[:, 1:]).sum() / flags.sum().clamp_min(1)
