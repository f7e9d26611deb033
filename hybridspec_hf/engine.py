"""What a model keeps between calls: its split view, measured cost tables, and the buffers of its last request."""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hybridspec_generation.cache import TargetCache
from hybridspec_generation.protocols import Drafter, Target
from hybridspec_generation.round import Round
from hybridspec_generation.state import MAX_EOS, RoundState
from hybridspec_generation.tables import CostTable

from .buffers import Buffers, bucket, fits
from .drafters import kernel_drafter
from .drafters.block import BlockDrafter, DraftContext
from .drafters.dflash import DFlashDrafter
from .drafters.kernel_drafter import KernelDrafter
from .identity import PairIdentity, identify
from .models import SplitTarget, kernel_support, split_target
from .models.kernel_target import KernelTarget


# compared and hashed by identity
@dataclass(eq=False)
class Engine:
    """One target with one drafter (or none).

    Attributes:
        target: the split view.
        drafter_dtype: dtype and device of the drafter's weights when the engine was built.
        costs: the pair's latency tables by what verifies the GDN layers and how rounds are launched, once measured.
    """

    target: SplitTarget
    drafter_dtype: tuple[torch.dtype, torch.device] | None
    costs: dict[str, CostTable] = field(default_factory=dict)
    _idle: Buffers | None = None
    _identity: tuple[tuple[tuple[int, ...], tuple[int, ...]], PairIdentity] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def borrow(self, drafter: DFlashDrafter | None, tokens: int, gdn_backend: str = "block", eos: int = 0) -> Buffers:
        """Buffers for `tokens` prompt and new tokens plus a block, and `eos` EOS ids; the last request's, if they fit.

        Raises:
            RuntimeError: if the memory is not there.
        """
        block = 1 if drafter is None else drafter.config.block_size
        assert block is not None
        capacity = bucket(tokens + block, self.target.cache_shape.device)
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None and fits(idle, capacity, block, gdn_backend, eos):
            idle.reset()
        else:
            if idle is not None:
                idle.forget()
            # freed before the new ones are allocated
            del idle
            idle = self._allocate(drafter, capacity, block, gdn_backend, eos)
        weights = addresses(self.target, drafter)
        if idle.weights != weights:
            idle.forget()
            idle.weights = weights
        return idle

    def _allocate(
        self, drafter: DFlashDrafter | None, capacity: int, block: int, gdn_backend: str, eos: int
    ) -> Buffers:
        try:
            cache = TargetCache(self.target.cache_shape, capacity=capacity, block=block, gdn_backend=gdn_backend)
            context = None if drafter is None else DraftContext.allocate(drafter, capacity)
            return Buffers(cache, context, self.new_state(block, eos))
        except RuntimeError as error:
            raise RuntimeError(
                f"HybridSpec could not allocate its static cache for {capacity} tokens (prompt, new tokens and one "
                "block). Lower max_new_tokens or max_length, shorten the prompt, or leave out "
                'gdn_backend="recurrent", which keeps a state for every token of a block.'
            ) from error

    def identity(self, drafter: DFlashDrafter) -> PairIdentity:
        """Which pair this is; looked at once, while nobody moves or writes the weights. Another's costs go."""
        weights = addresses(self.target, drafter), versions(self.target, drafter)
        if self._identity is None or self._identity[0] != weights:
            before, self._identity = self._identity, (weights, identify(self.target, drafter))
            if before is not None and before[1] != self._identity[1]:
                self.costs.clear()
        return self._identity[1]

    def new_state(self, block: int, eos: int = 0) -> RoundState:
        """Round buffers with room for `eos` EOS ids."""
        target = self.target
        with torch.inference_mode(False):
            return RoundState(
                block=block,
                hidden_size=target.hidden_size,
                top_k=target.top_k,
                feature_size=len(target.feature_layers) * target.hidden_size,
                dtype=target.cache_shape.dtype,
                device=target.cache_shape.device,
                max_eos=max(eos, MAX_EOS),
            )

    def bind(self, drafter: DFlashDrafter | None, buffers: Buffers) -> Drafter | None:
        """The drafter with the target's embedding and head, on the borrowed context."""
        if drafter is None or buffers.context is None:
            return None
        target, bound = self.target, buffers.drafter
        reason = buffers.broken or kernel_drafter.why_not(drafter, target.embed_tokens, target.lm_head)
        kind = BlockDrafter if reason else KernelDrafter
        if type(bound) is not kind or (bound.embed_tokens, bound.lm_head) != (target.embed_tokens, target.lm_head):
            bound = buffers.drafter = kind(drafter, target.embed_tokens, target.lm_head, buffers.context)
        elif isinstance(bound, KernelDrafter):
            bound.refresh()
        return bound

    def round_target_reason(self, cache: TargetCache) -> str | None:
        """Why the rounds on a cache cannot run in kernels; None if they can."""
        return kernel_support.why_not(self.target, cache)

    def round_target(self, buffers: Buffers) -> tuple[Target, str | None]:
        """Who runs the rounds: the target in kernels; or its modules, and why."""
        reason = buffers.broken or self.round_target_reason(buffers.cache)
        buffers.cache.clear_rejected = reason is not None
        if reason is not None:
            return self.target, reason
        if buffers.target is None:
            buffers.target = KernelTarget(self.target, buffers.cache)
        else:
            buffers.target.refresh(self.target)
        return buffers.target, None

    def by_modules(self, drafter: DFlashDrafter | None, buffers: Buffers, r: Round) -> Round:
        """A prefilled round whose target and drafter run module by module."""
        buffers.cache.clear_rejected = True
        buffers.cache.gdn.kernels = buffers.state.kernels = False
        buffers.drop_graphs()
        buffers.target = buffers.drafter = None
        bound = None
        if drafter is not None and buffers.context is not None:
            bound = BlockDrafter(drafter, self.target.embed_tokens, self.target.lm_head, buffers.context)
        return replace(r, target=self.target, drafter=bound)

    def give_back(self, buffers: Buffers) -> None:
        """Keep the buffers for the next request."""
        with self._lock:
            self._idle = buffers

    def close(self) -> None:
        """Free the graphs of idle buffers."""
        with self._lock:
            idle, self._idle = self._idle, None
        if idle is not None:
            idle.forget()


