"""A transformers release that changes a forward that we split must fail here, by name.

After reading the change and following it in hybridspec_hf/models/, update the fingerprints with
`python tests/models/test_fingerprints.py`.
"""

import hashlib
import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest

FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
SHARED = [
    "GatedDeltaNet", "Attention", "DecoderLayer", "RMSNorm", "RMSNormGated",
    "apply_rotary_pos_emb", "rotate_half", "causal_conv1d_fn", "causal_conv1d_update", "l2norm",
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
]  # fmt: skip
MOE = ["SparseMoeBlock", "TopKRouter", "Experts"]
TEXT = ["TextModel", "TextRotaryEmbedding", "ForCausalLM", "ForConditionalGeneration"]
FAMILIES = {
    "qwen3_5_moe": ("Qwen3_5Moe", [*SHARED, *MOE, *TEXT]),
    "qwen3_5": ("Qwen3_5", [*SHARED, "MLP", *TEXT]),
    "qwen3_next": ("Qwen3Next", [*SHARED, *MOE, "MLP", "Model", "RotaryEmbedding", "ForCausalLM"]),
}
ELSEWHERE = [
    ("transformers.generation.utils", "GenerationMixin._prefill"),
    ("transformers.generation.utils", "GenerationMixin._extract_generation_mode_kwargs"),
    ("transformers.generation.configuration_utils", "GenerationConfig.get_generation_mode"),
    ("transformers.cache_utils", "LinearAttentionLayer"),
    ("transformers.cache_utils", "DynamicLayer"),
    ("transformers.cache_utils", "StaticLayer"),
]


def followed():
    """Every piece of transformers that our code follows or relies on: name -> source."""
    for family, (prefix, names) in FAMILIES.items():
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        for name in names:
            thing = getattr(module, name if hasattr(module, name) else prefix + name)
            yield f"{family}.{thing.__name__}", inspect.getsource(inspect.unwrap(thing))
    for module_name, path in ELSEWHERE:
        thing = import_module(module_name)
        for part in path.split("."):
            thing = getattr(thing, part)
        yield path, inspect.getsource(inspect.unwrap(thing))


def fingerprint(source):
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name, source", [pytest.param(n, s, id=n) for n, s in followed()])
def test_source_is_the_one_we_split(name, source):
    known = json.loads(FINGERPRINTS.read_text())
    assert fingerprint(source) == known[name], (
        f"transformers changed {name}. Compare it with hybridspec_hf/models/, follow the change, then update "
        "tests/models/fingerprints.json."
    )


def test_a_changed_forward_is_noticed():
    name, source = next(iter(followed()))
    assert fingerprint(source.replace("beta", "gamma")) != json.loads(FINGERPRINTS.read_text())[name]


if __name__ == "__main__":
    FINGERPRINTS.write_text(json.dumps({n: fingerprint(s) for n, s in followed()}, indent=2) + "\n")
