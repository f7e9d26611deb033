"""Capture rounds -> AcceptanceTable: isotonic confidence per position, then a logistic model (Appendix A.2, E.3)."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridspec_generation import AcceptanceTable
from hybridspec_kernels import conditional_acceptance_ref
from hybridspec_kernels.selection.acceptance import acceptance_features_ref

from .capture import CaptureRounds, merge_rounds

REFERENCE_ROUNDS = 256
MIN_ROUNDS = 30
FOLDS = 5


def fit_acceptance_table(rounds: CaptureRounds, source: str) -> AcceptanceTable:
    """Fit the acceptance model on the rounds.

    The label of position i is 1[A >= i], among rounds with A >= i - 1. Needs scikit-learn.

    Args:
        rounds: a capture run with N rounds. source: what it was captured on, kept in the table.

    Raises:
        ValueError: if there are fewer than 30 rounds, or nothing to tell apart in them.
    """
    from sklearn.linear_model import LogisticRegression

    knots, values = fit_isotonic(rounds)
    table = torch.tensor(knots), torch.tensor(values)
    reached, labels = reached_positions(rounds)
    if len(labels[reached].unique()) < 2:
        what, advice = "rejected", "Was this drafter trained for this target?"
        if labels[0, 0]:
            what, advice = "accepted", "Add more varied prompts."
        raise ValueError(f"In {len(reached)} rounds every draft token was {what}: nothing to calibrate. {advice}")
    features = each_round(acceptance_features_ref, rounds, *table)
    # no regularisation to speak of: thousands of rounds, six weights; the first feature is the intercept
    model = LogisticRegression(C=1e4, fit_intercept=False, max_iter=1000)
    model.fit(features[reached].numpy(), labels[reached].numpy())
    weights = torch.tensor(model.coef_[0])

    step = max(1, len(rounds.accepted) // REFERENCE_ROUNDS)
    reference = each_round(conditional_acceptance_ref, rounds, *table, weights)[::step].cumprod(1)
    return AcceptanceTable(
        confidence_knots=_rows(knots),
        acceptance_knots=_rows(values),
        weights=tuple(round(float(w), 6) for w in weights),
        reference_rounds=_rows(reference[:REFERENCE_ROUNDS].numpy()),
        source=source,
    )


def acceptance_quality(rounds: CaptureRounds, table: AcceptanceTable) -> dict[str, float]:
    """How well raw confidence and the table predict acceptance on (held-out) rounds, over all reached positions.

    Returns:
        `auc_confidence`, `auc_table`: area under the ROC curve. `ece_confidence`, `ece_table`: expected calibration
        error over 10 equal bins. `acceptance_length`: mean tokens emitted per round.
    """
    from sklearn.metrics import roc_auc_score

    reached, labels = reached_positions(rounds)
    fitted = predict_acceptance(rounds, table)
    truth = labels[reached].double()
    quality = {"acceptance_length": float(rounds.accepted.double().mean()) + 1}
    for name, scores in (("confidence", rounds.confidence.double()[reached]), ("table", fitted[reached])):
        quality[f"auc_{name}"] = float(roc_auc_score(truth.numpy(), scores.numpy()))
        quality[f"ece_{name}"] = calibration_error(scores, truth)
    return {name: round(value, 4) for name, value in quality.items()}


def predict_acceptance(rounds: CaptureRounds, table: AcceptanceTable) -> Tensor:
    """The table's conditional acceptance probabilities of N rounds, `[N, D]`, fp64."""
    if not len(rounds.accepted):
        return torch.empty_like(rounds.confidence, dtype=torch.float64)
    parts = (table.confidence_knots, table.acceptance_knots, table.weights)
    return each_round(conditional_acceptance_ref, rounds, *(torch.tensor(part, dtype=torch.float64) for part in parts))


