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

from .strategy import hybridspec_decoding

MODE = "hybridspec"
METHOD = "_hybridspec_decoding"
OPTIONS = ("generation_mode", "hybridspec_config")

_original_get_generation_mode: Callable[..., Any] | None = None


def register() -> None:
    """Make `generation_mode="hybridspec"` known to generate; a second call changes nothing.

    Raises:
        ImportError: if this transformers already defines one of the names.
    """
    global _original_get_generation_mode
    if _original_get_generation_mode is not None:
        return
    for option in OPTIONS:
        if hasattr(GenerationConfig, option):
            raise ImportError(
                f"transformers already defines GenerationConfig.{option}; hybridspec_hf would override it. "
                "Update hybridspec_hf, or use a supported transformers release."
            )
    _original_get_generation_mode = GenerationConfig.get_generation_mode
    for option in OPTIONS:
        setattr(GenerationConfig, option, None)
    GenerationConfig.get_generation_mode = wraps(_original_get_generation_mode)(get_generation_mode)
    generation_utils.GENERATION_MODES_MAPPING[MODE] = METHOD
    setattr(GenerationMixin, METHOD, hybridspec_decoding)


def unregister() -> None:
    """Take everything that `register` added away again; a second call changes nothing."""
    global _original_get_generation_mode
    if _original_get_generation_mode is None:
        return
    GenerationConfig.get_generation_mode = _original_get_generation_mode
    _original_get_generation_mode = None
    for option in OPTIONS:
        delattr(GenerationConfig, option)
    del generation_utils.GENERATION_MODES_MAPPING[MODE]
    delattr(GenerationMixin, METHOD)


def get_generation_mode(self: GenerationConfig, assistant_model: Any = None) -> Any:
    """`GenerationConfig.get_generation_mode`, with "hybridspec" when `generation_mode` asks for it.

    Raises:
        ValueError: for an unknown `generation_mode`, options of the mode without it, or a config that asks for beams,
            contrastive search or another way to speculate at the same time.
    """
    assert _original_get_generation_mode is not None
    if self.generation_mode is None:
        if self.hybridspec_config is not None:
            raise ValueError(
                "hybridspec_config was given without generation_mode, so it would have no effect. "
                'Add generation_mode="hybridspec", or remove hybridspec_config.'
            )
        return _original_get_generation_mode(self, assistant_model)
    if self.generation_mode != MODE:
        raise ValueError(
            f"Unknown generation_mode {self.generation_mode!r}. Use {MODE!r}, or None for transformers' own choice."
        )
    own_mode = _original_get_generation_mode(self, None)
    if own_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation_mode={MODE!r} cannot be combined with the options that select {own_mode.value}. Remove them "
            "(num_beams, penalty_alpha, dola_layers, prompt_lookup_num_tokens, use_mtp, ...), or drop generation_mode."
        )
    return MODE
