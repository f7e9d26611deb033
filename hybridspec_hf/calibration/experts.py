"""Capture rounds -> ExpertTable: average new (layer, expert) pairs by position and new Layer-0 experts (A.2, D.1)."""

import numpy as np

from hybridspec_generation import ExpertTable

from .capture import CaptureRounds

MIN_TOKENS = 30


def fit_expert_table(rounds: CaptureRounds, *, top_k: int, num_moe_layers: int, source: str) -> ExpertTable:
    """nbar_all(w0) and nbar_all(w0 | n) of the token at position w0 + 1, from full-length rounds.

    A cell with fewer than 30 tokens takes the value of a linear fit in n at its position.

    Args:
        rounds: a capture run. top_k, num_moe_layers: of the target.
    """
    layer0, later = rounds.new_layer0.numpy(), rounds.new_later.numpy()
    block = layer0.shape[1]
    # index w0: the token at position w0 + 1 is row w0 of the target input; w0 = W has no such token
    mean = [float(layer0[:, w].mean() + later[:, w].mean()) for w in range(block)]
    given = [
        [n + value for n, value in enumerate(later_given(layer0[:, w], later[:, w], top_k))] for w in range(block)
    ]
    return ExpertTable(
        mean_new_pairs=tuple(round(value, 4) for value in [*mean, mean[-1]]),
        mean_new_pairs_given=tuple(tuple(round(value, 4) for value in row) for row in [*given, given[-1]]),
        num_moe_layers=num_moe_layers,
        top_k=top_k,
        source=source,
    )


def later_given(layer0: np.ndarray, later: np.ndarray, top_k: int) -> list[float]:
    """Mean later-layer pairs for n = 0..topk new Layer-0 experts, with the 30-token rule."""
    line = np.polyfit(layer0, later, 1) if len(set(layer0.tolist())) > 1 else np.array([0.0, later.mean()])
    cells = [later[layer0 == n] for n in range(top_k + 1)]
    return [
        float(cell.mean()) if len(cell) >= MIN_TOKENS else max(0.0, float(np.polyval(line, n)))
        for n, cell in enumerate(cells)
    ]


def routing_correlation(rounds: CaptureRounds) -> float:
    """Correlation of new Layer-0 with new later-layer experts over draft tokens, position means removed (D.1)."""
    pairs = [x[:, 1:].numpy().astype(np.float64) for x in (rounds.new_layer0, rounds.new_later)]
    centred = [(x - x.mean(0)).ravel() for x in pairs]
    return float(np.corrcoef(*centred)[0, 1])
