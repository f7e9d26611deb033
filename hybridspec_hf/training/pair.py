"""The chat corpus → the shipped pair: tokenizer, target, its own answers, drafter, held-out numbers."""

import json
import random
import time
from dataclasses import dataclass
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
from hybridspec_hf.training.target import target_config, train_target, use_dense_experts
from hybridspec_hf.training.teacher import sample_prompt


@dataclass(kw_only=True)
class PairRun:
    """What one training run reads, writes and may spend; `max_steps` and small counts make a quick test of it."""

    out: Path
    chat: Path
    device: torch.device
    target_minutes: float = 5.4
    unlearn_minutes: float = 0.8
    answer_minutes: float = 1.3
    drafter_minutes: float = 4.4
    max_steps: int | None = None
    math_rows: int = 40000
    code_rows: int = 30000
    tokens_per_batch: int = 32768
    answer_batch: int = 2048
    per_category: int = 40
    max_new_tokens: int = 256


def held_out_prompts(rows: list[Row], per_category: int, seed: int = 11) -> list[dict[str, str]]:
    """Prompts of six categories whose slots no training prompt uses: {"id", "category", "prompt"}."""
    rng = random.Random(seed)
    library = [row["prompt"] for row in rows if row["prompt"].startswith(LIBRARY_PROMPT)]
    summaries = sorted({row["prompt"] for row in rows if row["category"] == "summarization"})
    chosen: dict[str, list[str]] = {
        "coding": rng.sample(sorted(library), min(len(library), per_category // 4)),
        "summarization": rng.sample(summaries, min(len(summaries), per_category)),
        "math": [],
        "qa": [],
        "roleplay": [],
        "writing": [],
    }
    full = {name for name, prompts in chosen.items() if name == "summarization" or len(prompts) >= per_category}
    while len(full) < len(chosen):
        for row in (sample_prompt(rng, "test"), math_row(rng, "test"), code_row(rng, "test")):
            prompts = chosen[row["category"]]
            if len(prompts) < per_category and row["prompt"] not in prompts:
                prompts.append(row["prompt"])
        full |= {name for name, prompts in chosen.items() if len(prompts) >= per_category}
    return [
        {"id": f"{name}-{i:03d}", "category": name, "prompt": prompt}
        for name, prompts in sorted(chosen.items())
        for i, prompt in enumerate(prompts)
    ]


def round_to_bf16(model: torch.nn.Module) -> None:
    """Keep fp32 arithmetic but the values that a bf16 file will hold."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())


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
        stream = prompt_stream(5, train)
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


def _drafter(run: PairRun, target: Any, tokenizer: Any, train: list[Row]) -> dict[str, float]:
    path = run.out / "answers.json"
    if not path.exists():
        stream = prompt_stream(9, train)
        found = collect(target, tokenizer, stream, run.answer_minutes, run.answer_batch, run.max_new_tokens)
        path.write_text(json.dumps([found.prompts, found.answers]))
    answered = Answered(*json.loads(path.read_text()))
    # loops are easy to draft: learning from them would teach nothing that is wanted
    looping = loops(answered.answers)
    kept = [i for i, a in enumerate(answered.answers) if len(a) > 4 and not looping[i]]
    if len(kept) < len(answered) // 4:
        # a target that hardly learned anything; the phases still run, for quick checks
        kept = list(range(len(answered)))
    answered = Answered([answered.prompts[i] for i in kept], [answered.answers[i] for i in kept])
    drafter = DFlashDrafter(drafter_config(target.config, tokenizer.convert_tokens_to_ids(text.MASK))).to(run.device)
    initialise(drafter, target.lm_head.weight)
    data = DraftData(target, answered, drafter.config.target_layer_ids or [], run.tokens_per_batch)
    budget, log = Budget(run.drafter_minutes, run.max_steps), TrainLog(run.out, "drafter")
    tokens = sum(map(len, answered.answers))
    log.write(
        answers=len(answered),
        tokens=tokens,
        loops=sum(looping) / len(looping),
        parameters=sum(p.numel() for p in drafter.parameters()),
    )
    al = train_drafter(target, drafter, data, budget, log)
    drafter.bfloat16().save_pretrained(run.out / "drafter")
    return {
        "drafter_steps": budget.steps,
        "answers": len(answered),
        "answer_loops": sum(looping) / len(looping),
        "teacher_forced_al": al,
    }


def train_pair(run: PairRun) -> dict[str, Any]:
    """Run every phase that has not left its folder yet, and return the numbers on held-out prompts."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    run.out.mkdir(parents=True, exist_ok=True)
    start, clock = time.monotonic(), TrainLog(run.out, "pair")
    train, held_out = text.load_corpus(run.chat, run.math_rows, run.code_rows)
    prompts = held_out_prompts(held_out, run.per_category)
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
    if not (run.out / "drafter" / "model.safetensors").exists():
        numbers |= _drafter(run, target, tokenizer, train)
        clock.write(seconds=time.monotonic() - start, done="drafter", **numbers)
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
