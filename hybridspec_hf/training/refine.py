"""A trained drafter → one layer deeper, and trained where its rounds really start: behind its own mistakes."""

import copy
from typing import Any

import torch
from torch import nn

from hybridspec_hf.drafters.dflash import DFlashDrafter
from hybridspec_hf.training.dflash import DraftData, initialise
from hybridspec_hf.training.evaluate import simulate_rounds
from hybridspec_hf.training.onpolicy import Answered

# how much likelier a round's start is to be drawn as an anchor than another token of the answer
START_WEIGHT = 3.0


def deepen(drafter: DFlashDrafter, lm_head: torch.Tensor) -> DFlashDrafter:
    """A copy with one more layer, which adds nothing until it is trained: its output projections are zero.

    Args:
        lm_head: `[V, H]`, the target's, for the initialisation.
    """
    config = copy.deepcopy(drafter.config)
    config.num_hidden_layers = len(drafter.layers) + 1
    config.layer_types = [*(config.layer_types or []), "full_attention"]
    deeper = DFlashDrafter(config).to(drafter.device)
    initialise(deeper, lm_head)
    deeper.load_state_dict(drafter.state_dict(), strict=False)
    last: Any = deeper.layers[-1]
    nn.init.zeros_(last.self_attn.o_proj.weight)
    nn.init.zeros_(last.mlp.down_proj.weight)
    return deeper


def favour_round_starts(target: Any, drafter: DFlashDrafter, data: DraftData, batch: int = 2048) -> float:
    """Decode the answers with the drafter as it is, and make the starts of its rounds likelier anchors.

    Returns:
        The acceptance length on these answers.
    """
    tokens = rounds = 0
    for at in range(0, len(data.rows), batch):
        rows = data.rows[at : at + batch]
        found = simulate_rounds(target, drafter, Answered([p for p, _ in rows], [a for _, a in rows]))
        flat = data.starts[at + found.prompt.to(data.starts.device)] + found.start.to(data.starts.device)
        data.anchor_weight[flat] = START_WEIGHT
        tokens, rounds = tokens + int(found.emitted.sum()), rounds + len(found.emitted)
    return tokens / max(rounds, 1)
