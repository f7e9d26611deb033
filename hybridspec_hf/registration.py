"""Everything that touches transformers: the decoding mode "hybridspec", its options, and undo.

Four names change: two class attributes on `GenerationConfig` (so that generate accepts `generation_mode` and
`hybridspec_config`, and a config carries them through JSON), its `get_generation_mode`, one entry of generate's table
of modes and the decoding method behind it. Calls without `generation_mode` run the code they always ran.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation import utils as generation_utils
from transformers.generation.configuration_utils import GenerationMode

from .drafters.dflash import DFlashDrafter
from .strategy import hybridspec_decoding

MODE = "hybridspec"
METHOD = "_hybridspec_decoding"
OPTIONS = ("generation_mode", "hybridspec_config")


def register() -> None:
    """Make `generation_mode="hybridspec"` known to generate; a second call changes nothing.

    Raises:
        ImportError: if this transformers already defines one of the names.
    """
    if _original_getter() is not None:
        if GenerationConfig.get_generation_mode.__globals__ is globals():
            return
        # left by an earlier import of this package, whose classes are no longer ours
        unregister()
    for option in OPTIONS:
        if hasattr(GenerationConfig, option):
            raise ImportError(
                f"transformers already defines GenerationConfig.{option}; hybridspec_hf would override it. "
                "Update hybridspec_hf, or use a supported transformers release."
            )
        setattr(GenerationConfig, option, None)
    GenerationConfig.get_generation_mode = extend_getter(GenerationConfig.get_generation_mode)
    generation_utils.GENERATION_MODES_MAPPING[MODE] = METHOD
    setattr(GenerationMixin, METHOD, hybridspec_decoding)


def unregister() -> None:
    """Take everything that `register` added away again; a second call changes nothing."""
    original = _original_getter()
    if original is None:
        return
    GenerationConfig.get_generation_mode = original
    for option in OPTIONS:
        delattr(GenerationConfig, option)
    del generation_utils.GENERATION_MODES_MAPPING[MODE]
    delattr(GenerationMixin, METHOD)


def _original_getter() -> Callable[..., Any] | None:
    """transformers' own `get_generation_mode` while ours stands in its place, else None."""
    return getattr(GenerationConfig.get_generation_mode, "hybridspec_original", None)


def extend_getter(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GenerationConfig.get_generation_mode` that also knows "hybridspec".

    The result raises ValueError for an unknown `generation_mode`, for options or a drafter of the mode without it, and
    for a config that asks for beams, contrastive search or another way to speculate at the same time.
    """

    @wraps(original)
    def get_generation_mode(self: GenerationConfig, assistant_model: Any = None) -> Any:
        if self.generation_mode is None:
            if self.hybridspec_config is not None:
                raise ValueError(
                    "hybridspec_config was given without generation_mode, so it would have no effect. "
                    'Add generation_mode="hybridspec", or remove hybridspec_config.'
                )
            if isinstance(assistant_model, DFlashDrafter):
                raise ValueError(
                    "assistant_model is a DFlashDrafter, which transformers' own assisted generation cannot use. "
                    'Add generation_mode="hybridspec".'
                )
            return original(self, assistant_model)
        if self.generation_mode != MODE:
            raise ValueError(
                f"Unknown generation_mode {self.generation_mode!r}. "
                f"Use {MODE!r}, or None for transformers' own choice."
            )
        own_mode = original(self, None)
        if own_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"generation_mode={MODE!r} cannot be combined with the options that select {own_mode.value}. Remove "
                "them (num_beams, penalty_alpha, dola_layers, prompt_lookup_num_tokens, use_mtp, ...), or drop "
                "generation_mode."
            )
        if assistant_model is not None:
            # on generate's copy of the config: without it, a drafter of another vocabulary meets transformers' request
            # for two tokenizers instead of our own check, which names both sizes
            self.speculation_type = "dflash"
        return MODE

    get_generation_mode.hybridspec_original = original  # type: ignore[attr-defined]
    return get_generation_mode