def sizes(target: SplitTarget) -> tuple[Any, ...]:
    """What buffers are made for."""
    return target.cache_shape, target.hidden_size, target.top_k, target.num_experts, target.feature_layers


def addresses(target: SplitTarget, drafter: DFlashDrafter | None) -> tuple[int, ...]:
    """Where the pair's weights are: captured graphs read them there."""
    return tuple(parameter.data_ptr() for parameter in parameters(target, drafter))


def versions(target: SplitTarget, drafter: DFlashDrafter | None) -> tuple[int, ...]:
    """How often each of the pair's weights was written in place."""
    # of inference tensors torch does not count it
    return tuple(0 if weight.is_inference() else weight._version for weight in parameters(target, drafter))


def parameters(target: SplitTarget, drafter: DFlashDrafter | None) -> Iterator[nn.Parameter]:
    """The weights of the pair."""
    modules = [target.embed_tokens, target.lm_head, target.norm, *target.layers]
    for module in modules if drafter is None else [*modules, drafter]:
        yield from module.parameters()


class _Engines:
    """The engines of one owner by model; of the owner's copies and pickles nothing of it is a part."""

    def __init__(self) -> None:
        self.by_model: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: Any) -> "_Engines":
        return _Engines()

    def __reduce__(self) -> Any:
        return _Engines, ()


# an engine holds its drafter and the model's submodules, never the model itself: it lives on the drafter, in a cycle
# that ends with it, or here if there is none
_without_drafter = _Engines()
_engines_lock = threading.Lock()
_ATTRIBUTE = "_hybridspec_engines"
# for release: all engines of a model
_of_model: "weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Engine]]" = weakref.WeakKeyDictionary()


def _engines_of(drafter: DFlashDrafter) -> _Engines:
    if not isinstance(getattr(drafter, _ATTRIBUTE, None), _Engines):
        setattr(drafter, _ATTRIBUTE, _Engines())
    engines: _Engines = getattr(drafter, _ATTRIBUTE)
    return engines


def get_engine(model: nn.Module, drafter: DFlashDrafter | None) -> Engine:
    """The engine of this pair; its view of the model is taken anew, its buffers and costs are kept while they fit.

    Raises:
        ValueError: if the model has no split forward here.
    """
    with _engines_lock:
        owner = _without_drafter if drafter is None else _engines_of(drafter)
        known = owner.by_model.get(model)
        # modules may have been replaced since the last call (an adapter, new embeddings)
        target = split_target(model, () if drafter is None else tuple(drafter.config.target_layer_ids or ()))
        drafter_dtype = None if drafter is None else (drafter.dtype, drafter.device)
        if known is None or known.drafter_dtype != drafter_dtype or sizes(known.target) != sizes(target):
            known = owner.by_model[model] = Engine(target, drafter_dtype)
        # again: release takes them out
        _of_model.setdefault(model, weakref.WeakSet()).add(known)
        known.target = target
        return known


def release(model: nn.Module) -> None:
    """Free the buffers, graphs and measured tables that `model`'s engines hold; the next call builds them again."""
    with _engines_lock:
        for engine in _of_model.pop(model, ()):
            engine.close()
            engine.costs.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
