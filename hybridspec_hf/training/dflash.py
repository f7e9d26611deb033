"""The target's own answers → a trained DFlash drafter: cached features, random anchors, weighted cross entropy."""

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridspec_hf.drafters.dflash import DFlashConfig, DFlashDrafter
from hybridspec_hf.training.loop import Budget, TrainLog, adamw, autocast, run_steps
from hybridspec_hf.training.onpolicy import Answered

# early positions decide whether later ones count at all
DECAY = 7.0


def drafter_config(target: Any, mask_token_id: int, **overrides: Any) -> DFlashConfig:
    """A three-layer drafter for a target's config, block 16."""
    sizes: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 3 * target.hidden_size,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "max_position_embeddings": target.max_position_embeddings,
        "block_size": 16,
        "mask_token_id": mask_token_id,
        "target_layer_ids": [1, 3, 5],
        "num_target_layers": target.num_hidden_layers,
    }
    return DFlashConfig(**(sizes | overrides))


def initialise(drafter: DFlashDrafter, lm_head: Tensor) -> None:
    """Standard deviation 1/sqrt(fan in), half of it into the residual stream, and a final norm that fits the head.

    With transformers' default (0.02), or first logits far too small or large, a drafter of this size hardly learns in
    the same time: Adam moves the norm's weight by no more than the learning rate a step.

    Args:
        lm_head: `[V, H]`, the target's.
    """
    for name, weight in drafter.named_parameters():
        if weight.dim() == 2:
            half = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=half / math.sqrt(weight.shape[1]))
    nn.init.constant_(drafter.norm.weight, 0.3 / lm_head.norm(dim=1).mean().item())


@torch.no_grad()
def target_features(target: Any, ids: Tensor, layer_ids: list[int]) -> Tensor:
    """Outputs of the target layers, concatenated, for right-padded `ids [B, T]`: `[B, T, A*H]`."""
    out = target.model(input_ids=ids, use_cache=False, output_hidden_states=[i + 1 for i in layer_ids])
    return torch.cat([out.hidden_states[i + 1] for i in layer_ids], dim=-1)


