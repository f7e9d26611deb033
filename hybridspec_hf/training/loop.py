"""What both trainings share: documents in length buckets, a time budget, a log, checkpoints and the step loop."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on CUDA; plain fp32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


@dataclass
class Documents:
    """Token documents with a loss weight per token, served as right-padded batches of similar length.

    Args:
        ids, weights: per document, equally long.
        tokens_per_batch: rows x padded length of a batch, at most.
        multiple: lengths are padded up to a multiple of this.
    """

    ids: list[list[int]]
    weights: list[list[float]]
    tokens_per_batch: int = 32768
    multiple: int = 32
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    def batches(self, device: torch.device, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled epochs of (ids `[B, T]`, weights `[B, T]`), or one epoch in fixed order if seed is None."""
        rng = random.Random(seed)
        while True:
            for rows in self._epoch(rng if seed is not None else random.Random(0)):
                yield self._batch(rows, device)
            if seed is None:
                return

    def _epoch(self, rng: random.Random) -> list[list[int]]:
        buckets: dict[int, list[int]] = {}
        for i in rng.sample(range(len(self.ids)), len(self.ids)):
            buckets.setdefault(-(-len(self.ids[i]) // self.multiple) * self.multiple, []).append(i)
        batches = []
        for length, rows in buckets.items():
            size = max(1, self.tokens_per_batch // length)
            batches += [rows[i : i + size] for i in range(0, len(rows), size)]
        # a batch much smaller than the others would be a noisy step
        full = [b for b in batches if 2 * len(b) * len(self.ids[b[0]]) >= self.tokens_per_batch] or batches
        rng.shuffle(full)
        return full

    def _batch(self, rows: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        if not self._tensors:
            self._tensors = self._flatten()
        starts, lengths = self._tensors["starts"][rows], self._tensors["lengths"][rows]
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        column = torch.arange(width)
        inside = column < lengths[:, None]
        index = (starts[:, None] + column).clamp_max(len(self._tensors["ids"]) - 1)
        ids = self._tensors["ids"][index].long() * inside
        weights = self._tensors["weights"][index].float() * inside
        if device.type == "cuda":
            ids, weights = ids.pin_memory(), weights.pin_memory()
        return ids.to(device, non_blocking=True), weights.to(device, non_blocking=True)

    def _flatten(self) -> dict[str, Tensor]:
        lengths = torch.tensor([len(x) for x in self.ids])
        return {
            "ids": torch.tensor([i for x in self.ids for i in x], dtype=torch.int32),
            "weights": torch.tensor([w for x in self.weights for w in x], dtype=torch.float16),
            "lengths": lengths,
            "starts": lengths.cumsum(0) - lengths,
        }


@dataclass
class Budget:
    """A span of training time, so that a run ends on time on any machine; steps are an upper limit for tests."""

    minutes: float
    max_steps: int | None = None
    spent: float = 0.0
    steps: int = 0
    _start: float | None = None

    def fraction(self) -> float:
        """Share of the budget used, by time or by steps, whichever is larger; the clock starts at the first call."""
        if self._start is None:
            self._start = time.monotonic() - self.spent
        self.spent = time.monotonic() - self._start
        by_steps = self.steps / self.max_steps if self.max_steps else 0.0
        return max(self.spent / (60 * self.minutes) if self.minutes > 0 else 1.0, by_steps)

    def done(self) -> bool:
        """Whether nothing is left."""
        return self.fraction() >= 1.0


def learning_rate(peak: float, fraction: float, warmup: float = 0.03) -> float:
    """Linear warm-up, then cosine down to 2 % of the peak, over the fraction of the budget."""
    if fraction < warmup:
        return peak * max(fraction / warmup, 0.02)
    cosine = 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * min(1.0, (fraction - warmup) / (1 - warmup))))))
    return peak * (0.02 + 0.98 * cosine)


@dataclass
class TrainLog:
    """Lines of one phase: to stdout and to `log.jsonl` in the run's folder, at intervals."""

    folder: Path
    phase: str
    every: float = 20.0
    _last: float = 0.0

    def due(self) -> bool:
        """True once per interval."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True

    def write(self, **values: Any) -> None:
        """Append one line."""
        line = json.dumps({"phase": self.phase, **values})
        print(line, flush=True)
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(line + "\n")


def run_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[Any], Tensor],
    batches: Iterator[Any],
    budget: Budget,
    log: TrainLog,
    validate: Callable[[], float],
) -> None:
    """Optimise until the budget is spent; resumes from, and keeps, `<phase>.pt` in the log's folder.

    Args:
        step: forward and backward of one batch; returns the value to log, on the device.
    """
    path = log.folder / f"{log.phase}.pt"
    if path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        budget.spent, budget.steps = saved["spent"], saved["steps"]
    peaks = [group["lr"] for group in optimizer.param_groups]
    if path.exists():
        peaks = saved["peaks"]
    last_saved, loss = time.monotonic(), torch.zeros(())
    while not budget.done():
        fraction = budget.fraction()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = learning_rate(peak, fraction)
        loss = step(next(batches))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        budget.steps += 1
        if log.due():
            log.write(step=budget.steps, seconds=round(budget.spent, 1), loss=loss.item(), validation=validate())
        if time.monotonic() - last_saved > 60:
            _save(path, model, optimizer, budget, peaks)
            last_saved = time.monotonic()
    _save(path, model, optimizer, budget, peaks)
    log.write(step=budget.steps, seconds=round(budget.spent, 1), loss=loss.item(), validation=validate())


def _save(path: Path, model: nn.Module, optimizer: Any, budget: Budget, peaks: list[float]) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "peaks": peaks}
    torch.save(state | {"spent": budget.spent, "steps": budget.steps}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
