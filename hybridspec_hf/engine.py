"""What a model keeps between calls: its split view, measured cost tables, and the static buffers of one request."""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridspec_generation.cache import TargetCache
from hybridspec_generation.config import CostTable
from hybridspec_generation.state import RoundState

from .drafters.block import BlockDrafter, DraftContext
from .drafters.dflash import DFlashDrafter
from .models import SplitTarget, split_target

CAPACITY_STEP = 256


@dataclass
class Buffers:
    """Static buffers of one request: the target's cache and, with a drafter, its context."""

    cache: TargetCache
    context: DraftContext | None

    def reset(self) -> None:
        """Empty cache and context: nothing of the last request stays, finite or not."""
        self.cache.reset()
        for buffer in self.context or ():
            buffer.zero_()


@dataclass
class Engine:
    """One target with one drafter (or none).

    Attributes:
        target: the split view.
        drafter_dtype: dtype and device of the drafter's weights when the engine was built.
        costs: the pair's latency tables by what verifies the GDN layers, once they were measured.
    """

    target: SplitTarget
    drafter_dtype: tuple[torch.dtype, torch.device] | None
    costs: dict[str, CostTable] = field(default_factory=dict)
    _idle: Buffers | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def borrow(self, drafter: DFlashDrafter | None, tokens: int, gdn_backend: str = "block") -> Buffers:
        """Buffers for `tokens` prompt and new tokens plus a block; the last request's, if they fit and are free.

        Raises:
            RuntimeError: if the memory is not there.
        """
        block = 1 if drafter is None else drafter.config.block_size
        assert block is not None
        capacity = -(-(tokens + block) // CAPACITY_STEP) * CAPACITY_STEP
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and fits(idle.cache, capacity, block, gdn_backend):
            idle.reset()
            return idle
        # freed before the new ones are allocated
        del idle
        try:
            cache = TargetCache(self.target.cache_shape, capacity=capacity, block=block, gdn_backend=gdn_backend)
            return Buffers(cache, None if drafter is None else DraftContext.allocate(drafter, capacity))
        except RuntimeError as error:
            raise RuntimeError(
                f"HybridSpec could not allocate its static cache for {capacity} tokens (prompt, new tokens and one "
                "block). Lower max_new_tokens or max_length, shorten the prompt, or leave out "
                'gdn_backend="recurrent", which keeps a state for every token of a block.'
            ) from error

    def bind(self, drafter: DFlashDrafter | None, buffers: Buffers) -> BlockDrafter | None:
        """The drafter with the target's embedding and head, on the borrowed context."""
        if drafter is None or buffers.context is None:
            return None
        return BlockDrafter(drafter, self.target.embed_tokens, self.target.lm_head, buffers.context)

    def new_state(self, anchor: Tensor, block: int, eos: list[int], remaining: int) -> RoundState:
        """Round buffers of a request whose first token `anchor` `[1]` is out and that may emit `remaining` more."""
        target = self.target
        state = RoundState(
            block=block,
            hidden_size=target.hidden_size,
            top_k=target.top_k,
            feature_size=len(target.feature_layers) * target.hidden_size,
            eos=eos,
            dtype=target.cache_shape.dtype,
            device=target.cache_shape.device,
        )
        state.anchor.copy_(anchor)
        state.remaining.fill_(remaining)
        return state

    def give_back(self, buffers: Buffers) -> None:
        """Keep the buffers for the next request."""
        with self._lock:
            self._idle = buffers


def fits(cache: TargetCache, capacity: int, block: int, gdn_backend: str) -> bool:
    """Whether the last request's cache serves one that needs this much, without holding far more."""
    return capacity <= cache.capacity <= 2 * capacity and cache.block == block and cache.gdn.name == gdn_backend


# the engines of a model die with it: they hold its submodules, never the model itself
_engines: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Any, Engine]]"
_engines = weakref.WeakKeyDictionary()
_engines_lock = threading.Lock()


class _NoDrafter:
    """Key of the engine that decodes autoregressively."""


_NO_DRAFTER = _NoDrafter()


def get_engine(model: nn.Module, drafter: DFlashDrafter | None) -> Engine:
    """The engine of this pair; its view of the model is taken anew, its buffers and costs are kept while they fit.

    Raises:
        ValueError: if the model has no split forward here.
    """
    with _engines_lock:
        engines = _engines.setdefault(model, weakref.WeakKeyDictionary())
        key = _NO_DRAFTER if drafter is None else drafter
        known = engines.get(key)
        # modules may have been replaced since the last call (an adapter, new embeddings)
        target = split_target(model, () if drafter is None else tuple(drafter.config.target_layer_ids or ()))
        drafter_dtype = None if drafter is None else (drafter.dtype, drafter.device)
        if known is None or known.target.cache_shape != target.cache_shape or known.drafter_dtype != drafter_dtype:
            known = engines[key] = Engine(target, drafter_dtype)
        known.target = target
        return known


def release(model: nn.Module) -> None:
    """Free the buffers and measured tables that `model`'s engines hold; the next call builds them again."""
    with _engines_lock:
        engines = _engines.pop(model, None)
    if engines is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
