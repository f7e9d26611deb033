"""A JSONL file of prompts or conversations -> token ids, every mistake with its line number."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

CALIBRATION_SPLIT = "calibration"


class Prompts(NamedTuple):
    """Token ids `[1, T]` of each prompt, and how many lines another `split` left out."""

    input_ids: list[Tensor]
    left_out: int


def prompt_hash(input_ids: Tensor) -> int:
    """48 bits that tell the token ids `[1, T]` of one prompt from another's."""
    text = json.dumps(input_ids.flatten().tolist())
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def load_prompts(path: Path, tokenizer: Any) -> Prompts:
    """Tokenise a file with one JSON object a line, which holds `prompt` (text) or `messages` (a conversation).

    The tokenizer's chat template is applied if it has one. A line whose `split` is not "calibration" is left out:
    prompts that lengths are fitted on should not be those that they are judged by.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a line cannot be used, with its number; or if none is left.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no prompt file {path}.")
    prompts, left_out = [], 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line)
            if row.get("split", CALIBRATION_SPLIT) == CALIBRATION_SPLIT:
                prompts.append(encode_row(row, tokenizer))
            else:
                left_out += 1
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(
            f"{path} has no prompts"
            + (f' whose split is "{CALIBRATION_SPLIT}" ({left_out} lines have another).' if left_out else ".")
        )
    return Prompts(prompts, left_out)


def parse_row(line: bytes) -> dict[str, Any]:
    """One line of the file, checked.

    Raises:
        ValueError: if it is not one JSON object with a text `prompt` or with `messages`.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a JSON object ({error}).") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError('needs a JSON object with either "prompt" or "messages".')
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError('"prompt" must be a text that is not empty.')
        return row
    messages = row["messages"]
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise ValueError('"messages" must be a list of objects with "role" and "content".')
    return row


def is_message(value: Any) -> bool:
    """Whether a value is one turn of a conversation."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def encode_row(row: dict[str, Any], tokenizer: Any) -> Tensor:
    """Token ids `[1, T]`, int64, of a checked line.

    Raises:
        ValueError: for a conversation that the tokenizer's template refuses, or without a template.
    """
    if tokenizer.chat_template is None:
        if "messages" in row:
            raise ValueError('the tokenizer has no chat template for "messages": give a "prompt".')
        ids: Tensor = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        return ids
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    except Exception as error:
        # whatever a template raises
        raise ValueError(f"the chat template refuses it ({error}).") from error
    ids = encoded["input_ids"]
    return ids
