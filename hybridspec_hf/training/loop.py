"""What both trainings share: documents in length buckets, a time budget, a log, checkpoints and the step loop."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# padded lengths: few, so that few graphs are captured, and multiples of the chunk of the gated delta rule
WIDTHS = (64, 128, 192, 256, 320, 384, 448, 704)


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on CUDA, plain fp32 elsewhere; no weight cache, which a CUDA graph could not keep."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


class Documents:
    """Token documents with a loss weight per token, served as right-padded batches of similar length.

    Args:
        ids, weights: per document, equally long.
        tokens_per_batch: rows x padded length of a batch, at most.
    """

    def __init__(self, ids: list[list[int]], weights: list[list[float]], tokens_per_batch: int = 32768) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.lengths = torch.tensor([len(x) for x in ids])
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.ids = torch.tensor([i for x in ids for i in x], dtype=torch.int16)
        self.weights = torch.tensor([w for x in weights for w in x], dtype=torch.float16)
        self.buckets: dict[int, list[int]] = {}
        for i, length in enumerate(self.lengths.tolist()):
            self.buckets.setdefault(next(w for w in WIDTHS if length <= w), []).append(i)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.ids)

    def batches(self, device: torch.device, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless shuffled epochs of (ids `[B, T]`, weights `[B, T]`), or one epoch in fixed order if seed is None.

        Every batch of a bucket has the same shape; the last one is filled up with other documents of the bucket.
        """
        rng = random.Random(seed)
        columns = [tensor.to(device) for tensor in (self.starts, self.lengths, self.ids, self.weights)]
        while True:
            for width, rows in self._epoch(rng if seed is not None else random.Random(0)):
                yield self._batch(torch.tensor(rows, device=device), width, columns)
            if seed is None:
                return

    def _epoch(self, rng: random.Random) -> list[tuple[int, list[int]]]:
        batches = []
        for width, kept in self.buckets.items():
            size = max(1, self.tokens_per_batch // width)
            rows = rng.sample(kept, len(kept))
            rows += rng.choices(kept, k=-len(rows) % size)
            batches += [(width, rows[i : i + size]) for i in range(0, len(rows), size)]
        rng.shuffle(batches)
        return batches

    def _batch(self, rows: Tensor, width: int, columns: list[Tensor]) -> tuple[Tensor, Tensor]:
        starts, lengths, ids, weights = columns
        column = torch.arange(width, device=rows.device)
        inside = column < lengths[rows][:, None]
        index = (starts[rows][:, None] + column).clamp_max(len(ids) - 1)
        return ids[index].long() * inside, weights[index].float() * inside


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
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - warmup) / (1 - warmup))))
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
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps({"phase": self.phase, **rounded})
        print(line, flush=True)
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(line + "\n")


def adamw(model: nn.Module, lr: float, weight_decay: float, vector_lr: float | None = None) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, and if wanted another learning rate for vectors (norms, biases)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    vectors = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": vector_lr or lr}
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay}, vectors]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=parameters[0].device.type == "cuda")


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
        step: leaves a batch's gradients in the parameters and returns the value to log, on the device.
    """
    path = log.folder / f"{log.phase}.pt"
    peaks = [group["lr"] for group in optimizer.param_groups]
    if path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        budget.spent, budget.steps = saved["spent"], saved["steps"]
    last_saved, loss = time.monotonic(), torch.zeros(())
    while not budget.done():
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = learning_rate(peak, budget.fraction())
        loss = step(next(batches))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        budget.steps += 1
        if log.due():
            log.write(step=budget.steps, seconds=budget.spent, loss=loss.item(), validation=validate())
        if time.monotonic() - last_saved > 60:
            _save(path, model, optimizer, budget)
            last_saved = time.monotonic()
    _save(path, model, optimizer, budget)
    log.write(step=budget.steps, seconds=budget.spent, loss=loss.item(), validation=validate())


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, budget: Budget) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"spent": budget.spent, "steps": budget.steps}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)
