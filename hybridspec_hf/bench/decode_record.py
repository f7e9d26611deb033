"""The tiny trained pair on its prompts -> the trace files of `assets/traces`.

    python -m hybridspec_hf.bench.decode_record

Takes minutes on a CPU. Needs scikit-learn (the extra `calibration`), for the acceptance table.

The pair's own rounds accept 2.6 tokens on average, most of them very few and some the whole block. A category's rows
are drawn from them with the weights exp(a A + b min(A, 6)) of a round with A accepted tokens: a is the category's, so
that its mean is the paper's; b is one for all, so that the mean over the categories of what seven tokens emit relates
to what sixteen emit as in the paper's Table 3 (3.99 and 4.77 tokens). Without b the rounds would be either very short
or very long, which makes adaptive lengths look better than on real text.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..calibration.acceptance import fit_acceptance_table
from ..calibration.capture import CaptureRounds, capture_rounds
from ..pair import TINY_PAIR, encode, load_pair, read_prompts
from .decode_traces import ACCEPTANCE, CONFIDENCE_UNIT, ENTROPY_UNIT, FOLDER, PAPER_AL, RECORDED, ROUNDS

ASSETS = Path(__file__).resolve().parent.parent / "assets"
MAX_NEW_TOKENS = 128
# rounds kept of each accepted length
KEPT = 62
# rows are dealt into equal stretches, and each of them again
ROWS, STRETCHES, PARTS = 512, 8, 4
# Table 3: tokens emitted at a fixed length of 7 and of 16
SHORT, SHORT_SHARE = 7, 3.99 / 4.77
SEED = 0


def main() -> None:
    """Record, draw and write everything."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    calibration, held_out = (record(half) for half in (0, 1))
    write_files(calibration, held_out, ASSETS / FOLDER)


def record(half: int) -> CaptureRounds:
    """Rounds of every second prompt of each category of the pair's prompts."""
    pair = load_pair(str(TINY_PAIR / "target"), str(TINY_PAIR / "drafter"), dtype="float32", device_map="cpu")
    assert pair.drafter is not None
    turns: dict[str, list[Any]] = {}
    for row in read_prompts(TINY_PAIR / "prompts.jsonl", 1000):
        turns.setdefault(row["category"], []).append(row)
    rows = [row for category in turns.values() for row in category[half::2]]
    prompts = [encode(pair, row["prompt"], chat_template=True)["input_ids"] for row in rows]
    bar = tqdm(prompts, desc="held out" if half else "calibration", unit="prompt")
    eos = [pair.tokenizer.eos_token_id]
    return capture_rounds(pair.model, pair.drafter, bar, max_new_tokens=MAX_NEW_TOKENS, eos=eos)


def write_files(calibration: CaptureRounds, held_out: CaptureRounds, folder: Path) -> None:
    """The kept rounds, a file for each category and the acceptance table."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(SEED)
    rows, base = keep(held_out.accepted, generator)
    accepted = held_out.accepted[rows]
    source = (
        f"tiny pair, fp32 on a CPU, held-out prompts, the whole block verified: {len(rows)} of "
        f"{len(held_out.accepted)} rounds, at most {KEPT} of each accepted length"
    )
    mean = 1 + float(held_out.accepted.double().mean())
    write(folder / ROUNDS, {
        "source": source, "mean_al": round(mean, 4), "accepted": accepted.tolist(),
        "confidence": integers(held_out.confidence[rows], CONFIDENCE_UNIT),
        "entropy": integers(held_out.entropy[rows], ENTROPY_UNIT),
    })  # fmt: skip

    wanted = list(PAPER_AL.values())
    b = shared_shape(accepted, base, wanted)
    traces = {RECORDED: (mean, 0.0)} | {name: (al, b) for name, al in PAPER_AL.items()}
    for name, (al, shape) in traces.items():
        chosen = draw(accepted, tilted(accepted, base, al, shape), al, generator)
        drawn = 1 + float(accepted[chosen].double().mean())
        how = "resampled to the pair's own mix" if name == RECORDED else (
            f"resampled to the paper's AL of vanilla DFlash on Qwen3.5-35B-A3B, {al}, weights exp(a A + {b:.3f} "
            f"min(A, {SHORT - 1}))"
        )  # fmt: skip
        write(folder / f"{name}.json", {
            "source": f"{ROUNDS}, {how}, seed {SEED}", "mean_al": round(drawn, 4), "rows": chosen.tolist()
        })  # fmt: skip
    pooled = pooled_rounds(calibration, wanted, generator)
    table = fit_acceptance_table(
        pooled, f"tiny pair, {len(pooled.accepted)} rounds of its calibration prompts, drawn as the traces are"
    )
    write(folder / ACCEPTANCE, {name: getattr(table, name) for name in table.__dataclass_fields__})


def keep(accepted: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows to keep of N rounds, in their order, and the share of all rounds that each stands for, `[K]`, fp64."""
    rows, shares = [], []
    for length in accepted.unique().tolist():
        of_length = (accepted == length).nonzero()[:, 0]
        kept = of_length[torch.randperm(len(of_length), generator=generator)[:KEPT]]
        rows.append(kept)
        shares.append(torch.full((len(kept),), len(of_length) / len(kept) / len(accepted), dtype=torch.float64))
    order = torch.cat(rows).argsort()
    return torch.cat(rows)[order], torch.cat(shares)[order]


