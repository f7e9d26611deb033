"""Emitted tokens -> streamer, stopping criteria and the returned sequence."""

from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList


class Emitter:
    """Walks the tokens of each round one by one, as plain generate would have produced them.

    EOS and the length limit are decided in the round; every other criterion is called once per token here, and
    tokens behind the first stop are dropped.

    Attributes:
        budget: tokens that the request may still emit when it starts.
        eos: token ids that end the request.
        finished: whether the last emitted token ended the request.
    """

    def __init__(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList,
        streamer: Any,
    ) -> None:
        self.input_ids, self.streamer = input_ids, streamer
        # generate puts a caller's own length or EOS criterion in the place of the config's
        lengths = [int(c.max_length) for c in stopping_criteria if type(c) is MaxLengthCriteria]
        length = min(lengths or [int(generation_config.max_length or 0)])
        # a criterion is asked behind a token: there is always one
        self.budget = max(length - input_ids.shape[1], 1)
        ends = [c.eos_token_id.reshape(-1).tolist() for c in stopping_criteria if type(c) is EosTokenCriteria]
        self.eos: list[int] = [token for tokens in ends for token in tokens]
        self._criteria = [c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        self._tokens: list[int] = []
        self.finished = False

    @property
    def new_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self._tokens)

    def emit(self, tokens: list[int]) -> bool:
        """Emit tokens up to the first that ends the request; True if one did."""
        for token in tokens:
            self._tokens.append(token)
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            stopped = self._stopped()
            self.finished = stopped or token in self.eos or len(self._tokens) >= self.budget
            if self.finished:
                break
        return self.finished

    def _stopped(self) -> bool:
        if not self._criteria:
            return False
        sequence = self.sequence()
        # every criterion is called, as StoppingCriteriaList does: some of them count
        return any([bool(torch.as_tensor(criterion(sequence, None)).all()) for criterion in self._criteria])

    def sequence(self) -> Tensor:
        """`[1, T + new]`, int64: the prompt and what was emitted."""
        new = torch.tensor([self._tokens], dtype=torch.int64, device=self.input_ids.device)
        return torch.cat([self.input_ids, new], dim=1)

    def finish(self) -> Tensor:
        """End the stream and return the sequence."""
        if self.streamer is not None:
            self.streamer.end()
        return self.sequence()
