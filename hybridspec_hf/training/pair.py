"""The chat corpus → the shipped pair: tokenizer, target, its own answers, drafter, held-out numbers."""

import json
import random
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5MoeForCausalLM

from hybridspec_hf.drafters.dflash import DFlashDrafter
from hybridspec_hf.training import text
from hybridspec_hf.training.code_tasks import LIBRARY_PROMPT, code_row
from hybridspec_hf.training.corpus import Row
from hybridspec_hf.training.dflash import DraftData, drafter_config, initialise, train_drafter
from hybridspec_hf.training.evaluate import evaluate_pair
from hybridspec_hf.training.loop import Budget, TrainLog
from hybridspec_hf.training.math_problems import math_row
from hybridspec_hf.training.onpolicy import Answered, collect, loops, prompt_stream, unlearn_loops
from hybridspec_hf.training.refine import deepen, favour_round_starts
from hybridspec_hf.training.target import target_config, train_target, use_dense_experts
from hybridspec_hf.training.teacher import sample_prompt

# prompts that the target answers: to unlearn loops, then to train the drafter, and again to refine it
STREAM_SEEDS = (5, 9, 13)


@dataclass(kw_only=True)
class PairRun:
    """What one training run reads, writes and may spend; `max_steps` and small counts make a quick test of it."""

    out: Path
    chat: Path
    device: torch.device
    target_minutes: float = 5.2
    unlearn_minutes: float = 0.7
    answer_minutes: float = 1.0
    drafter_minutes: float = 4.5
    refine_minutes: float = 4.0
    max_steps: int | None = None
    math_rows: int = 40000
    code_rows: int = 30000
    tokens_per_batch: int = 32768
    answer_batch: int = 2048
    per_category: int = 40
    max_new_tokens: int = 256


def seen_prompts(train: list[Row], on_policy: int = 80000) -> set[str]:
    """Every prompt of the corpus and of the streams that the target answers for its own training and the drafter's."""
    streams = (islice(prompt_stream(seed, train), on_policy) for seed in STREAM_SEEDS)
    return {row["prompt"] for rows in (train, *streams) for row in rows}


def held_out_prompts(rows: list[Row], seen: set[str], per_category: int, seed: int = 11) -> list[dict[str, str]]:
    """Prompts of seven categories that no phase of the training saw: {"id", "category", "prompt"}.

    Questions, roles, stories, texts and library functions are about things that no training prompt names. Math and
    generated code combine known things anew: a byte-level model of this size cannot spell a name it never read.

    Args:
        rows: the corpus's held-out rows. seen: prompts of the training.
    """
    rng = random.Random(seed)
    library = [row["prompt"] for row in rows if row["prompt"].startswith(LIBRARY_PROMPT)]
    summaries = sorted({row["prompt"] for row in rows if row["category"] == "summarization"})
    chosen: dict[str, list[str]] = {
        "library": rng.sample(sorted(library), min(len(library), per_category)),
        "summarization": rng.sample(summaries, min(len(summaries), per_category)),
        "coding": [],
        "math": [],
        "qa": [],
        "roleplay": [],
        "writing": [],
    }
    full = {"library", "summarization"}
    while len(full) < len(chosen):
        for row in (sample_prompt(rng, "test"), math_row(rng, "train"), code_row(rng, "train")):
            prompts = chosen[row["category"]]
            if len(prompts) < per_category and row["prompt"] not in seen and row["prompt"] not in prompts:
                prompts.append(row["prompt"])
        full |= {name for name, prompts in chosen.items() if len(prompts) >= per_category}
    return [
        {"id": f"{name}-{i:03d}", "category": name, "prompt": prompt}
        for name, prompts in sorted(chosen.items())
        for i, prompt in enumerate(prompts)
    ]


