"""A round on static buffers -> its pieces captured for every length, one launch a round, results read behind it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from hybridspec_generation.decode import RoundReadout, parse_readout
from hybridspec_generation.round import Round, run_round, verify
from hybridspec_generation.round.correction import correct
from hybridspec_generation.round.proposal import propose
from hybridspec_generation.round.selector import select
from hybridspec_generation.round.stage0 import stage0

from .capture import capture
from .conditional import ParentGraph
from .warming import warm_up

# rounds in flight: the next one is queued before the last one's tokens are read
AHEAD = 2


class Piece(NamedTuple):
    """A part of a round that is captured as one graph."""

    name: str
    run: Callable[[], Any]


class GraphedRounds:
    """The rounds of one set of buffers; every request on these buffers may use them.

    Args:
        r: target and drafter that read no length on the host; its policy's tables may change, in place.
        lengths: that a round may choose, in ascending order without gaps.
        kind: "parent" (one graph, the GPU chooses), or "per-length" (the CPU reads the two lengths of a round).

    Raises:
        RuntimeError: if a piece cannot be captured; the message names it.

    Building runs every piece once with nothing left to emit: the round's state must be started anew behind it, and
    the caches hold what they held.
    """

    def __init__(self, r: Round, lengths: Sequence[int], kind: str) -> None:
        self.r, self.lengths, self.kind = r, list(lengths), kind
        device = r.state.remaining.device
        self.stream = torch.cuda.Stream(device)
        self.ring = torch.zeros(AHEAD, len(r.state.readout), dtype=torch.int64, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(AHEAD)]
        self.parent: ParentGraph | None = None
        self._capture()

    @property
    def launches(self) -> str:
        """For the report."""
        return "one graph" if len(self.lengths) == 1 else f"{self.kind} graph{'s' * (self.kind == 'per-length')}"

    # ---- building

    def _capture(self) -> None:
        """Compile, run and capture every piece, then join them."""
        only = len(self.lengths) == 1
        pieces = [self._whole()] if only else self._pieces()
        with tqdm(total=3, desc="preparing graphs", leave=False, disable=None) as bar:
            # with no token left to emit, rounds commit nothing
            self.r.state.remaining.zero_()
            warm_up([piece.run for piece in pieces], self.stream, bar.update)
            pool = torch.cuda.graph_pool_handle()
            graphs = [capture(piece.run, pool, self.stream, piece.name) for piece in pieces]
            bar.update()
        count = len(self.lengths)
        self.draft, self.correct = graphs[0], graphs[0 if only else 1 + count]
        self.stage0, self.verify = graphs[1 : 1 + count], graphs[2 + count :]
        if only or self.kind == "per-length":
            for graph in graphs:
                graph.instantiate()
            return
        state, first = self.r.state, self.lengths[0]
        self.parent = ParentGraph(state.remaining.device)
        self.parent.add(self.draft)
        self.parent.add_switch(state.stage0_length, first, self.stage0)
        self.parent.add(self.correct)
        self.parent.add_switch(state.verify_length, first, self.verify)
        self.parent.instantiate()

    def _whole(self) -> Piece:
        """The one-length round in one piece."""
        (length,) = self.lengths
        return Piece("the round", partial(run_round, replace(self.r, switch=lambda _, body: body(length))))

    def _pieces(self) -> list[Piece]:
        """Proposal and selector; Stage 0 of every length; the correction; Stage 1 to the commit of every length."""
        r = self.r

        def draft() -> None:
            propose(r)
            select(r)

        return [
            Piece("the proposal and the selector", draft),
            *(Piece(f"Stage 0 of {u} tokens", partial(stage0, r, u)) for u in self.lengths),
            Piece("the routing correction", partial(correct, r)),
            *(Piece(f"Stage 1 of {w} tokens", partial(verify, r, w)) for w in self.lengths),
        ]

    # ---- decoding

    def decode(self) -> Iterator[RoundReadout]:
        """Run rounds until the request is finished, as `hybridspec_generation.decode`; one more may run behind it."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
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
                self.events[slot].synchronize()
                readout = parse_readout(self.ring[slot].tolist())
                finished = readout.finished
                yield readout
        finally:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _launch(self, slot: int) -> None:
        """Queue one round, and the copy of its result behind it."""
        with torch.cuda.stream(self.stream):
            if self.parent is not None:
                self.parent.launch(self.stream)
            elif len(self.lengths) == 1:
                self.draft.replay()
            else:
                self._launch_by_reading()
            self.ring[slot].copy_(self.r.state.readout, non_blocking=True)
            self.events[slot].record(self.stream)

    def _launch_by_reading(self) -> None:
        state, first = self.r.state, self.lengths[0]
        self.draft.replay()
        self.stage0[int(state.stage0_length) - first].replay()
        self.correct.replay()
        self.verify[int(state.verify_length) - first].replay()

    def close(self) -> None:
        """Free the graphs; waits for rounds in flight."""
        self.stream.synchronize()
        if self.parent is not None:
            self.parent.close()
