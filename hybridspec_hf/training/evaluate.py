"""A pair and held-out prompts → acceptance length per category, loops, confidence AUC and routing correlation.

With greedy decoding and every draft token verified, a round depends only on where it starts: the greedy answers are
generated once, and the drafter is then run at each round's start, for all prompts together.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_hf.training.corpus import Row
from hybridspec_hf.training.dflash import block_labels, propose, target_features
from hybridspec_hf.training.onpolicy import Answered, greedy_answers, loops
from hybridspec_hf.training.target import TOP_K
from hybridspec_hf.training.text import encode_prompts


class Rounds(NamedTuple):
    """Speculative rounds of all prompts, and the draft positions they reached.

    Args:
        prompt, start, emitted: `[R]`: the prompt's index, the anchor's position, tokens emitted.
        depth, confidence, accepted: `[P]`: draft positions up to the first rejection, counted from 1.
    """

    prompt: Tensor
    start: Tensor
    emitted: Tensor
    depth: Tensor
    confidence: Tensor
    accepted: Tensor


def padded(answered: Answered, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded prompt + answer `[B, L]`, prompt lengths and total lengths `[B]`."""
    rows = [p + a for p, a in zip(answered.prompts, answered.answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    prompts = torch.tensor([len(p) for p in answered.prompts], device=device)
    return ids, prompts, torch.tensor([len(row) for row in rows], device=device)


@torch.no_grad()
def simulate_rounds(target: Any, drafter: Any, answered: Answered) -> Rounds:
    """Vanilla DFlash on greedy answers, all draft tokens verified; the first answer token comes from prefill."""
    ids, start, lengths = padded(answered, target.device)
    features = target_features(target, ids, drafter.config.target_layer_ids)
    size = drafter.config.block_size
    found: list[tuple[Tensor, ...]] = []
    reached: list[tuple[Tensor, ...]] = []
    live = (start < lengths - 1).nonzero().squeeze(1)
    while len(live):
        anchors = start[live][:, None]
        logits = propose(target, drafter, ids[live], features[live], anchors)[:, 0].float()
        labels, valid = block_labels(ids[live], lengths[live], anchors, size)
        labels, valid = labels[:, 0], valid[:, 0]
        confidence, proposal = logits.softmax(-1).max(-1)
        hits = (proposal == labels) & valid
        run = hits.long().cumprod(-1)
        # one more token comes from the target, unless the answer ends before it
        emitted = torch.minimum(run.sum(-1) + 1, lengths[live] - 1 - start[live])
        found.append((live, start[live], emitted))
        seen = valid & torch.cat([torch.ones_like(run[:, :1]), run[:, :-1]], dim=1).bool()
        depth = torch.arange(1, size, device=ids.device).expand_as(run)
        reached.append((depth[seen], confidence[seen], hits[seen]))
        start[live] += emitted
        live = live[start[live] < lengths[live] - 1]
    joined = [torch.cat(parts).cpu() for parts in zip(*found, strict=True)]
    positions = [torch.cat(parts).cpu() for parts in zip(*reached, strict=True)]
    return Rounds(*joined, *positions)


def area_under_curve(score: Tensor, label: Tensor) -> float:
    """Probability that a positive outscores a negative, ties counted half; `score`, `label`: `[P]`."""
    values, index, counts = score.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2.0)[index]
    positives, negatives = label.sum().item(), (~label).sum().item()
    if not positives or not negatives:
        return 0.5
    return float((rank[label].sum() - positives * (positives + 1) / 2) / (positives * negatives))


@torch.no_grad()
def routing_novelty(target: Any, answered: Answered, rounds: Rounds, window: int = 16) -> tuple[Tensor, Tensor]:
    """New experts that each token of a round's window brings.

    Returns:
        layer 0: `[R, window-1]`, experts of the token that no earlier token of the window uses;
        later layers: `[R, window-1]`, new (layer, expert) pairs. Windows cut by the answer's end are left out.
    """
    ids, _, lengths = padded(answered, target.device)
    whole = rounds.start + window <= lengths.cpu()[rounds.prompt]
    prompt, start = rounds.prompt[whole].to(ids.device), rounds.start[whole].to(ids.device)
    logits = target(input_ids=ids, use_cache=False, output_router_logits=True, logits_to_keep=1).router_logits
    # [L, B, T, E]
    logits = torch.stack(logits).view(len(logits), *ids.shape, -1)
    used = torch.zeros_like(logits, dtype=torch.bool).scatter(3, logits.topk(TOP_K, dim=-1).indices, True)
    where = start[:, None] + torch.arange(window, device=ids.device)
    # [L, R, window, E]
    used = used[:, prompt[:, None], where].long()
    before = used.cumsum(2) - used
    new = ((used > 0) & (before == 0)).sum(-1)[:, :, 1:].cpu()
    return new[0], new[1:].sum(0)


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson correlation of `[R, P]` values after each position's mean is removed."""
    x, y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    return float((x * y).sum() / (x.pow(2).sum() * y.pow(2).sum()).sqrt().clamp_min(1e-12))


def evaluate_pair(
    target: Any, drafter: Any, tokenizer: Any, rows: list[Row], max_new_tokens: int = 256
) -> tuple[dict[str, Any], Answered]:
    """The numbers of the pair on held-out prompts, and the answers they are measured on."""
    answered = greedy_answers(
        target, tokenizer, encode_prompts(tokenizer, [row["prompt"] for row in rows]), max_new_tokens
    )
    rounds = simulate_rounds(target, drafter, answered)
    looping = torch.tensor(loops(answered.answers))
    ended = torch.tensor([a[-1] == tokenizer.eos_token_id for a in answered.answers])
    sizes = torch.tensor([len(a) for a in answered.answers]).float()
    categories: dict[str, dict[str, float]] = {}
    for name in sorted({row["category"] for row in rows}):
        here = torch.tensor([row["category"] == name for row in rows])
        kept = here[rounds.prompt]
        categories[name] = {
            "al": rounds.emitted[kept].float().mean().item(),
            "loops": looping[here].float().mean().item(),
            "ended": ended[here].float().mean().item(),
            "answer_tokens": sizes[here].mean().item(),
        }
    first, later = routing_novelty(target, answered, rounds)
    calm = ~looping[rounds.prompt]
    by_depth = [
        rounds.accepted[rounds.depth == d].float().mean().nan_to_num().item()
        for d in range(1, drafter.config.block_size)
    ]
    numbers = {
        "prompts": len(rows),
        "al": rounds.emitted.float().mean().item(),
        "al_without_loops": rounds.emitted[calm].float().mean().nan_to_num().item(),
        "al_mean_of_categories": sum(c["al"] for c in categories.values()) / len(categories),
        "loops": looping.float().mean().item(),
        "ended": ended.float().mean().item(),
        "answer_tokens": sizes.mean().item(),
        "confidence_auc": area_under_curve(rounds.confidence, rounds.accepted),
        "routing_correlation": correlation(first, later),
        "acceptance_by_depth": [round(x, 3) for x in by_depth],
        "categories": categories,
    }
    return numbers, answered
