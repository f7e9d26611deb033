"""The visibility rule against loops that spell it out, for decoding blocks and for training."""

from typing import cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridspec_hf.drafters.visibility import VisibilityRule, block_mask, training_mask

RULES = {
    "full": VisibilityRule(causal=False),
    "causal": VisibilityRule(causal=True),
    "sliding_causal": VisibilityRule(causal=True, window=5),
    "sliding_symmetric": VisibilityRule(causal=False, window=5),
    "window_of_one": VisibilityRule(causal=True, window=1),
    "window_of_block": VisibilityRule(causal=True, window=5, window_from_block=True),
    "window_of_block_symmetric": VisibilityRule(causal=False, window=5, window_from_block=True),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def sees(rule: VisibilityRule, query: int, key: int, anchor: int) -> bool:
    """One query and one key that is in the context or in the query's own block."""
    if rule.causal and key > query:
        return False
    if rule.window is None:
        return True
    if rule.window_from_block:
        return key >= anchor or anchor - key <= rule.window
    return query - key < rule.window and (rule.causal or key - query < rule.window)


@rules
@pytest.mark.parametrize("length", [1, 4, 5, 6, 13])
def test_block_mask_is_the_rule(rule: VisibilityRule, length: int) -> None:
    rows, capacity = 6, 24
    mask = block_mask(rule, length + torch.arange(rows), torch.arange(capacity), torch.tensor([length]))
    assert mask.shape == (1, 1, rows, capacity) and mask.dtype == torch.bool
    for row in range(rows):
        for slot in range(capacity):
            expected = slot < length + rows and sees(rule, length + row, slot, length)
            assert bool(mask[0, 0, row, slot]) == expected, (row, slot)


@rules
def test_block_mask_shows_a_query_itself_and_no_later_slot(rule: VisibilityRule) -> None:
    mask = block_mask(rule, 7 + torch.arange(4), torch.arange(32), torch.tensor([7]))[0, 0]
    assert mask[:, 7:11].diagonal().all()
    assert not mask[:, 11:].any()


def test_window_counts_the_current_token() -> None:
    mask = block_mask(RULES["sliding_causal"], 9 + torch.arange(3), torch.arange(16), torch.tensor([9]))
    assert mask[0, 0].sum(-1).tolist() == [5, 5, 5]


@rules
def test_block_mask_reads_no_value_on_the_host(rule: VisibilityRule) -> None:
    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    length, steps, slots = torch.tensor([7]), torch.arange(4), torch.arange(32)
    with NoReads():
        block_mask(rule, length + steps, slots, length)


@rules
def test_training_mask_is_the_block_mask_of_every_block(rule: VisibilityRule) -> None:
    anchors, length, size = torch.tensor([[1, 6, 6, 11], [2, 3, 9, 12]]), 12, 4
    mask = training_mask(rule, anchors, length, size)
    assert mask.shape == (2, 1, 16, 28)
    for row, row_anchors in enumerate(cast(list[list[int]], anchors.tolist())):
        for block, anchor in enumerate(row_anchors):
            queries = mask[row, 0, block * size : (block + 1) * size]
            decoding = block_mask(
                rule, anchor + torch.arange(size), torch.arange(anchor + size), torch.tensor([anchor])
            )[0, 0]
            expected = torch.zeros(size, 28, dtype=torch.bool)
            expected[:, :anchor] = decoding[:, :anchor]
            own = length + block * size
            expected[:, own : own + size] = decoding[:, anchor:]
            torch.testing.assert_close(queries, expected)


def test_training_mask_hides_padding() -> None:
    valid = torch.tensor([[False, False, True, True, True]])
    mask = training_mask(RULES["full"], torch.tensor([[4]]), 5, 3, valid)
    assert mask[0, 0, 0].tolist() == [False, False, True, True, False, True, True, True]
