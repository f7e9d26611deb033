"""What latency is measured on: pieces of a text, and the mean over them."""

import pytest
import torch

from hybridspec_hf.calibration.latency import text_windows
from hybridspec_hf.graphs.timing import mean_times


@pytest.mark.parametrize("tokens, count, starts", [
    (100, 1, [96]), (100, 3, [96, 48, 0]), (4, 8, [0]), (6, 8, [2, 1, 0]), (7, 2, [3, 0]),
])  # fmt: skip
def test_windows_reach_from_the_end_to_the_start(tokens, count, starts):
    windows = text_windows(torch.arange(tokens), 4, count)
    assert [window.tolist() for window in windows] == [list(range(start, start + 4)) for start in starts]


def test_a_short_text_is_repeated():
    windows = text_windows(torch.tensor([1, 2, 3]), 7, 8)
    assert all(len(window) == 7 for window in windows)
    assert windows[-1].tolist() == [1, 2, 3, 1, 2, 3, 1] and len(windows) == 3


def test_times_are_means_over_the_inputs():
    held = [0.0]
    inputs = [lambda x=x: held.__setitem__(0, x) for x in (1.0, 2.0, 6.0)]
    assert mean_times(lambda: [held[0], 2 * held[0]], inputs) == [3.0, 6.0]
    assert mean_times(lambda: [held[0]], ()) == [6.0]
