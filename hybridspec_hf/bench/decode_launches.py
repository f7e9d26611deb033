"""A pair, a script -> the ways to launch a round beside each other: idle, beside a busy thread, split and unsplit."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridspec_generation import HybridSpecConfig
from hybridspec_generation.decode import RoundReadout
from hybridspec_generation.policies import FixedLength
from hybridspec_generation.policies.base import Uncorrected
from hybridspec_generation.round import Round
from hybridspec_generation.state import RoundState
from hybridspec_kernels import limit_length_ref

from .. import strategy
from ..calibration.capture import open_round
from ..engine import release
from ..graphs.rounds import GraphedRounds
from .decode_models import RandomPair, follow
from .decode_parts import kernel_target
from .decode_report import Launches, Split
from .decode_script import Script, ScriptedDrafter, scripted

# how rounds are launched: `graphs` and `rounds_per_launch` of the config
WAYS = (("parent", 1), ("parent", 16), ("per-length", 1), ("off", 1))
# beside a busy thread, every operation that is launched waits for the interpreter's lock: seconds a round
LAUNCHED_SINGLY, FEW_TOKENS = "off", 16
# with and without a choice among graphs
SINGLE_LENGTH = 8


def compare_launches(pair: RandomPair, prompt: Tensor, script: Script, new_tokens: int) -> Iterator[Launches]:
    """Every way, first alone and then beside a busy thread; the captures of each start anew."""
    for graphs, at_once in WAYS:
        release(pair.target)
        script.drafter = None
        free = torch.cuda.mem_get_info()[0]
        config = HybridSpecConfig(graphs=graphs, rounds_per_launch=at_once)
        first, known = request(pair, prompt, script, new_tokens, config)
        held = free - torch.cuda.mem_get_info()[0]
        for busy in (False, True):
            tokens = FEW_TOKENS if busy and graphs == LAUNCHED_SINGLY else new_tokens
            with busy_while_decoding() if busy else nullcontext():
                report, right = request(pair, prompt, script, tokens, config)
            ms = 1e3 * report.decode_seconds / report.rounds
            yield Launches(report.launches, busy, ms, first.capture_seconds, held, known and right)
    release(pair.target)


def request(
    pair: RandomPair, prompt: Tensor, script: Script, new_tokens: int, config: HybridSpecConfig
) -> tuple[Any, bool]:
    """One scripted request: its report, and whether it wrote the known text."""
    script.reset()
    with scripted(pair.target, pair.drafter, script):
        out = pair.target.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new_tokens,
            assistant_model=pair.drafter, generation_mode="hybridspec", hybridspec_config=config,
            return_dict_in_generate=True,
        )  # fmt: skip
    wanted = follow(pair.successor, prompt[0, -1:], new_tokens + 1)[1:]
    return out.report, torch.equal(out.sequences[0, prompt.shape[1] :], wanted)


def compare_split(pair: RandomPair, prompt: Tensor, script: Script, rounds: int) -> Split:
    """Decode the same text with a boundary behind Layer 0's router and without, every length in turn; then at one
    length, with a choice among graphs and without.

    Args:
        rounds: at least so many for split and unsplit, if the script accepts as its trace says.
    """
    block, device = pair.drafter.config.block_size, prompt.device
    every, budget = range(2, block + 1), rounds * int(script.mean_emitted() + 1)
    split, unsplit = (
        timed_rounds(pair, prompt, script, EveryLength(device), every, budget, behind) for behind in (True, False)
    )
    switched, single = (
        timed_rounds(pair, prompt, script, FixedLength(SINGLE_LENGTH), lengths, budget // 3, False)
        for lengths in (every, [SINGLE_LENGTH])
    )
    # lengths of Stage 0 and of the target are the same number here
    same = split.readouts == unsplit.readouts
    return Split(len(split.readouts), same, *(each.round_ms for each in (split, unsplit, switched, single)))


class EveryLength(Uncorrected):
    """Verify 2, 3, ..., W tokens in turn."""

    def __init__(self, device: torch.device) -> None:
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    def select(self, state: RoundState) -> None:
        """Write the next length, and what the budget allows of it."""
        state.nominal_length.copy_(2 + self.turn % (state.block - 1))
        state.stage0_length.copy_(limit_length_ref(state.nominal_length, state.remaining, state.block))
        self.turn += 1


class Timed(NamedTuple):
    """Rounds that ran: what each of them said, and the mean milliseconds of one."""

    readouts: list[RoundReadout]
    round_ms: float


def timed_rounds(
    pair: RandomPair, prompt: Tensor, script: Script, policy: EveryLength | FixedLength, lengths: Sequence[int],
    budget: int, split: bool,
) -> Timed:  # fmt: skip
    """Decode `budget` tokens by one parent graph; `lengths` and `split` as of `GraphedRounds`."""
    release(pair.target)
    r = replace(scripted_round(pair, prompt, script, budget), policy=policy)
    graphs = GraphedRounds(r, lengths, "parent", split=split)
    script.reset()
    if isinstance(policy, EveryLength):
        policy.turn.zero_()
    r.state.start(follow(pair.successor, prompt[0, -1:], 2)[1:], [], budget)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    readouts = list(graphs.decode())
    end.record()
    end.synchronize()
    graphs.close()
    release(pair.target)
    return Timed(readouts, begin.elapsed_time(end) / len(readouts))


def scripted_round(pair: RandomPair, prompt: Tensor, script: Script, budget: int) -> Round:
    """A prefilled round in kernels whose drafter plays the script."""
    r = open_round(pair.target, pair.drafter, prompt, budget=budget, eos=[])
    target = kernel_target(pair, r)
    if target is None or r.drafter is None:
        raise ValueError("Splitting is compared on a GPU that runs the kernels only.")
    return replace(r, target=target, drafter=ScriptedDrafter(r.drafter, script))


@contextmanager
def busy_while_decoding() -> Iterator[None]:
    """Within the block, a second Python thread computes while requests decode, and so wants the interpreter's lock.

    Not while their prompts are processed, whose thousands of operations would each wait for the lock.
    """
    run_rounds = strategy.run_rounds

    def beside_a_thread(*arguments: Any) -> None:
        with busy_thread():
            run_rounds(*arguments)

    strategy.run_rounds = beside_a_thread  # type: ignore[assignment]
    try:
        yield
    finally:
        strategy.run_rounds = run_rounds


@contextmanager
def busy_thread() -> Iterator[threading.Thread]:
    """A second Python thread that computes all the time."""
    stop = threading.Event()

    def compute() -> None:
        total = 0
        while not stop.is_set():
            total += sum(range(100))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join()