def predict_unseen(prompts: Sequence[CaptureRounds]) -> Tensor:
    """Acceptance of every round by a table that was fitted without its prompt, `[N, D]`, fp64, prompts in order.

    Args:
        prompts: the rounds of each prompt; a fifth of them is left out of each fit.

    Raises:
        ValueError: if the other prompts have too few rounds for a fit.
    """
    if len(prompts) < 2:
        raise ValueError("One prompt leaves no others to fit a table on. Add prompts.")
    predicted: dict[int, Tensor] = {}
    for fold, others in leave_out(prompts):
        table = fit_acceptance_table(others, "")
        predicted |= {i: predict_acceptance(prompts[i], table) for i in fold}
    return torch.cat([predicted[i] for i in range(len(prompts))])


def leave_out(prompts: Sequence[CaptureRounds]) -> Iterator[tuple[range, CaptureRounds]]:
    """A fifth of at least two prompts at a time: their indices, and the rounds of all others."""
    for first in range(min(FOLDS, len(prompts))):
        yield (
            range(first, len(prompts), FOLDS),
            merge_rounds([part for i, part in enumerate(prompts) if i % FOLDS != first]),
        )


def each_round(function: Callable[..., Tensor], rounds: CaptureRounds, *tables: Tensor) -> Tensor:
    """`function(confidence, entropy, *tables)` of every round, `[N, ...]`, in fp64."""
    batched: Any = torch.vmap(function, in_dims=(0, 0, *(None for _ in tables)))
    with warnings.catch_warnings():
        # vmap hands searchsorted a view, which is copied
        warnings.filterwarnings("ignore", message=".*non-contiguous")
        return batched(rounds.confidence.double(), rounds.entropy.double(), *tables)


def calibration_error(scores: Tensor, truth: Tensor, bins: int = 10) -> float:
    """Expected calibration error of `scores` `[n]` in [0, 1] against 0/1 `truth` `[n]`, over equal-width bins."""
    index = (scores * bins).long().clamp(0, bins - 1)
    gaps = [((scores - truth)[index == b]).sum().abs() for b in range(bins)]
    return float(torch.stack(gaps).sum() / len(scores))


def error_by_position(scores: Tensor, labels: Tensor, reached: Tensor) -> list[float | None]:
    """`calibration_error` of each of D positions; None where no round reached it.

    Args:
        scores: `[N, D]`, fp64. labels, reached: `[N, D]`, bool, what `reached_positions` returns.
    """
    columns = zip(scores.T, labels.double().T, reached.T, strict=True)
    return [calibration_error(s[there], truth[there]) if there.any() else None for s, truth, there in columns]


def reached_positions(rounds: CaptureRounds) -> tuple[Tensor, Tensor]:
    """`[N, D]` each: whether position i was reached (A >= i - 1), and whether it was accepted (A >= i)."""
    position = torch.arange(1, rounds.confidence.shape[1] + 1)
    accepted = rounds.accepted[:, None]
    return accepted >= position - 1, accepted >= position


def fit_isotonic(rounds: CaptureRounds) -> tuple[np.ndarray, np.ndarray]:
    """Isotonic regression of acceptance on confidence for each position: knots and values, `[D, N]`.

    Rows are padded to one length by repeating the last knot. A position that fewer than 30 rounds reached takes the
    table of the one before it.

    Raises:
        ValueError: if the capture has fewer than 30 rounds.
    """
    from sklearn.isotonic import IsotonicRegression

    reached, labels = reached_positions(rounds)
    if len(reached) < MIN_ROUNDS:
        raise ValueError(
            f"Calibration needs at least {MIN_ROUNDS} uncut rounds, got {len(reached)}. "
            "Add prompts, or allow more new tokens."
        )
    tables: list[tuple[np.ndarray, np.ndarray]] = []
    for i in range(rounds.confidence.shape[1]):
        rows = reached[:, i]
        if rows.sum() < MIN_ROUNDS:
            tables.append(tables[-1])
            continue
        model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        model.fit(rounds.confidence[rows, i].double().numpy(), labels[rows, i].double().numpy())
        tables.append((model.X_thresholds_, model.y_thresholds_))
    size = max(2, *(len(x) for x, _ in tables))
    pad = [[np.pad(np.asarray(part), (0, size - len(part)), mode="edge") for part in table] for table in tables]
    knots, values = np.stack([x for x, _ in pad]), np.stack([y for _, y in pad])
    return knots.astype(np.float64), values.astype(np.float64)


def _rows(table: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(value), 5) for value in row) for row in table)
