"""Length policies that tests script: any nominal length each round, any correction."""

import random

import torch
from torch import Tensor


class RandomLengths:
    """A random nominal length each round and, with `correct`, a coin toss for the extra Stage-0 token."""

    def __init__(self, seed: int, block: int = 16, correct: bool = True) -> None:
        self.random, self.block = random.Random(seed), block
        self.extra_tokens = int(correct)

    def select(self, state) -> None:
        state.nominal_length.fill_(self.random.randint(2, self.block))

    def correct(self, state) -> Tensor:
        covered = state.stage0_length == state.nominal_length + 1
        keep = self.random.random() < 0.5 and self.extra_tokens
        return state.nominal_length + (covered.to(torch.int32) if keep else 0)
