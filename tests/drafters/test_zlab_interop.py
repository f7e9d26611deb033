"""Our drafter against z-lab's own package: same weights, same inputs, same hidden states and proposals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import (
    FULL,
    SLIDING,
    Raw,
    block_tokens,
    hidden_reference,
    propose_reference,
    random_drafter,
    tiny_raw,
)
from torch import Tensor, nn
from transformers import DynamicCache

from hybridspec_generation.state import Draft
from hybridspec_hf.drafters.block import BlockDrafter, DraftContext
from hybridspec_hf.drafters.dflash import DFlashDrafter

pytest.importorskip("dflash", reason="pip install --no-deps dflash==0.1.0")
from dflash import DFlashDraftModel  # noqa: E402

WINDOW = {"sliding_window": 4, "use_sliding_window": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding_causal": WINDOW | {"layer_types": [SLIDING] * 2},
    "mixed": WINDOW | {"layer_types": [SLIDING, FULL]},
    "sliding_symmetric": WINDOW | {"layer_types": [SLIDING] * 2, "is_causal": False},
    "mixed_symmetric": WINDOW | {"layer_types": [FULL, SLIDING], "is_causal": False},
    "full_causal": {"is_causal": True},
}
configs = pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)


class Pair:
    """The same drafter twice, and the embedding and head of a target that does not exist."""

    def __init__(self, ours: DFlashDrafter, theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs.eval()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)

    def propose_theirs(self, features: Tensor, anchor: Tensor, start: int, cache: Any) -> tuple[Tensor, Tensor]:
        """Hidden states `[1, W, H]` and proposal `[W-1]` of z-lab's model, its cache left at `start`."""
        block = self.embed(block_tokens(self.ours, anchor))
        size = block.shape[1]
        positions = torch.arange(start - features.shape[0], start + size)[None]
        hidden = self.theirs(
            target_hidden=features[None],
            noise_embedding=block,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        if cache is not None:
            cache.crop(start - cache.get_seq_length())
        return hidden, self.theirs.compute_logits(hidden[0, 1:], self.head).argmax(-1)


def ours_saved(raw: Raw, folder: Path) -> Pair:
    """Saved by us, loaded by z-lab's package."""
    ours = random_drafter(raw)
    ours.save_pretrained(folder)
    return Pair(ours, DFlashDraftModel.from_pretrained(folder))


def theirs_saved(raw: Raw, folder: Path) -> Pair:
    """Saved by z-lab's package, loaded by us."""
    theirs = ours_saved(raw, folder / "first").theirs
    theirs.save_pretrained(folder / "second")
    return Pair(DFlashDrafter.from_pretrained(folder / "second"), theirs)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@configs
@pytest.mark.parametrize("make", [ours_saved, theirs_saved])
def test_one_block_for_every_context_length(make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    pair = make(tiny_raw(**changes), tmp_path)
    for length in range(1, 41):
        features, anchor = torch.randn(length, 64), torch.randint(0, 60, (1,))
        theirs, proposal = pair.propose_theirs(features, anchor, length, None)
        embed, head = pair.embed.weight, pair.head.weight
        ours = hidden_reference(pair.ours, embed, features, anchor)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert torch.equal(propose_reference(pair.ours, embed, head, features, anchor), proposal)


@configs
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 19])
def test_rounds_through_both_caches(changes: dict[str, Any], prompt: int, tmp_path: Path) -> None:
    pair = ours_saved(tiny_raw(**changes), tmp_path)
    ours = BlockDrafter(pair.ours, pair.embed, pair.head, DraftContext.allocate(pair.ours, capacity=80))
    cache = DynamicCache(config=pair.theirs.config)
    cache.activate_past_recording()
    start, features = prompt, torch.randn(prompt, 64)
    draft = Draft(torch.zeros_like(ours.masks), torch.zeros(len(ours.masks)), torch.zeros(len(ours.masks)))
    for committed in (1, 6, 3, 1, 2, 6, 5, 4):
        anchor, length = torch.randint(0, 60, (1,)), torch.tensor([start])
        ours.append(features, length - len(features))
        theirs, proposal = pair.propose_theirs(features, anchor, start, cache)
        torch.testing.assert_close(ours.hidden_states(anchor, length), theirs, atol=1e-5, rtol=0)
        ours.propose(anchor, length, draft)
        assert torch.equal(draft.tokens, proposal)
        features, start = torch.randn(committed, 64), start + committed


def test_bf16_proposals_mostly_agree(tmp_path: Path) -> None:
    # z-lab rounds cos and sin to bf16, we rotate in fp32: near-ties may fall either way
    ours = random_drafter(tiny_raw(**CONFIGS["mixed"])).to(torch.bfloat16)
    ours.save_pretrained(tmp_path)
    pair = Pair(ours, DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16))
    pair.embed.bfloat16(), pair.head.bfloat16()
    same = []
    for length in range(1, 41):
        features, anchor = torch.randn(length, 64).bfloat16(), torch.randint(0, 60, (1,))
        _, proposal = pair.propose_theirs(features, anchor, length, None)
        same.append(propose_reference(ours, pair.embed.weight, pair.head.weight, features, anchor) == proposal)
    assert torch.cat(same).float().mean() > 0.95
