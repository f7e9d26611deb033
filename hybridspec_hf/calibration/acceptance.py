"""Capture rounds -> AcceptanceTable: isotonic confidence per position, then a logistic model (Appendix A.2, E.3)."""

import numpy as np
import torch

from hybridspec_generation import AcceptanceTable
from hybridspec_kernels import conditional_acceptance_ref
from hybridspec_kernels.selection.acceptance import acceptance_features_ref

from .capture import CaptureRounds

REFERENCE_ROUNDS = 256
MIN_ROUNDS = 30


def fit_acceptance_table(rounds: CaptureRounds, source: str) -> AcceptanceTable:
    """Fit the acceptance model on the rounds.

    The label of position i is 1[A >= i], among rounds with A >= i - 1. Needs scikit-learn.

    Args:
        rounds: a capture run with N rounds. source: what it was captured on, kept in the table.
    """
    from sklearn.linear_model import LogisticRegression

    knots, values = fit_isotonic(rounds)
    table = torch.tensor(knots), torch.tensor(values)
    reached, labels = reached_positions(rounds)
    features = torch.stack([
        acceptance_features_ref(c.double(), h.double(), *table)
        for c, h in zip(rounds.confidence, rounds.entropy, strict=True)
    ])  # fmt: skip
    # no regularisation to speak of: thousands of rounds, six weights; the first feature is the intercept
    model = LogisticRegression(C=1e4, fit_intercept=False, max_iter=1000)
    model.fit(features[reached].numpy(), labels[reached].numpy())
    weights = torch.tensor(model.coef_[0])

    step = max(1, len(rounds.accepted) // REFERENCE_ROUNDS)
    reference = torch.stack([
        conditional_acceptance_ref(c.double(), h.double(), *table, weights).cumprod(0)
        for c, h in zip(rounds.confidence[::step], rounds.entropy[::step], strict=True)
    ])  # fmt: skip
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
    parts = (
        torch.tensor(part, dtype=torch.float64)
        for part in (table.confidence_knots, table.acceptance_knots, table.weights)
    )
    knots, values, weights = parts
    fitted = torch.stack([
        conditional_acceptance_ref(c.double(), h.double(), knots, values, weights)
        for c, h in zip(rounds.confidence, rounds.entropy, strict=True)
    ])  # fmt: skip
    truth = labels[reached].double()
    quality = {"acceptance_length": float(rounds.accepted.double().mean()) + 1}
    for name, scores in (("confidence", rounds.confidence.double()[reached]), ("table", fitted[reached])):
        quality[f"auc_{name}"] = float(roc_auc_score(truth.numpy(), scores.numpy()))
        quality[f"ece_{name}"] = calibration_error(scores, truth)
    return {name: round(value, 4) for name, value in quality.items()}


def calibration_error(scores: torch.Tensor, truth: torch.Tensor, bins: int = 10) -> float:
    """Expected calibration error of `scores` `[n]` in [0, 1] against 0/1 `truth` `[n]`, over equal-width bins."""
    index = (scores * bins).long().clamp(0, bins - 1)
    gaps = [((scores - truth)[index == b]).sum().abs() for b in range(bins)]
    return float(torch.stack(gaps).sum() / len(scores))


def reached_positions(rounds: CaptureRounds) -> tuple[torch.Tensor, torch.Tensor]:
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
        raise ValueError(f"Calibration needs at least {MIN_ROUNDS} uncut rounds, got {len(reached)}. Add prompts.")
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