def tilted(accepted: Tensor, base: Tensor, mean_al: float, shape: float) -> Tensor:
    """Weights `[N]` of sum 1 that give a mean AL: base * exp(a A + shape * min(A, 6)), a by bisection."""
    steady = base.log() + shape * accepted.clamp_max(SHORT - 1)
    low, high = -5.0, 5.0
    for _ in range(60):
        a = (low + high) / 2
        weights = (steady + a * accepted).softmax(0)
        low, high = (a, high) if 1 + float(weights @ accepted.double()) < mean_al else (low, a)
    return weights


def shared_shape(accepted: Tensor, base: Tensor, wanted: Sequence[float]) -> float:
    """b: the categories' mean of what `SHORT` tokens emit over that of what the block emits is the paper's."""
    low, high = 0.0, 3.0
    for _ in range(40):
        shape = (low + high) / 2
        each = [tilted(accepted, base, al, shape) for al in wanted]
        short = sum(1 + float(w @ accepted.clamp_max(SHORT - 1).double()) for w in each)
        low, high = (shape, high) if short / sum(wanted) < SHORT_SHARE else (low, shape)
    return shape


def draw(accepted: Tensor, weights: Tensor, mean_al: float, generator: torch.Generator, count: int = ROWS) -> Tensor:
    """`[count]` rows: systematic sampling, single rows exchanged until the mean is right, then dealt out.

    Every 64 rows have nearly the whole trace's mean, and every 16 roughly, so that a request need not play all of it.
    """
    by_length = accepted.argsort(stable=True)
    points = (torch.arange(count) + torch.rand(1, generator=generator)) / count
    rows = by_length[torch.searchsorted(weights[by_length].cumsum(0), points.double()).clamp_max(len(accepted) - 1)]
    wanted = round((mean_al - 1) * count)
    while (gap := wanted - int(accepted[rows].sum())) != 0:
        # a row whose length has a neighbour in the right direction
        row = int(torch.randint(count, (1,), generator=generator))
        better = (accepted == accepted[rows[row]] + (1 if gap > 0 else -1)).nonzero()[:, 0]
        if len(better):
            rows[row] = better[int(torch.randint(len(better), (1,), generator=generator))]
    return torch.cat([
        part[torch.randperm(len(part), generator=generator)]
        for stretch in deal(rows, accepted, STRETCHES, generator)
        for part in deal(stretch, accepted, PARTS, generator)
    ])  # fmt: skip


def deal(rows: Tensor, accepted: Tensor, hands: int, generator: torch.Generator) -> list[Tensor]:
    """The rows in `hands` groups of one size and nearly one mean, in random order."""
    dealt = rows[accepted[rows].argsort(stable=True)].view(-1, hands).clone()
    # back and forth, so that no group gets the longer row each time
    dealt[1::2] = dealt[1::2].flip(1)
    return [dealt[:, hand] for hand in torch.randperm(hands, generator=generator).tolist()]


def pooled_rounds(rounds: CaptureRounds, wanted: Sequence[float], generator: torch.Generator) -> CaptureRounds:
    """The calibration rounds with the categories' mix, in random order."""
    base = torch.full((len(rounds.accepted),), 1 / len(rounds.accepted), dtype=torch.float64)
    shape = shared_shape(rounds.accepted, base, wanted)
    rows = torch.cat([
        draw(rounds.accepted, tilted(rounds.accepted, base, al, shape), al, generator) for al in wanted
    ])  # fmt: skip
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return CaptureRounds(*(column[rows] for column in rounds))


def integers(values: Tensor, unit: float) -> list[Any]:
    """Rows in whole units."""
    return (values / unit).round().int().tolist()


def write(path: Path, data: dict[str, Any]) -> None:
    """One JSON file, compact."""
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