def propose(target: Any, drafter: DFlashDrafter, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Draft logits of many blocks per sequence.

    Args:
        ids: `[B, L]`. features: `[B, L, A*H]`. anchors: `[B, N]`, positions of the blocks' anchors in `ids`.

    Returns:
        `[B, N, W-1, V]`: row k of a block is for the token at position anchor + 1 + k.
    """
    size, (batch, count) = drafter.config.block_size, anchors.shape
    assert size is not None and drafter.config.mask_token_id is not None
    block_ids = ids.new_full((batch, count, size), drafter.config.mask_token_id)
    block_ids[:, :, 0] = ids.gather(1, anchors)
    embedding = target.get_input_embeddings().weight.detach()
    block = F.embedding(block_ids.flatten(1), embedding)
    positions = (anchors[:, :, None] + torch.arange(size, device=ids.device)).flatten(1)
    context_positions = torch.arange(ids.shape[1], device=ids.device).expand(batch, -1)
    masks = drafter.training_masks(anchors, ids.shape[1])
    hidden = drafter(block, positions, features, context_positions, masks).view(batch, count, size, -1)
    return F.linear(hidden[:, :, 1:], target.lm_head.weight.detach().to(hidden.dtype))


def block_labels(ids: Tensor, lengths: Tensor, anchors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Labels and validity, each `[B, N, W-1]`, of blocks anchored at `anchors [B, N]` in right-padded `ids [B, L]`."""
    where = anchors[:, :, None] + torch.arange(1, size, device=ids.device)
    valid = where < lengths[:, None, None]
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    return ids[rows, where.clamp_max(ids.shape[1] - 1)], valid


class DraftData:
    """Answered prompts with the target's features, flat on the device, served in batches of similar length."""

    def __init__(self, target: Any, answered: Answered, layer_ids: list[int], tokens_per_batch: int) -> None:
        device = target.device
        order = sorted(range(len(answered)), key=lambda i: len(answered.prompts[i]) + len(answered.answers[i]))
        self.rows = [(answered.prompts[i], answered.answers[i]) for i in order]
        rows = [prompt + answer for prompt, answer in self.rows]
        self.tokens_per_batch = tokens_per_batch
        self.lengths = torch.tensor([len(row) for row in rows], device=device)
        self.prompts = torch.tensor([len(answered.prompts[i]) for i in order], device=device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.ids = torch.tensor([i for row in rows for i in row], device=device)
        # how likely each token is to be drawn as an anchor
        self.anchor_weight = torch.ones(len(self.ids), device=device)
        width = len(layer_ids) * target.config.hidden_size
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.features = torch.empty(len(self.ids), width, device=device, dtype=dtype)
        at = 0
        while at < len(rows):
            chunk = list(range(at, min(len(rows), at + max(1, 131072 // len(rows[min(at + 127, len(rows) - 1)])))))
            ids, lengths = self._ids(torch.tensor(chunk, device=device))
            inside = torch.arange(ids.shape[1], device=device) < lengths[:, None]
            found = target_features(target, ids, layer_ids)[inside]
            start = int(self.starts[at])
            self.features[start : start + len(found)] = found.to(dtype)
            at += len(chunk)

    def _ids(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        index, lengths = self._index(rows)
        inside = torch.arange(index.shape[1], device=index.device) < lengths[:, None]
        return self.ids[index] * inside, lengths

    def _index(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()), device=rows.device)
        return (self.starts[rows][:, None] + column).clamp_max(len(self.ids) - 1), lengths

    def batches(
        self, anchors: int, seed: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Endless (ids `[B, L]`, features `[B, L, A*H]`, lengths `[B]`, anchors `[B, N]`) of rows with
        index % 50 in start..stop-1 (rows are sorted by length, so every fiftieth is a fair sample)."""
        rng = random.Random(seed)
        stop = 50 if stop is None else stop
        kept = [i for i in range(len(self.lengths)) if start <= i % 50 < stop] or list(range(len(self.lengths)))
        sizes = self.lengths.tolist()
        generator = torch.Generator(device=self.ids.device).manual_seed(seed)
        while True:
            chunks, at = [], 0
            while at < len(kept):
                count = max(1, self.tokens_per_batch // sizes[kept[min(at + 63, len(kept) - 1)]])
                chunks.append(kept[at : at + count])
                at += count
            rng.shuffle(chunks)
            for chunk in chunks:
                rows = torch.tensor(chunk, device=self.ids.device)
                index, lengths = self._index(rows)
                # an anchor is a token of the answer that has a successor
                column, first = torch.arange(index.shape[1], device=rows.device), self.prompts[rows]
                last = torch.maximum(first, lengths - 2)
                allowed = (column >= first[:, None]) & (column <= last[:, None])
                chosen = torch.multinomial(
                    self.anchor_weight[index] * allowed, anchors, replacement=True, generator=generator
                )
                yield self._ids(rows)[0], self.features[index], lengths, chosen


@torch.no_grad()
def teacher_forced_al(target: Any, drafter: DFlashDrafter, data: DraftData, batches: int = 2) -> float:
    """Mean tokens a round emits at random anchors of held-back answers; rounds in decoding start at harder ones."""
    total, count = 0.0, 0
    for i, (ids, features, lengths, anchors) in enumerate(data.batches(8, seed=7, start=49)):
        if i == batches:
            break
        labels, valid = block_labels(ids, lengths, anchors, drafter.config.block_size or 0)
        with autocast(target.device):
            hits = (propose(target, drafter, ids, features, anchors).argmax(-1) == labels) & valid
        total, count = total + float(hits.long().cumprod(-1).sum()) + anchors.numel(), count + anchors.numel()
    return total / count


def train_drafter(
    target: Any,
    drafter: DFlashDrafter,
    data: DraftData,
    budget: Budget,
    log: TrainLog,
    lr: float = 2e-3,
    anchors: int = 24,
    decay: float = DECAY,
) -> float:
    """Train in place within the time budget; returns the teacher-forced AL on held-back answers.

    Args:
        decay: the loss weight of draft position k is exp(-(k - 1) / decay).
    """
    size = drafter.config.block_size
    assert size is not None
    weight = torch.exp(-torch.arange(size - 1, device=target.device) / decay)
    optimizer = adamw(drafter, lr, weight_decay=0.05, vector_lr=3 * lr)

    def step(batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        ids, features, lengths, chosen = batch
        labels, valid = block_labels(ids, lengths, chosen, size)
        with autocast(target.device):
            logits = propose(target, drafter, ids, features, chosen)
        nll = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view_as(labels)
        loss = (nll * valid * weight).sum() / (valid * weight).sum().clamp_min(1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    batches = data.batches(anchors, seed=3, stop=49)
    run_steps(drafter, optimizer, step, batches, budget, log, lambda: teacher_forced_al(target, drafter, data))
    return teacher_forced_al(target, drafter, data)
