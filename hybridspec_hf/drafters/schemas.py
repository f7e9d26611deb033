"""A raw `config.json` in one of three schemas → the fields of `DFlashConfig`, and back to z-lab's nested schema.

Raw means as it lies on disk. `Qwen3Config`, which z-lab's files name, drops `sliding_window` unless
`use_sliding_window` is set and invents `layer_types` when they are absent, so it must not come in between.

Every key of a file is in exactly one of the lists below or the file is refused: a key that nobody read may
change the maths, and a drafter that computes something else fails silently, by low acceptance.
"""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridspec_hf.drafters.config import DFlashConfig

Raw = dict[str, Any]

# say nothing about the forward pass of a drafter: training, generation, bookkeeping of some library
_HARMLESS = frozenset({
    "_attn_implementation", "_name_or_path", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "label2id", "max_window_layers",
    "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip

# fields of the decoder layers, spelt alike in all schemas
_DECODER = frozenset({
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "layer_types", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "use_sliding_window", "vocab_size",
})  # fmt: skip

# z-lab reads these from dflash_config first, then from the top level
_BLOCK = frozenset({"block_size", "mask_token_id", "num_target_layers", "target_layer_ids"})

# known keys with the only values under which they change nothing, and what another value would mean
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_swa_attention_sink_bias": ((None, False), "learned attention sinks"),
    "attention_sink_bias": ((None, False), "learned attention sinks"),
    "final_logit_softcapping": ((None, 0, 0.0), "soft-capped draft logits"),
    "input_embedding_scale": ((None, 1, 1.0), "scaled embeddings"),
    "is_encoder_decoder": ((None, False), "an encoder-decoder"),
    "is_neox_style": ((None, True), "interleaved rotary pairs"),
    "mlp_bias": ((None, False), "MLP biases"),
    "output_multiplier": ((None, 1, 1.0), "scaled draft logits"),
    "projector_type": ((None, "dflash"), "another kind of drafter (Domino, DSpark, ...)"),
    "quantization_config": ((None,), "a quantised drafter"),
    "sample_from_anchor": ((None, False), "a proposal from the anchor's own row"),
    "use_aux_hidden_state": ((None, True), "a drafter without target features"),
    "use_qk_norm": ((None, True), "queries and keys without norm"),
}

# refused whatever their value, with what they stand for
_UNSUPPORTED = {
    "conv_group_size": "the convolutions of DFlash2",
    "conv_kernel_size": "the convolutions of DFlash2",
    "markov_head_type": "a Markov head (DSpark)",
    "markov_rank": "a Markov head (DSpark)",
    "selector_rank": "the candidate selector of DFlash2",
    "selector_top_k": "the candidate selector of DFlash2",
    "use_swa": "a sliding window that layer_types does not name",
    "swa_window_size": "a sliding window that layer_types does not name",
}

# architecture names and model types of plain DFlash; any other name is another forward pass
_IDENTITY: dict[str, tuple[Any, ...]] = {
    "architectures": (None, [], ["DFlashDraftModel"], ["DFlashSpeculator"]),
    "model_type": (None, "qwen3", "speculator_model"),
}

_SPECULATORS = frozenset({
    "aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sliding_window_non_causal",
    "speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size",
    "transformer_layer_config",
})  # fmt: skip
_SPECULATORS_HARMLESS = frozenset({"max_anchors", "proposal_speculative_tokens"})


def normalise(raw: Raw) -> Raw:
    """Translate a drafter's raw config.

    Args:
        raw: config.json in z-lab's legacy or nested schema, or speculators' schema.

    Returns:
        keyword arguments of `DFlashConfig`.

    Raises:
        ValueError: a key is missing, unknown, or asks for maths that the drafter does not have.
    """
    if "speculators_model_type" in raw:
        return _from_speculators(raw)
    if "dflash_config" in raw:
        return _from_zlab(raw)
    raise ValueError(
        f"Drafter config has model_type={raw.get('model_type')!r}, architectures={raw.get('architectures')!r} and "
        "neither dflash_config (z-lab) nor speculators_model_type. It does not describe a DFlash drafter. "
        "Pass the drafter's folder or repository, not the target's."
    )


def to_nested(config: "DFlashConfig") -> str:
    """Write z-lab's nested schema.

    Args:
        config: a drafter's config.

    Returns:
        the text of config.json.
    """
    sliding = "sliding_attention" in config.layer_types
    raw: Raw = {name: getattr(config, name) for name in sorted(_DECODER) if hasattr(config, name)}
    raw |= {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {name: getattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids")},
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_target_layers": config.num_target_layers,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
    }
    # rope_theta lives in rope_parameters; is_causal=None and a window without sliding layers say nothing
    drop = {"rope_theta", "rope_scaling"} | (set() if sliding else {"sliding_window"})
    if config.is_causal is not None:
        raw["is_causal"] = config.is_causal
    return json.dumps({name: raw[name] for name in sorted(raw.keys() - drop)}, indent=2) + "\n"


def _from_zlab(raw: Raw) -> Raw:
    nested = raw["dflash_config"]
    if not isinstance(nested, dict):
        raise ValueError(f"Drafter config has dflash_config={nested!r}. It must be an object. Correct config.json.")
    top_level = _HARMLESS | _DECODER | _BLOCK | {"dflash_config", "is_causal", "target_hidden_size"}
    _refuse_unknown(raw, top_level, "config.json")
    _refuse_unknown(nested, _BLOCK | {"causal", "mask_token"}, "dflash_config")
    fields = _decoder_fields(raw)
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        fields[name] = _required(_merged(raw, nested, name), name, "dflash_config or the top level of config.json")
    fields["num_target_layers"] = _merged(raw, nested, "num_target_layers")
    fields["target_hidden_size"] = raw.get("target_hidden_size")
    causal = raw.get("is_causal")
    fields["is_causal"] = nested.get("causal") if causal is None else causal
    return fields


def _from_speculators(raw: Raw) -> Raw:
    if raw["speculators_model_type"] != "dflash":
        raise ValueError(
            f"Drafter config has speculators_model_type={raw['speculators_model_type']!r}. Only 'dflash' proposes "
            "blocks the way HybridSpec verifies them. Pass a DFlash drafter."
        )
    _refuse_unknown(raw, _HARMLESS | _SPECULATORS | _SPECULATORS_HARMLESS, "config.json")
    decoder = _required(raw.get("transformer_layer_config"), "transformer_layer_config", "config.json")
    _refuse_unknown(decoder, _HARMLESS | _DECODER, "transformer_layer_config")
    fields = _decoder_fields(decoder)
    _refuse_reduced_vocabulary(raw.get("draft_vocab_size"), fields["vocab_size"])
    fields["block_size"] = _required(raw.get("block_size"), "block_size", "config.json")
    fields["mask_token_id"] = _required(raw.get("mask_token_id"), "mask_token_id", "config.json")
    ids = _required(raw.get("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids", "config.json")
    fields["target_layer_ids"] = _layer_ids(ids)
    fields["target_hidden_size"] = raw.get("target_hidden_size")
    fields["is_causal"] = False if raw.get("sliding_window_non_causal") else None
    fields["window_anchor"] = "block"
    return fields


def _layer_ids(aux_ids: list[int]) -> list[int]:
    # speculators counts states, the embedding's output being 0; z-lab counts decoder layers
    if 0 in aux_ids:
        raise ValueError(
            f"Drafter config has aux_hidden_state_layer_ids={aux_ids}. State 0 is the target's embedding, but "
            "features are outputs of decoder layers. Train the drafter on layers 1 and up."
        )
    return [index - 1 for index in aux_ids]


def _refuse_reduced_vocabulary(draft: int | None, full: int) -> None:
    if draft not in (None, full):
        raise ValueError(
            f"Drafter config has draft_vocab_size={draft} and vocab_size={full}. A reduced draft vocabulary needs an "
            "own lm_head and the t2d/d2t tables, but HybridSpec drafts with the target's lm_head. "
            "Pass a drafter with the full vocabulary."
        )


def _decoder_fields(raw: Raw) -> Raw:
    need = "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"
    fields = {name: _required(raw.get(name), name, "config.json") for name in need}
    heads = fields["num_attention_heads"]
    fields["num_key_value_heads"] = _required(raw.get("num_key_value_heads"), "num_key_value_heads", "config.json")
    fields["head_dim"] = raw.get("head_dim") or fields["hidden_size"] // heads
    fields["rms_norm_eps"] = float(_required(raw.get("rms_norm_eps"), "rms_norm_eps", "config.json"))
    fields["rope_theta"] = _rope_theta(raw, fields["head_dim"])
    optional = "attention_bias", "hidden_act", "initializer_range", "max_position_embeddings"
    fields |= {name: raw[name] for name in optional if raw.get(name) is not None}
    return fields | _attention_layout(raw)


def _attention_layout(raw: Raw) -> Raw:
    types, window, flag = raw.get("layer_types"), raw.get("sliding_window"), raw.get("use_sliding_window")
    if types is None and flag:
        raise ValueError(
            "Drafter config has use_sliding_window=true without layer_types. Which layers slide is then a guess. "
            "Add layer_types with one entry per layer."
        )
    if types is not None and "sliding_attention" in types and flag is False:
        raise ValueError(
            f"Drafter config has layer_types={types} but use_sliding_window=false. The two disagree about a window. "
            "Set use_sliding_window to true, or the layers to 'full_attention'."
        )
    return {"layer_types": list(types or ()), "sliding_window": window}


def _rope_theta(raw: Raw, head_dim: int) -> float:
    # z-lab's legacy files have rope_theta beside rope_scaling, the nested ones rope_parameters
    scaling, parameters = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for rope in ({"partial_rotary_factor": raw.get("partial_rotary_factor")}, scaling, parameters):
        _refuse_other_rope(rope, head_dim)
    theta = _merged(raw, scaling | parameters, "rope_theta", "rope_parameters")
    return float(_required(theta, "rope_theta", "rope_parameters or the top level of config.json"))


def _refuse_other_rope(rope: Raw, head_dim: int) -> None:
    plain: dict[str, Callable[[Any], bool]] = {
        "rope_type": lambda value: value in (None, "default"),
        "type": lambda value: value in (None, "default"),
        "rope_theta": lambda value: True,
        "partial_rotary_factor": lambda value: value in (None, 1, 1.0),
        "rope_dim": lambda value: value in (None, head_dim),
        # which of three position streams turns which pair: a drafter sees text, where the three are equal
        "mrope_section": lambda value: True,
        "mrope_interleaved": lambda value: True,
    }
    for name, value in rope.items():
        if name not in plain or not plain[name](value):
            raise ValueError(
                f"Drafter config has {name}={value!r} in its rotary parameters {rope}. The drafter has plain RoPE "
                f"over the whole head (head_dim={head_dim}). Pass a drafter with rope_type 'default'."
            )


def _merged(raw: Raw, nested: Raw, name: str, place: str = "dflash_config") -> Any:
    values = [source[name] for source in (nested, raw) if source.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        raise ValueError(
            f"Drafter config has {name}={values[0]!r} in {place} and {name}={values[1]!r} at the top level. "
            "Only one can be right. Remove one of them from config.json."
        )
    return values[0] if values else None


def _required(value: Any, name: str, place: str) -> Any:
    if value is None:
        raise ValueError(
            f"Drafter config has no {name}. It depends on how the drafter was trained and cannot be guessed. "
            f"Add {name} to {place}."
        )
    return value


def _refuse_unknown(raw: Raw, known: Iterable[str], place: str) -> None:
    for name, value in raw.items():
        neutral = _IDENTITY.get(name) or _NEUTRAL.get(name, ((), ""))[0]
        if name in known or value in neutral:
            continue
        raise ValueError(
            f"Drafter config has {name}={_brief(value)} in {place}. {_meaning(name)}, and ignoring it could draft "
            "something else than the file describes, which shows only as low acceptance. Pass a plain DFlash "
            "drafter, or remove the key if it is known to have no effect."
        )


def _meaning(name: str) -> str:
    if name in _IDENTITY:
        return "That names a forward pass other than plain DFlash's"
    meaning = _UNSUPPORTED.get(name) or _NEUTRAL.get(name, ((), ""))[1]
    return f"It stands for {meaning}, which is not implemented" if meaning else "No rule for this key is known"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
