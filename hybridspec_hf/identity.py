"""A target and its drafter -> short hashes that tell one pair from another."""

import hashlib
import random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .drafters.dflash import DFlashDrafter
from .models import SplitTarget

# of each parameter, enough to tell two checkpoints apart
SAMPLE = 16
# an equal step may stay in one column
_random = random.Random(0)
PLACES = (0.0, *(_random.random() for _ in range(SAMPLE - 1)))


class PairIdentity(NamedTuple):
    """Fingerprints of a pair's weights as they are loaded: another checkpoint, dtype or size has another."""

    target: str
    drafter: str


def identify(target: SplitTarget, drafter: DFlashDrafter) -> PairIdentity:
    """The identity of a pair; of the target only what decodes text, whatever class wraps it."""
    decoder = nn.ModuleList([target.embed_tokens, *target.layers, target.norm, target.lm_head])
    return PairIdentity(fingerprint(decoder), fingerprint(drafter))


def fingerprint(module: nn.Module) -> str:
    """A short hash of names, shapes and a few elements of each weight; the time is that of so many tiny reads."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        # weights that are elsewhere, or packed by a quantizer, have no elements to take here
        if parameter.is_meta or type(parameter.data) is not Tensor:
            continue
        sample = parameter.detach().flatten()[positions(parameter.numel(), parameter.device)]
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def positions(size: int, device: torch.device) -> Tensor:
    """At most `SAMPLE` of `size` elements, `[n]`, int64, spread over rows and columns; the same on every machine."""
    chosen = range(size) if size <= SAMPLE else [int(size * place) for place in PLACES]
    return torch.tensor(chosen, dtype=torch.int64, device=device)
