"""Every device buffer of a round, one line each with shape and dtype."""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridspec_kernels import MAX_TOKENS, has_kernels

# room for a request's EOS ids; unused places hold no token's id
MAX_EOS, NO_TOKEN = 8, -1
# of the readout, in int64: eight int32, six of them used
READOUT_HEADER = 4


class Draft(NamedTuple):
    """A proposal block and the signals that the selector reads.

    Attributes:
        tokens: `[D]`, int64, the drafter's top-1 tokens.
        confidence: `[D]`, fp32, their probabilities.
        entropy: `[D]`, fp32, nats.
    """

    tokens: Tensor
    confidence: Tensor
    entropy: Tensor


class RouterBoundary(NamedTuple):
    """What Stage 0 keeps for Stage 1: rows 0..u-1 are valid after Stage 0.

    Attributes:
        hidden: `[W, H]`, the normalised input of Layer 0's MLP or MoE block.
        residual: `[W, H]`, the residual stream to which the block's output is added.
        expert_ids: `[W, topk]`, int64 (topk = 0 for a dense target).
        expert_weights: `[W, topk]`, the renormalised routing weights in the model's dtype.
    """

    hidden: Tensor
    residual: Tensor
    expert_ids: Tensor
    expert_weights: Tensor


class RoundState:
    """Buffers of one request's rounds. W is the block size (1 for autoregressive decoding), D = W - 1.

    Lengths are tensors: the host learns them only from the readout after a round, or through the round's switch.
    The buffers serve one request after another: `start` begins a new one.
    """

    def __init__(
        self, *, block: int, hidden_size: int, top_k: int, feature_size: int, dtype: torch.dtype,
        device: torch.device, max_eos: int = MAX_EOS,
    ) -> None:  # fmt: skip
        def ints(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def floats(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.block = block
        self.eos = ints(max_eos).fill_(NO_TOKEN)  # [E]
        self.remaining = ints(1)  # [1] output budget, in tokens

        self.target_input = ints(block)  # [W] anchor, then the proposal block
        self.confidence = floats(block - 1)  # [D] top-1 probability
        self.entropy = floats(block - 1)  # [D] nats
        self.draft = Draft(self.proposal, self.confidence, self.entropy)  # what a drafter writes, views of the above
        self.prefix_prob = floats(block - 1)  # [D] p_i, P(first i draft tokens accepted)

        self.boundary = RouterBoundary(
            floats(block, hidden_size, dtype=dtype),
            floats(block, hidden_size, dtype=dtype),
            ints(block, top_k),
            floats(block, top_k, dtype=dtype),
        )
        self.features = floats(block, feature_size, dtype=dtype)  # [W, A*H] what the drafter reads of the target
        self.target_tokens = ints(block)  # [W] y_i, the target's choice after each input token

        # [4+W] what the host reads after a round: the fields below, which are views of it, see decode.parse_readout
        self.readout = ints(READOUT_HEADER + block)
        header = self.readout[:READOUT_HEADER].view(torch.int32)
        # [1] each, int32: whether EOS or the budget ended the request; m = emitted tokens, after EOS and budget; A
        self.finished, self.num_committed, self.num_accepted = header[:1], header[1:2], header[2:3]
        # [1] each, int32: w0, u, w
        self.nominal_length, self.stage0_length, self.verify_length = header[3:4], header[4:5], header[5:6]
        self.emitted = self.readout[READOUT_HEADER:]  # [W] d_1..d_A, x_new; rows from num_committed on are stale

        # Triton kernels run the small steps between the model's forwards
        self.kernels = block <= MAX_TOKENS and has_kernels(self.readout.device)

    def start(self, anchor: Tensor, eos: list[int], remaining: int) -> None:
        """Begin a request whose first token `anchor` `[1]` is out and that may emit `remaining` more."""
        self.anchor.copy_(anchor)
        self.eos.fill_(NO_TOKEN)
        self.eos[: len(eos)] = torch.tensor(eos, dtype=torch.int64, device=self.eos.device)
        self.remaining.fill_(remaining)
        self.finished.zero_()
        # no round has emitted anything yet
        self.num_committed.zero_()

    @property
    def anchor(self) -> Tensor:
        """`[1]`, int64, the newest emitted token, not yet processed by the target."""
        return self.target_input[:1]

    @property
    def proposal(self) -> Tensor:
        """`[D]`, int64, the draft tokens."""
        return self.target_input[1:]
