"""THE LOOP: a prepared request -> rounds until EOS or the output budget. Start reading here, then `round/`."""

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from .round import Round, run_round
from .state import READOUT_HEADER, RoundState


class RoundReadout(NamedTuple):
    """What the host learns of a finished round.

    Attributes:
        tokens: the emitted tokens, at least one.
        finished: whether EOS or the output budget ended the request.
        num_accepted: A, before truncation at EOS or the budget.
        nominal_length, stage0_length, verify_length: w0, u and w.
    """

    tokens: list[int]
    finished: bool
    num_accepted: int
    nominal_length: int
    stage0_length: int
    verify_length: int


def decode(r: Round) -> Generator[RoundReadout]:
    """Run rounds until the request is finished; the caller may stop earlier by leaving the iterator.

    The round's cache holds the prompt, and its state the first anchor, before the first call.
    """
    finished = False
    while not finished:
        run_round(r)
        readout = read_round(r.state)
        finished = readout.finished
        yield readout


def read_round(state: RoundState) -> RoundReadout:
    """Copy the round's result to the host: the one wait of a round."""
    return parse_readout(state.readout.cpu().numpy())


def parse_readout(readout: np.ndarray) -> RoundReadout:
    """`RoundState.readout`, copied to the host, -> what it says; without PyTorch, see `GraphedRounds.decode`."""
    finished, emitted, accepted, nominal, stage0, verify = readout[:READOUT_HEADER].view(np.int32).tolist()[:6]
    tokens = readout[READOUT_HEADER:].tolist()
    return RoundReadout(tokens[:emitted], bool(finished), accepted, nominal, stage0, verify)
