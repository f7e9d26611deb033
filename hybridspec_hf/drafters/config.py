"""A DFlash drafter's configuration, normalised: one spelling per fact, whatever schema its file used."""

import os
from dataclasses import field
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from hybridspec_hf.drafters.schemas import normalise, to_nested

FULL, SLIDING = "full_attention", "sliding_attention"

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@strict
class DFlashConfig(PreTrainedConfig):
    """What the drafter's modules and the decoding engine need to know, and nothing else.

    Args:
        vocab_size: size of the target's vocabulary; the drafter borrows the target's embedding and lm_head.
        hidden_size: width of the drafter, equal to the target's.
        block_size: `W`, the anchor and the `W - 1` mask tokens after it.
        mask_token_id: the token that stands at the positions to be proposed.
        target_layer_ids: target decoder layers whose outputs, concatenated in this order, are the features.
        layer_types: `"full_attention"` or `"sliding_attention"`, one per drafter layer.
        sliding_window: number of tokens a sliding layer sees, the current one included.
        is_causal: None: sliding layers are causal, full layers bidirectional. A bool rules all layers.
        window_anchor: `"query"` counts the window from each query, `"block"` from the block's anchor.
        num_target_layers: the target's number of layers, if the file names it.
        target_hidden_size: the target's width, if the file names it.

    Raises:
        ValueError: a field is missing, out of range, or contradicts another.
    """

    model_type = "hybridspec_dflash"

    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 0.0
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    block_size: int = 0
    mask_token_id: int = -1
    target_layer_ids: list[int] = field(default_factory=list)
    layer_types: list[str] = field(default_factory=list)
    sliding_window: int | None = None
    is_causal: bool | None = None
    window_anchor: Literal["query", "block"] = "query"
    num_target_layers: int | None = None
    target_hidden_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not self.hidden_size:
            # transformers builds an empty config of the class to learn its defaults
            return
        self.layer_types = self.layer_types or [FULL] * self.num_hidden_layers
        self._check_sizes()
        self._check_block()
        self._check_layer_types()

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> "DFlashConfig":
        """Read a drafter's `config.json` in z-lab's legacy or nested schema, or speculators' schema.

        Args:
            raw: the file as a dict, as it lies on disk; not a dict that another config class has written.

        Raises:
            ValueError: a key is missing, unknown, or asks for maths that this drafter does not have.
        """
        try:
            return cls(**normalise(raw))
        except (StrictDataclassError, TypeError) as error:
            raise ValueError(
                f"Drafter config has a value of the wrong type: {error}. Correct it in the drafter's config.json."
            ) from error

    def causal(self, layer: int) -> bool:
        """Whether queries of drafter layer `layer` are blind to later positions of their block."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Tokens that drafter layer `layer` sees, the current one included; None if all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_json_string(self, use_diff: bool = True) -> str:
        """`config.json` in z-lab's nested schema, which z-lab's own package reads as well."""
        del use_diff
        return to_nested(self)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write `config.json` in z-lab's nested schema.

        Raises:
            ValueError: that schema, or z-lab's reader, cannot express this drafter.
        """
        if self.num_target_layers is None:
            raise ValueError(
                "The drafter's config has num_target_layers=None. z-lab's package cannot read a file without it. "
                "Set drafter.config.num_target_layers to the target's num_hidden_layers and save again."
            )
        if self.window_anchor != "query" and SLIDING in self.layer_types:
            raise ValueError(
                f"The drafter's sliding window has window_anchor={self.window_anchor!r} (speculators' rule). "
                "z-lab's schema knows only windows counted from each query, so a copy would draft differently. "
                "Keep the original folder."
            )
        super().save_pretrained(save_directory, *args, **kwargs)

    def _check_sizes(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise _invalid(name, getattr(self, name), "a size must be a positive integer")
        if self.target_hidden_size not in (None, self.hidden_size):
            reason = f"embedding and lm_head are the target's, so it must equal hidden_size={self.hidden_size}"
            raise _invalid("target_hidden_size", self.target_hidden_size, reason)
        if self.rope_theta <= 0:
            raise _invalid("rope_theta", self.rope_theta, "rotary positions need a positive base")
        if self.num_attention_heads % self.num_key_value_heads:
            reason = f"num_attention_heads={self.num_attention_heads} is not a multiple of it"
            raise _invalid("num_key_value_heads", self.num_key_value_heads, reason)
        if self.head_dim % 2:
            raise _invalid("head_dim", self.head_dim, "rotary positions rotate pairs, so it must be even")

    def _check_block(self) -> None:
        if self.block_size < 2:
            raise _invalid("block_size", self.block_size, "a block is the anchor and at least one proposal")
        if not 0 <= self.mask_token_id < self.vocab_size:
            reason = f"it must be a row of the embedding, 0 to vocab_size - 1 = {self.vocab_size - 1}"
            raise _invalid("mask_token_id", self.mask_token_id, reason)
        ids = self.target_layer_ids
        if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
            raise _invalid("target_layer_ids", ids, "it must list distinct target decoder layers, counted from 0")

    def _check_layer_types(self) -> None:
        types = self.layer_types
        if len(types) != self.num_hidden_layers or not set(types) <= {FULL, SLIDING}:
            reason = f"it must hold {FULL!r} or {SLIDING!r} for each of the {self.num_hidden_layers} layers"
            raise _invalid("layer_types", types, reason)
        if SLIDING in types and (self.sliding_window is None or self.sliding_window < 1):
            raise _invalid("sliding_window", self.sliding_window, f"layer_types has {SLIDING!r} layers")


def _invalid(name: str, value: object, reason: str) -> ValueError:
    return ValueError(f"Drafter config has {name}={value!r}: {reason}. Correct {name} in the drafter's config.json.")
