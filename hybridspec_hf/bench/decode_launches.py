"""A pair, a script -> the ways to launch a round beside each other: idle, beside a busy thread, split and unsplit."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridspec_generation import HybridSpecConfig
from hybridspec_generation.policies import FixedLength
from hybridspec_generation.round import Round

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
SPLIT_LENGTH = 8


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
    """Decode the same text with a boundary behind Layer 0's router and without, at one length; and without a choice.

    Args:
        rounds: at least so many, if the script accepts as its trace says.
    """
    results = []
    every = range(2, pair.drafter.config.block_size + 1)
    for split, lengths in ((True, every), (False, every), (False, [SPLIT_LENGTH])):
        release(pair.target)
        r = scripted_round(pair, prompt, script, rounds * SPLIT_LENGTH)
        graphs = GraphedRounds(r, lengths, "parent", split=split)
        budget = int(rounds * min(SPLIT_LENGTH, script.mean_emitted()))
        script.reset()
        r.state.start(follow(pair.successor, prompt[0, -1:], 2)[1:], [], budget)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        readouts = list(graphs.decode())
        end.record()
        end.synchronize()
        results.append((readouts, begin.elapsed_time(end) / len(readouts)))
        graphs.close()
    release(pair.target)
    (a, split_ms), (b, unsplit_ms), (_, single_ms) = results
    # lengths of Stage 0 and of the target are the same number here
    return Split(len(a), a == b, split_ms, unsplit_ms, single_ms)


def scripted_round(pair: RandomPair, prompt: Tensor, script: Script, budget: int) -> Round:
    """A prefilled round in kernels whose drafter plays the script and which verifies `SPLIT_LENGTH` tokens."""
    r = open_round(pair.target, pair.drafter, prompt, budget=budget, eos=[])
    target = kernel_target(pair, r)
    if target is None or r.drafter is None:
        raise ValueError("Splitting is compared on a GPU that runs the kernels only.")
    return replace(r, target=target, drafter=ScriptedDrafter(r.drafter, script), policy=FixedLength(SPLIT_LENGTH))


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