def _target(run: PairRun, tokenizer: Any, train: list[Row], held_out: list[Row]) -> dict[str, float]:
    model = Qwen3_5MoeForCausalLM(
        target_config(
            len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    ).to(run.device)
    documents = text.documents(tokenizer, train, run.tokens_per_batch, text.NATURAL_COPIES)
    checks = text.documents(tokenizer, held_out, run.tokens_per_batch)
    budget, log = Budget(run.target_minutes, run.max_steps), TrainLog(run.out, "target")
    tokens = documents.tokens
    log.write(parameters=sum(p.numel() for p in model.parameters()), documents=len(documents), tokens=tokens)
    ce = train_target(model, documents, checks, budget, log)
    numbers = {"target_ce": ce, "target_steps": budget.steps, "corpus_tokens": tokens}
    if run.unlearn_minutes > 0:
        stream = prompt_stream(STREAM_SEEDS[0], train)
        answered = collect(model, tokenizer, stream, run.unlearn_minutes / 4, run.answer_batch, run.max_new_tokens)
        numbers["loops_before_unlearning"] = sum(loops(answered.answers)) / len(answered)
        log.write(loops_on_training_prompts=numbers["loops_before_unlearning"])
        model.train()
        budget = Budget(run.unlearn_minutes, run.max_steps)
        unlearn_loops(model, answered, documents, tokenizer.eos_token_id, budget, TrainLog(run.out, "unlearn"))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.bfloat16().save_pretrained(run.out / "target")
    tokenizer.save_pretrained(run.out / "target")
    return numbers


def _answers(run: PairRun, target: Any, tokenizer: Any, train: list[Row], seed: int) -> tuple[Answered, float]:
    """The target's answers without its loops, which are easy to draft and teach nothing; and the share of loops."""
    path = run.out / f"answers_{seed}.json"
    if not path.exists():
        stream = prompt_stream(seed, train)
        found = collect(target, tokenizer, stream, run.answer_minutes, run.answer_batch, run.max_new_tokens)
        path.write_text(json.dumps([found.prompts, found.answers]))
    answered = Answered(*json.loads(path.read_text()))
    looping = loops(answered.answers)
    kept = [i for i, a in enumerate(answered.answers) if len(a) > 4 and not looping[i]]
    if len(kept) < len(answered) // 4:
        # a target that hardly learned anything; the phases still run, for quick checks
        kept = list(range(len(answered)))
    answered = Answered([answered.prompts[i] for i in kept], [answered.answers[i] for i in kept])
    return answered, sum(looping) / len(looping)


def _drafter(run: PairRun, target: Any, tokenizer: Any, train: list[Row]) -> dict[str, float]:
    """A first drafter, from random anchors of the target's answers."""
    answered, looping = _answers(run, target, tokenizer, train, STREAM_SEEDS[1])
    drafter = DFlashDrafter(drafter_config(target.config, tokenizer.convert_tokens_to_ids(text.MASK))).to(run.device)
    initialise(drafter, target.lm_head.weight)
    data = DraftData(target, answered, drafter.config.target_layer_ids or [], run.tokens_per_batch)
    budget, log = Budget(run.drafter_minutes, run.max_steps), TrainLog(run.out, "drafter")
    log.write(answers=len(answered), tokens=len(data.ids), parameters=sum(p.numel() for p in drafter.parameters()))
    al = train_drafter(target, drafter, data, budget, log)
    drafter.save_pretrained(run.out / "first_drafter")
    return {"drafter_steps": budget.steps, "answers": len(answered), "answer_loops": looping, "teacher_forced_al": al}


def _refine(run: PairRun, target: Any, tokenizer: Any, train: list[Row]) -> dict[str, float]:
    """The drafter that ships: one layer deeper, trained on fresh answers and mostly where its own rounds start."""
    answered, _ = _answers(run, target, tokenizer, train, STREAM_SEEDS[2])
    first = DFlashDrafter.from_pretrained(run.out / "first_drafter", dtype=torch.float32).to(run.device)
    data = DraftData(target, answered, first.config.target_layer_ids or [], run.tokens_per_batch)
    al = favour_round_starts(target, first, data)
    drafter = deepen(first, target.lm_head.weight)
    budget, log = Budget(run.refine_minutes, run.max_steps), TrainLog(run.out, "refine")
    log.write(answers=len(answered), tokens=len(data.ids), al_before=al)
    # most rounds end early: the first positions count more than in the first phase
    train_drafter(target, drafter, data, budget, log, lr=1.5e-3, decay=4.0)
    drafter.bfloat16().save_pretrained(run.out / "drafter")
    return {"refine_steps": budget.steps, "refine_answers": len(answered), "al_before_refining": al}


def train_pair(run: PairRun) -> dict[str, Any]:
    """Run every phase that has not left its folder yet, and return the numbers on held-out prompts."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    run.out.mkdir(parents=True, exist_ok=True)
    start, clock = time.monotonic(), TrainLog(run.out, "pair")
    train, held_out = text.load_corpus(run.chat, run.math_rows, run.code_rows)
    prompts = held_out_prompts(held_out, seen_prompts(train), run.per_category)
    (run.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    numbers: dict[str, Any] = {}
    if not (run.out / "target" / "model.safetensors").exists():
        tokenizer = text.train_tokenizer(train)
        clock.write(seconds=time.monotonic() - start, rows=len(train), vocabulary=len(tokenizer))
        numbers |= _target(run, tokenizer, train, held_out)
        clock.write(seconds=time.monotonic() - start, done="target", **numbers)
    tokenizer = AutoTokenizer.from_pretrained(run.out / "target")
    # the saved weights, in fp32 arithmetic: what the drafter learns from is what ships
    target = AutoModelForCausalLM.from_pretrained(run.out / "target", dtype=torch.float32).to(run.device).eval()
    target.requires_grad_(False)
    use_dense_experts(target)
    for name, phase in (("first_drafter", _drafter), ("drafter", _refine)):
        if not (run.out / name / "model.safetensors").exists():
            numbers |= phase(run, target, tokenizer, train)
            clock.write(seconds=time.monotonic() - start, done=name, **numbers)
    drafter = DFlashDrafter.from_pretrained(run.out / "drafter", dtype=torch.float32).to(run.device).eval()
    torch.set_float32_matmul_precision("highest")
    measured, answered = evaluate_pair(target, drafter, tokenizer, prompts, run.max_new_tokens)
    samples = tokenizer.batch_decode(answered.answers, skip_special_tokens=False)
    with open(run.out / "samples.jsonl", "w") as file:
        for row, sample in zip(prompts, samples, strict=True):
            file.write(json.dumps(row | {"answer": sample}) + "\n")
    numbers |= measured | {"seconds": round(time.monotonic() - start, 1)}
    (run.out / "report.json").write_text(json.dumps(numbers, indent=1))
    return numbers
