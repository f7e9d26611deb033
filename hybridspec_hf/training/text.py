"""Corpus rows → a byte-level BPE tokenizer with a chat template, and token documents."""

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybridspec_hf.training.code_tasks import LIBRARY_PROMPT, code_row, library_rows
from hybridspec_hf.training.corpus import Row, read_rows
from hybridspec_hf.training.loop import Documents
from hybridspec_hf.training.math_problems import math_row
from hybridspec_hf.training.target import PROMPT_WEIGHT

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_TOKENS = 448
# natural rows are few and generated ones endless: an epoch holds the former this often
NATURAL_COPIES = 3


def load_corpus(chat: str | Path, math: int, code: int, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Shuffled (train, held-out) rows: the chat file, the standard library, and generated math and code.

    Args:
        math, code: number of generated training rows of each, for as many copies of the rest as NATURAL_COPIES.
    """
    rng = random.Random(seed)
    rows = list(read_rows(chat)) + list(library_rows())
    for make, count in ((math_row, math), (code_row, code)):
        rows += [make(rng, "train") for _ in range(count)] + [make(rng, "test") for _ in range(max(8, count // 50))]
    rng.shuffle(rows)
    return [row for row in rows if row["split"] == "train"], [row for row in rows if row["split"] == "test"]


def natural(row: Row) -> bool:
    """Whether a row comes from the teacher or the standard library and not from our generators."""
    return row["category"] not in ("math", "coding") or row["prompt"].startswith(LIBRARY_PROMPT)


def train_tokenizer(rows: list[Row], vocab_size: int = 2048, max_chars: int = 8_000_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE over prompts and answers; single digits, ChatML specials, and a mask token no text contains."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts, chars = [], 0
    for row in rows:
        texts.append(row["prompt"] + "\n" + row["answer"])
        chars += len(texts[-1])
        if chars > max_chars:
            break
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, MASK],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def chat_prompt(prompt: str) -> str:
    """The text before the answer; equal to the chat template with `add_generation_prompt=True`."""
    return f"{START}user\n{prompt}{END}\n{START}assistant\n"


def encode_prompts(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Token ids of chat prompts."""
    return tokenizer([chat_prompt(prompt) for prompt in prompts], add_special_tokens=False)["input_ids"]


def documents(tokenizer: Any, rows: list[Row], tokens_per_batch: int = 32768, copies: int = 1) -> Documents:
    """Chat rows as documents: prompt (little loss weight), answer and end token; rows beyond MAX_TOKENS are left out.

    Args:
        copies: how often natural rows occur.
    """
    prompts = encode_prompts(tokenizer, [row["prompt"] for row in rows])
    answers = tokenizer([row["answer"] + END for row in rows], add_special_tokens=False)["input_ids"]
    ids, weights = [], []
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        if len(prompt) + len(answer) <= MAX_TOKENS:
            times = copies if natural(row) else 1
            ids += [prompt + answer] * times
            weights += [[PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer)] * times
    return Documents(ids, weights, tokens_per_batch)
