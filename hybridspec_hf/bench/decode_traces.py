"""Traces that ship -> the rounds that scripted acceptance plays: how many draft tokens are right, and their signals.

`assets/traces/rounds.json` holds rounds of the tiny trained pair, recorded on its held-out prompts with the whole
block verified. A category's file lists rows of it, drawn so that their mean accepted length is the paper's;
decode_record.py makes all of these files again.
"""

import json
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_generation import AcceptanceTable

FOLDER = "traces"
ROUNDS, ACCEPTANCE = "rounds.json", "acceptance.json"
RECORDED = "recorded"
# vanilla DFlash on Qwen3.5-35B-A3B, greedy: tokens emitted per round in Table 1 of the paper
PAPER_AL = {
    "coding": 6.43, "math": 5.40, "reasoning": 4.91, "rag": 6.07, "summarization": 4.96, "writing": 3.92,
    "roleplay": 3.53,
}  # fmt: skip
# the files hold integers
CONFIDENCE_UNIT, ENTROPY_UNIT = 1e-3, 1e-2


class Trace(NamedTuple):
    """N rounds of one category.

    Attributes:
        accepted: `[N]`, int64, draft tokens that are right. confidence, entropy: `[N, D]`, fp32.
        source: in words. mean_al: mean tokens emitted by a round that verifies the whole block.
    """

    name: str
    accepted: Tensor
    confidence: Tensor
    entropy: Tensor
    source: str
    mean_al: float

    @property
    def block(self) -> int:
        """W, the anchor and D draft tokens."""
        return self.confidence.shape[1] + 1

    def emitted(self, w: int) -> float:
        """Mean tokens that a round emits if it always verifies w tokens."""
        return 1 + float(self.accepted.clamp_max(w - 1).double().mean())


def read_json(name: str) -> Any:
    """A file of the folder."""
    return json.loads(resources.files("hybridspec_hf.assets").joinpath(FOLDER, name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def recorded_rounds() -> Trace:
    """The recorded rounds: up to a number of each accepted length, so not their true mix."""
    data = read_json(ROUNDS)
    return Trace(
        RECORDED,
        torch.tensor(data["accepted"]),
        torch.tensor(data["confidence"]) * CONFIDENCE_UNIT,
        torch.tensor(data["entropy"]) * ENTROPY_UNIT,
        data["source"],
        data["mean_al"],
    )


def load_trace(name: str) -> Trace:
    """The trace of a category, or "recorded": the pair's own mix.

    Raises:
        ValueError: for another name.
    """
    if name not in (*PAPER_AL, RECORDED):
        raise ValueError(f"Unknown trace {name!r}: use one of {', '.join(PAPER_AL)}, or {RECORDED}.")
    data, rounds = read_json(f"{name}.json"), recorded_rounds()
    rows = torch.tensor(data["rows"])
    return Trace(
        name,
        rounds.accepted[rows],
        rounds.confidence[rows],
        rounds.entropy[rows],
        data["source"],
        data["mean_al"],
    )


def load_acceptance() -> AcceptanceTable:
    """HybridSpec's acceptance table for these traces, fitted on rounds of other prompts with the same mix."""
    return AcceptanceTable.from_dict(read_json(ACCEPTANCE))
