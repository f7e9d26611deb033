"""Length policies that tests script: any nominal length each round, any correction."""

import random

import torch

from hybridspec_kernels import limit_length_ref


class RandomLengths:
    """A random nominal length each round and, with `correct`, a coin toss for the extra Stage-0 token."""

    def __init__(self, seed: int, block: int = 16, correct: bool = True) -> None:
        self.random, self.block = random.Random(seed), block
        self.extra_tokens, self.corrects = int(correct), correct

    def select(self, state) -> None:
        state.nominal_length.fill_(self.random.randint(2, self.block))
        wanted = state.nominal_length + self.extra_tokens
        state.stage0_length.copy_(limit_length_ref(wanted, state.remaining, self.block))

    def correct(self, state) -> None:
        keep = self.random.random() < 0.5 and self.extra_tokens
        longest = state.nominal_length + int(keep)
        torch.minimum(longest, state.stage0_length, out=state.verify_length)
