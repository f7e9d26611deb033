"""A pair's round, part by part: how long each takes alone, beside the time of its bytes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from hybridspec_generation.policies import HybridSpecPolicy
from hybridspec_generation.round import Round
from hybridspec_generation.round.acceptance import accept
from hybridspec_generation.round.commit import commit
from hybridspec_generation.state import RoundState
from hybridspec_generation.tables import SelectionTables

from ..calibration.capture import open_round
from ..calibration.latency import WINDOWS, Timer, run_target, wall_seconds
from ..calibration.tables import pooled_throughput
from ..engine import get_engine
from ..graphs.rounds import emit_nothing
from ..graphs.timing import graph_seconds
from ..models.kernel_target import KernelTarget
from .decode_floors import DecodeFloors, floor_ms
from .decode_models import RandomPair, follow
from .decode_report import Parts
from .decode_traces import load_acceptance
from .example_cost import example_cost

# of what is too short to be timed alone
CALLS = 100


class Work(NamedTuple):
    """What is timed: its name, what runs, and the bytes that it must move (None: not counted)."""

    part: str
    run: Callable[[], Any]
    bytes: float | None


def time_parts(
    pair: RandomPair, prompt: Tensor, lengths: Sequence[int], floors: DecodeFloors, bandwidth: float | None
) -> list[Parts]:
    """Times of a draft, of Stage 0 on the block, of verifications; where kernels run, as graphs, by kind of layer too.

    Each is the shortest of several on one piece of text, averaged over `WINDOWS` pieces.
    """
    block = pair.drafter.config.block_size
    r = open_round(pair.target, pair.drafter, prompt, budget=block, eos=[])
    windows = follow(pair.successor, prompt[0, -1:], WINDOWS * block + 1)[1:].split(block)
    text = windows[0].clone()
    target = kernel_target(pair, r)
    timer: Timer = wall_seconds if target is None else partial(graph_seconds, device=text.device)
    r = r if target is None else replace(r, target=target)
    assert r.drafter is not None
    emit_nothing(r)
    draft = partial(r.drafter.propose, text[:1], r.cache.length, r.state.draft)
    first = partial(r.target.stage0, text, r.cache, r.state.boundary)
    work = [
        Work("draft", draft, sum(floors.draft().values())),
        Work(f"Stage 0 of {block}", first, sum(floors.stage0().values())),
    ]
    for w in sorted({1, *lengths, block}):
        moved = floors.verification(w)
        work.append(Work(f"verification of {w}", partial(run_target, r, text, w), sum(moved.values())))
        if target is not None:
            ended = sum(floors.commit().values())
            work += [part._replace(part=f"  {w}: {part.part}") for part in kinds(target, r, w, moved, ended)]
    if target is not None and pair.routing is not None:
        work += selection(pair, r)
    times = timer([part.run for part in work], inputs=[partial(text.copy_, window) for window in windows])
    return [
        Parts(part.part, 1e3 * seconds, None if part.bytes is None else floor_ms(part.bytes, bandwidth))
        for part, seconds in zip(work, times, strict=True)
    ]


def selection(pair: RandomPair, r: Round) -> list[Work]:
    """The selector and the correction, `CALLS` times each: one alone is shorter than what launching a graph takes."""
    assert pair.routing is not None
    acceptance, cost = load_acceptance(), example_cost()
    rho = pooled_throughput(acceptance, cost)
    tables = SelectionTables.build(acceptance, cost, pair.routing.table, rho, r.state.remaining.device)
    policy = HybridSpecPolicy(tables)

    def repeat(run: Callable[[RoundState], None]) -> None:
        for _ in range(CALLS):
            run(r.state)

    return [
        Work(f"{CALLS} calls of the selector", partial(repeat, policy.select), None),
        Work(f"{CALLS} calls of the routing correction", partial(repeat, policy.correct), None),
    ]


def kernel_target(pair: RandomPair, r: Round) -> KernelTarget | None:
    """The target in kernels on the round's cache, if it can run so."""
    engine = get_engine(pair.target, pair.drafter)
    if not r.state.remaining.is_cuda or engine.round_target_reason(r.cache):
        return None
    # as the engine does: the kernels read no slot that no token is in
    r.cache.clear_rejected = False
    target = KernelTarget(engine.target, r.cache)
    target.start_request()
    return target


def kinds(target: KernelTarget, r: Round, w: int, moved: dict[str, float], ended: float) -> list[Work]:
    """Layers of one kind behind each other, without the norms between them; then head, acceptance and commit.

    Args:
        moved, ended: bytes of the verification by part, and of the commit.
    """
    split, hidden = target.split, target.hidden[:w]
    layers = range(len(split.layers))

    def mixers(kind: str) -> None:
        for i in layers:
            if split.layer_types[i] == kind:
                target.mix_tokens(i, hidden)

    def mlps() -> None:
        for i in layers:
            target.mlp(split.layers[i].mlp, hidden)

    def end() -> None:
        accept(r, w)
        commit(r, w)

    def size(*parts: str) -> float:
        return sum(moved.get(part, 0.0) for part in parts)

    return [
        Work("GDN", partial(mixers, "linear_attention"), size("gdn", "states")),
        Work("attention", partial(mixers, "full_attention"), size("attention", "kv")),
        Work("MoE" if target.top_k else "MLP", mlps, size("experts", "shared_experts", "router", "mlp")),
        Work("head", partial(target.next_tokens, hidden, r.state.target_tokens[:w]), size("head")),
        Work("acceptance and commit", end, ended),
    ]
