"""Corpus, generators, tokenizer and documents of the tiny pair."""

import ast
import random
import re
from pathlib import Path

import pytest

from hybridspec_hf.training import corpus, slots, text
from hybridspec_hf.training.code_tasks import code_row, library_rows
from hybridspec_hf.training.loop import WIDTHS, Documents
from hybridspec_hf.training.math_problems import math_row
from hybridspec_hf.training.teacher import sample_prompt, summary_prompts, tidy


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    rows = [make(rng, "train") for make in (math_row, code_row) for _ in range(300)]
    return text.train_tokenizer(rows, vocab_size=512)


def test_tokenizer_round_trip_and_template(tokenizer):
    prompt = "Write code:\n    x = [12, 345]  # é"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == prompt
    templated = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    assert templated["input_ids"] == text.encode_prompts(tokenizer, [prompt])[0]
    assert tokenizer.eos_token == text.END and tokenizer.pad_token == text.PAD
    assert len(tokenizer) == 512 and tokenizer.convert_tokens_to_ids(text.MASK) == 3
    # single digits
    assert len(tokenizer("345", add_special_tokens=False)["input_ids"]) == 3


def test_documents_weight_answers_and_end_with_eos(tokenizer):
    row = {"category": "qa", "split": "train", "prompt": "Why?", "answer": "Because."}
    documents = text.documents(tokenizer, [row], tokens_per_batch=128, copies=3)
    assert len(documents) == 3
    ids, weights = next(documents.batches("cpu", seed=0))
    assert ids.shape == (2, 64)
    prompt = text.encode_prompts(tokenizer, ["Why?"])[0]
    answer = tokenizer("Because." + text.END, add_special_tokens=False)["input_ids"]
    assert ids[0].tolist() == prompt + answer + [0] * (64 - len(prompt + answer))
    expected = [text.PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer) + [0.0] * (64 - len(prompt + answer))
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-3)


def test_batches_cover_every_document_in_fixed_shapes():
    documents = Documents([[i] * (5 + 11 * i) for i in range(30)], [[1.0] * (5 + 11 * i) for i in range(30)], 512)
    seen = set()
    for ids, weights in documents.batches("cpu", seed=None):
        assert ids.shape[1] in WIDTHS and len(ids) == max(1, 512 // ids.shape[1])
        seen |= {(int(row.max()), int(weight.sum())) for row, weight in zip(ids, weights, strict=True)}
    assert seen == {(i, 5 + 11 * i) for i in range(30)}


def test_composed_code_parses_and_math_is_right():
    rng = random.Random(3)
    for _ in range(200):
        ast.parse(code_row(rng, "train")["answer"].split("```python\n")[1].removesuffix("```"))
        for left, right in re.findall(r"([\d +*/-]+) = (\d+)(?=[ .,])", math_row(rng, "test")["answer"]):
            if re.fullmatch(r"\d+( [+*/-] \d+)+", left.strip()):
                assert eval(left) == int(right), left


@pytest.mark.parametrize("items", [slots.NAMES, slots.TOPICS, slots.EVENTS, slots.CHAT_LINES], ids=len)
def test_splits_are_disjoint_and_complete(items):
    train, test = slots.split_items(items, "train"), slots.split_items(items, "test")
    assert test and not set(train) & set(test) and set(train) | set(test) == set(items)


def test_prompts_are_filled_and_differ_by_split():
    rng = random.Random(1)
    prompts = {split: {sample_prompt(rng, split)["prompt"] for _ in range(300)} for split in ("train", "test")}
    slot = re.compile(r"\b(PERSONA|LINE|HERO|EVENT|OBJECT|PLACE|ANIMAL|TRAIT|NAME|TOPIC|ACTIVITY)\b")
    assert not any(slot.search(prompt) for group in prompts.values() for prompt in group)
    assert not prompts["train"] & prompts["test"]


def test_library_rows_hold_out_by_name():
    rows = list(library_rows(limit=120))
    assert len(rows) == 120 and {row["split"] for row in rows} == {"train", "test"}
    ast.parse(rows[0]["answer"].removeprefix("```python\n").removesuffix("\n```"))


def test_pack_drops_doubles_copies_and_repetition(tmp_path: Path):
    good = {"category": "qa", "split": "train", "prompt": "p", "answer": "Once upona time a fox met nine new friends."}
    loop = good | {"answer": "it is a very good day and " * 9}
    copied = good | {"prompt": "Summarize: all of this", "answer": "all of this"}
    corpus.write_rows(tmp_path / "a.xz", [good, good, loop, copied])
    whole = (tmp_path / "a.xz").read_bytes()
    (tmp_path / "cut.xz").write_bytes(whole[: len(whole) // 2])
    packed = corpus.pack([tmp_path / "a.xz", tmp_path / "cut.xz"], max_chars=10**6)
    assert packed == [good | {"answer": "Once upon a time a fox met nine new friends."}]


def test_tidy_cuts_at_a_sentence():
    long = " ".join(f"{slots.NAMES[i]} put {slots.OBJECTS[i]} in {slots.PLACES[i]}." for i in range(12))
    assert tidy(long + " And then the", ended=False) == long
    assert tidy("Too short.", ended=True) is None
    assert tidy(long + " caf\u00e9", ended=True) is None


def test_summaries_keep_their_split():
    rows = [{"category": "qa", "split": s, "prompt": "x", "answer": f"{s} word " * 25} for s in ("train", "test")]
    for row in summary_prompts(random.Random(0), rows, 2):
        assert row["split"] in row["prompt"]
