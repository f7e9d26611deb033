"""A round on static buffers -> its pieces captured for every length, one launch a round, results read behind it."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from hybridspec_generation.decode import RoundReadout, parse_readout
from hybridspec_generation.round import Round, run_round, verify
from hybridspec_generation.round.correction import correct
from hybridspec_generation.round.proposal import propose
from hybridspec_generation.round.selector import select
from hybridspec_generation.round.stage0 import stage0

from . import driver
from .capture import capture
from .conditional import Chain, ParentGraph
from .warming import warm_up

# launches in flight: the next one is queued before the last one's tokens are read
AHEAD = 2


class Piece(NamedTuple):
    """A part of a round that is captured as one graph."""

    name: str
    run: Callable[[], Any]


class Step(NamedTuple):
    """One piece, or one for each length of which `length` `[1]` says which."""

    pieces: list[Piece]
    length: Tensor | None = None


def round_steps(r: Round, lengths: Sequence[int], split: bool) -> list[Step]:
    """What a round that chooses among `lengths` runs, in order; with the correction in between if `split`.

    Stage 0 then runs on the longest length, in the graph that drafts, and the correction reads u rows of it: a row
    more costs 0.2 us, a choice among graphs more than 10 (H200, 35B).
    """
    s = r.state
    if len(lengths) == 1:
        (length,) = lengths
        return [Step([Piece("the round", partial(run_round, replace(r, switch=lambda _, body: body(length))))])]

    def each(name: str, *bodies: Callable[[Round, int], Any]) -> list[Piece]:
        return [Piece(f"{name} of {w} tokens", partial(run_each, bodies, r, w)) for w in lengths]

    if not split:
        chosen = Piece("the proposal and the selector", partial(run_each, (propose, select, correct), r))
        return [Step([chosen]), Step(each("the target", stage0, verify), s.verify_length)]
    before = (propose, select, partial(stage0, u=lengths[-1]), correct)
    chosen = Piece("the proposal, the selector, Stage 0 and the routing correction", partial(run_each, before, r))
    return [Step([chosen]), Step(each("Stage 1", verify), s.verify_length)]


def emit_nothing(r: Round) -> None:
    """Let rounds commit nothing: those that run, and those of which only the operations besides the kernels run.

    The latter commit what the last round that ran left in `num_committed`.
    """
    r.state.remaining.zero_()
    r.state.num_committed.zero_()


class GraphedRounds:
    """The rounds of one set of buffers; every request on these buffers may use them.

    Args:
        r: target and drafter that read no length on the host; its policy's tables may change, in place.
        lengths: that a round may choose, in ascending order without gaps.
        kind: "parent" (one graph, the GPU chooses), or "per-length" (the CPU reads the lengths of a round).
        rounds_per_launch: up to so many rounds run without the CPU; more than 1 needs the kind "parent".
        split: whether a graph ends at the router boundary; None where the policy decides there.

    Raises:
        CaptureError: if a piece cannot be captured; the message names it.

    Building runs every piece once with nothing left to emit: the round's state must be started anew behind it, and
    the caches hold what they held.
    """

    def __init__(
        self, r: Round, lengths: Sequence[int], kind: str, rounds_per_launch: int = 1, split: bool | None = None
    ) -> None:
        self.r, self.lengths, self.kind, self.rounds_per_launch = r, list(lengths), kind, rounds_per_launch
        self.split = r.policy.corrects if split is None else split
        device, size = r.state.readout.device, len(r.state.readout)
        self.stream = torch.cuda.Stream(device)
        self.context = driver.context_of(device)
        self.events = [torch.cuda.Event() for _ in range(AHEAD)]
        with torch.inference_mode(False):
            # readouts of a launch's rounds, and how many of them ran
            self.history = torch.zeros(rounds_per_launch, size, dtype=torch.int64, device=device)
            self.turn = torch.zeros(1, dtype=torch.int64, device=device)
            self.running = torch.zeros(1, dtype=torch.int32, device=device)
            self.limit = torch.full((1,), rounds_per_launch, dtype=torch.int32, device=device)
            self.ring = torch.zeros(AHEAD, rounds_per_launch, size, dtype=torch.int64, pin_memory=True)
            self.turns = torch.ones(AHEAD, 1, dtype=torch.int64, pin_memory=True)
        # a handle comes with the first record
        for event in self.events:
            event.record(self.stream)
        self.parent: ParentGraph | None = None
        self._build()

    @property
    def launches(self) -> str:
        """For the report."""
        if self.rounds_per_launch > 1:
            return f"parent graph of up to {self.rounds_per_launch} rounds"
        return "one graph" if len(self.steps) == 1 else f"{self.kind} graph{'s' * (self.kind == 'per-length')}"

    # ---- building

    def _build(self) -> None:
        """Compile, run and capture every piece, then join them."""
        self.steps = round_steps(self.r, self.lengths, self.split)
        pieces = [piece for step in self.steps for piece in step.pieces]
        several = self.rounds_per_launch > 1
        if several:
            pieces += [Piece("the start of a launch", self._begin), Piece("the record of a round", self._record)]
        with tqdm(total=3, desc="preparing graphs", leave=False, disable=None) as bar:
            emit_nothing(self.r)
            warm_up([piece.run for piece in pieces], self.stream, bar.update)
            pool = torch.cuda.graph_pool_handle()
            graphs = iter([capture(piece.run, pool, self.stream, piece.name) for piece in pieces])
            self.graphs = [[next(graphs) for _ in step.pieces] for step in self.steps]
            bar.update()
        if self.kind == "parent":
            self.parent = ParentGraph(self.r.state.readout.device)
            if several:
                begin, record = graphs
                self.parent.add(begin)
                self.parent.add_while(partial(self._join, record=record), self.running, self.limit)
            else:
                self._join(self.parent)
            self.parent.instantiate()
            return
        for graph in (graph for step in self.graphs for graph in step):
            graph.instantiate()

    def _join(self, chain: Chain, record: torch.cuda.CUDAGraph | None = None) -> None:
        """Add a round to a chain of nodes."""
        for step, graphs in zip(self.steps, self.graphs, strict=True):
            if step.length is None:
                chain.add(graphs[0])
            else:
                chain.add_switch(step.length, self.lengths[0], graphs)
        if record is not None:
            chain.add(record)

    def _begin(self) -> None:
        """Of a launch of several rounds: none has run, and the first runs unless the request is over."""
        self.turn.zero_()
        torch.sub(1, self.r.state.finished, out=self.running)

    def _record(self) -> None:
        """Of a launch of several rounds: keep a round's readout, and go on unless the request is over."""
        self.history.index_copy_(0, self.turn, self.r.state.readout[None])
        self.turn += 1
        torch.sub(1, self.r.state.finished, out=self.running)

    # ---- decoding

    def decode(self) -> Generator[RoundReadout]:
        """Run rounds until the request is finished, as `hybridspec_generation.decode`; more may run behind it.

        With a parent graph, a round gives up the interpreter's lock once, where it waits: beside a thread that
        computes, every operation of PyTorch would cost the 5 ms after which that thread lets go.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        ring, turns = self.ring.numpy(), self.turns.numpy()
        in_flight: deque[int] = deque()
        launched, finished = 0, False
        try:
            while not finished:
                while len(in_flight) < AHEAD:
                    slot = launched % AHEAD
                    self._launch(slot)
                    in_flight.append(slot)
                    launched += 1
                slot = in_flight.popleft()
                if not self.events[slot].query():
                    self.events[slot].synchronize()
                # all of them now, because the slot is written again by the next launch but one
                for readout in [parse_readout(row) for row in ring[slot, : int(turns[slot, 0])]]:
                    self._check_length(readout.verify_length)
                    finished = readout.finished
                    yield readout
        finally:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _check_length(self, w: int) -> None:
        """Raise for a length without a graph, in whose place a SWITCH takes the nearest one's."""
        if len(self.lengths) > 1 and not self.lengths[0] <= w <= self.lengths[-1]:
            raise RuntimeError(
                f"The policy chose to verify {w} tokens, and there are graphs for {self.lengths[0]} to "
                f'{self.lengths[-1]}. HybridSpecConfig(graphs="off") needs none; please report this.'
            )

    def _launch(self, slot: int) -> None:
        """Queue one launch, and the copy of its result behind it."""
        if self.parent is not None:
            self.parent.launch(self.stream)
        else:
            with torch.cuda.stream(self.stream):
                self._replay()
        stream = self.stream.cuda_stream
        copies = [(self.ring, self.r.state.readout)]
        if self.rounds_per_launch > 1:
            copies = [(self.ring, self.history), (self.turns, self.turn)]
        with driver.using(self.context):
            for ring, result in copies:
                size = result.nbytes
                driver.call("cuMemcpyDtoHAsync_v2", ring.data_ptr() + slot * size, result.data_ptr(), size, stream)
            driver.call("cuEventRecord", self.events[slot].cuda_event, stream)

    def _replay(self) -> None:
        """A round graph by graph; the CPU waits for every length."""
        for step, graphs in zip(self.steps, self.graphs, strict=True):
            if step.length is None:
                graphs[0].replay()
                continue
            w = int(step.length)
            self._check_length(w)
            graphs[w - self.lengths[0]].replay()

    def close(self) -> None:
        """Free the graphs; waits for rounds in flight."""
        self.stream.synchronize()
        if self.parent is not None:
            self.parent.close()

    def __del__(self) -> None:
        # PyTorch does not know that the last launch still writes to the ring; at exit, the driver may be gone
        with suppress(Exception):
            if not torch.cuda.is_current_stream_capturing():
                self.close()


def run_each(bodies: Sequence[Callable[..., Any]], *arguments: Any) -> None:
    """Run one after the other on the same arguments."""
    for body in bodies:
        body(*arguments)
