"""The GDN layers of a request: their buffers, verification and commit, in one of three ways.

block.py      all tokens of a block in parallel; keeps compact factors (HybridSpec)
recurrent.py  token by token; keeps the state after every token (SGLang's default)
replay.py     a ring of recent updates, folded into the state when it is full (ReplaySSM)

The last two are for comparison. All give the same outputs and states.
"""

from .base import GDNBackend, GDNParams, GDNShape
from .block import BlockGDN
from .recurrent import RecurrentGDN
from .replay import ReplayGDN

GDN_BACKENDS: dict[str, type[GDNBackend]] = {kind.name: kind for kind in (BlockGDN, RecurrentGDN, ReplayGDN)}


def make_gdn(name: str, shape: GDNShape, *, block: int, kernels: bool | None = None) -> GDNBackend:
    """The GDN layers of a request whose rounds verify up to `block` tokens.

    Args:
        name: "block", "recurrent" or "replay".
        kernels: Triton kernels or PyTorch; None takes the kernels on a GPU that has them.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in GDN_BACKENDS:
        raise ValueError(f"Unknown GDN backend {name!r}. Use one of {', '.join(map(repr, GDN_BACKENDS))}.")
    return GDN_BACKENDS[name](shape, block=block, kernels=kernels)


__all__ = ["GDN_BACKENDS", "BlockGDN", "GDNBackend", "GDNParams", "GDNShape", "RecurrentGDN", "ReplayGDN", "make_gdn"]
