"""What a target and a drafter must offer to take part in a round."""

from typing import Protocol

from torch import Tensor

from .cache import CacheShape, TargetCache
from .state import Draft, RouterBoundary


class Target(Protocol):
    """A target model whose forward can stop at the router boundary of Layer 0 and resume there.

    Attributes:
        cache_shape: sizes of the static cache it works on.
        hidden_size: width of the residual stream. top_k: experts per token, 0 for a dense target.
        num_moe_layers: MoE layers, 0 for a dense target.
    """

    cache_shape: CacheShape
    hidden_size: int
    top_k: int
    num_moe_layers: int

    def stage0(self, tokens: Tensor, cache: TargetCache, boundary: RouterBoundary) -> None:
        """Run Layer 0 on `tokens` `[u]` up to its router.

        Writes rows 0..u-1 of the boundary and of Layer 0's compact factors.
        """
        ...

    def stage1(self, w: int, cache: TargetCache, boundary: RouterBoundary, features: Tensor | None) -> Tensor:
        """Resume at Layer 0's experts with the first w boundary rows and run the rest of the model.

        Writes the drafter's features into `features` `[W, A*H]` (rows 0..w-1) and returns the final hidden states
        `[w, H]` that the head reads. Row w and later of the boundary are never read.
        """
        ...

    def next_tokens(self, hidden: Tensor, out: Tensor) -> None:
        """Write the greedy next token after each row of `hidden` `[w, H]` to `out` `[w]`, int64."""
        ...


class Drafter(Protocol):
    """A block drafter bound to a target, with a static context of its own.

    Attributes:
        block_size: W = D + 1.
    """

    block_size: int

    def append(self, features: Tensor, start: Tensor) -> None:
        """Write context entries for target features `[T, A*H]` of the tokens at positions `start` `[1]`, ... .

        Entries past the committed length are overwritten by later calls; `propose` never sees them.
        """
        ...

    def propose(self, anchor: Tensor, length: Tensor, draft: Draft) -> None:
        """Draft into `draft` the D tokens after `anchor` `[1]`, at position `length` `[1]` behind the context."""
        ...
