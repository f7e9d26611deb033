"""What one generate call did: rounds, lengths, times. The numbers behind AL, mean w and tokens per second."""

from dataclasses import dataclass, field
from typing import Any

from .decode import RoundReadout


@dataclass(kw_only=True)
class DecodeReport:
    """Filled while a request decodes; one entry per round in each list.

    Attributes:
        policy: "ar" without a drafter, else the config's policy.
        gdn: how the GDN layers were verified: the backend, and Triton kernels or PyTorch.
        launches: how rounds ran: "parent graph", "per-length graphs", "one graph", "kernels" (launched one by one) or
            "modules" (the model's own, one by one).
        block: W, the longest target input (1 for "ar").
        prompt_tokens, new_tokens: sizes of the prompt and of the output, the prefill's first token included.
        emitted, accepted: tokens emitted and draft tokens accepted (before EOS or budget cut) in each round.
        nominal_lengths, stage0_lengths, verify_lengths: w0, u and w of each round.
        prefill_seconds, decode_seconds: wall-clock times.
        capture_seconds: compiling and capturing graphs, in the request that needed them first; in none of the others.
        cost: where an adaptive policy's latency curve came from: "given", "measured now", "from the cache folder" or
            "kept from an earlier request".
        notes: what a user should know, such as a table that was measured or a fallback that was taken.
    """

    policy: str
    gdn: str = ""
    launches: str = "modules"
    block: int = 1
    prompt_tokens: int = 0
    new_tokens: int = 0
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nominal_lengths: list[int] = field(default_factory=list)
    stage0_lengths: list[int] = field(default_factory=list)
    verify_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    capture_seconds: float = 0.0
    cost: str = ""
    notes: list[str] = field(default_factory=list)

    def add(self, readout: RoundReadout) -> None:
        """Append one round."""
        self.emitted.append(len(readout.tokens))
        self.accepted.append(readout.num_accepted)
        self.nominal_lengths.append(readout.nominal_length)
        self.stage0_lengths.append(readout.stage0_length)
        self.verify_lengths.append(readout.verify_length)

    @property
    def rounds(self) -> int:
        """Verification rounds."""
        return len(self.emitted)

    @property
    def acceptance_length(self) -> float:
        """AL: tokens emitted per verification round (the prefill's token is not a round's)."""
        return sum(self.emitted) / max(self.rounds, 1)

    @property
    def mean_verify_length(self) -> float:
        """Tokens verified per round."""
        return sum(self.verify_lengths) / max(self.rounds, 1)

    @property
    def verified_tokens(self) -> int:
        """Tokens that went through the whole target in rounds."""
        return sum(self.verify_lengths)

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput: tokens emitted in rounds per second of decoding, prefill excluded."""
        return sum(self.emitted) / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures as JSON types."""
        derived = ("rounds", "acceptance_length", "mean_verify_length", "verified_tokens", "tokens_per_second")
        return {**self.__dict__, **{name: getattr(self, name) for name in derived}}
