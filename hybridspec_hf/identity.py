"""A target and its drafter -> short hashes that tell one pair from another."""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .drafters.dflash import DFlashDrafter
from .models import SplitTarget

# of each parameter, enough to tell two checkpoints apart
SAMPLE = 16


class PairIdentity(NamedTuple):
    """Fingerprints of a pair's weights as they are loaded: another checkpoint, dtype or size has another."""

    target: str
    drafter: str


def identify(target: SplitTarget, drafter: DFlashDrafter) -> PairIdentity:
    """The identity of a pair; of the target only what decodes text, whatever class wraps it."""
    decoder = nn.ModuleList([target.embed_tokens, *target.layers, target.norm, target.lm_head])
    return PairIdentity(fingerprint(decoder), fingerprint(drafter))


def fingerprint(module: nn.Module) -> str:
    """A short hash of names, shapes and a few elements of each weight; milliseconds, whatever the model's size."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        # weights that are elsewhere, or packed by a quantizer, have no elements to take here
        if parameter.is_meta or type(parameter.data) is not Tensor:
            continue
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // SAMPLE)].contiguous()
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
