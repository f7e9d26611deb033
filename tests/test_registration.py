"""Registering touches four names, is inert for other calls, survives JSON, and leaves no trace when undone."""

import copy
import gc
import importlib
import pickle
import sys
import weakref

import pytest
import torch
from support.tiny_models import tiny_drafter, tiny_target
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import utils as generation_utils

import hybridspec_hf
from hybridspec_hf import HybridSpecConfig, registration

IDS = torch.tensor([[5, 6, 7, 8]])
MODE = {"generation_mode": "hybridspec", "max_new_tokens": 9, "do_sample": False}


@pytest.fixture
def registered():
    yield
    hybridspec_hf.register()


def names():
    """What transformers knows by name; functions by their code."""
    tables = (vars(GenerationConfig), generation_utils.GENERATION_MODES_MAPPING, vars(GenerationMixin))
    return [{k: getattr(v, "__code__", v) for k, v in table.items() if not k.startswith("__")} for table in tables]


def test_unregister_leaves_no_trace_and_register_restores(registered):
    on = names()
    hybridspec_hf.register()
    assert names() == on, "a second register changes nothing"
    hybridspec_hf.unregister()
    off = names()
    hybridspec_hf.unregister()
    assert names() == off
    assert set(on[0]) - set(off[0]) == set(registration.OPTIONS)
    assert set(on[1]) - set(off[1]) == {"hybridspec"}
    assert set(on[2]) - set(off[2]) == {"_hybridspec_decoding"}
    assert "transformers" in off[0]["get_generation_mode"].co_filename
    model, ids = tiny_target(), torch.tensor([[1, 2, 3]])
    model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    with pytest.raises(ValueError, match="generation_mode"):
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, generation_mode="hybridspec")
    hybridspec_hf.register()
    assert names() == on


def test_plain_generate_is_bit_identical_with_and_without(registered):
    model, ids = tiny_target(), torch.tensor([[5, 6, 7, 8]])
    kwargs = dict(input_ids=ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with_mode = model.generate(**kwargs)
    model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, generation_mode="hybridspec")
    again = model.generate(**kwargs)
    hybridspec_hf.unregister()
    without = model.generate(**kwargs)
    for other in (again, without):
        assert torch.equal(with_mode.sequences, other.sequences)
        assert all(torch.equal(a, b) for a, b in zip(with_mode.logits, other.logits, strict=True))


def purge():
    """Forget our modules as a notebook's autoreload does; returns them."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "hybridspec_hf"}
    for name in ours:
        del sys.modules[name]
    return ours


def test_a_second_import_takes_the_place_of_the_first(registered):
    model, ids = tiny_target(), torch.tensor([[5, 6, 7, 8]])
    plain = model.generate(input_ids=ids, max_new_tokens=9, do_sample=False)
    importlib.reload(registration)
    importlib.reload(hybridspec_hf)
    first = purge()
    try:
        again = importlib.import_module("hybridspec_hf")
        assert GenerationMixin._hybridspec_decoding is sys.modules["hybridspec_hf.strategy"].hybridspec_decoding
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=9, do_sample=False), plain)
        assert torch.equal(model.generate(input_ids=ids, **MODE), plain)
        again.unregister()
        assert torch.equal(model.generate(input_ids=ids, max_new_tokens=9, do_sample=False), plain)
        assert "hybridspec" not in generation_utils.GENERATION_MODES_MAPPING
    finally:
        purge()
        sys.modules.update(first)
    hybridspec_hf.register()
    assert torch.equal(model.generate(input_ids=ids, **MODE), plain)


def test_a_plain_config_stays_clean():
    assert not set(GenerationConfig().to_dict()) & set(registration.OPTIONS)


@pytest.mark.parametrize("value", [HybridSpecConfig(policy="static:4"), {"policy": "static:4"}])
def test_generation_config_object_and_json_round_trip(tmp_path, value):
    model = tiny_target()
    drafter, ids = tiny_drafter(model), torch.tensor([[5, 6, 7, 8]])
    config = GenerationConfig(
        max_new_tokens=12, do_sample=False, generation_mode="hybridspec", hybridspec_config=value,
        return_dict_in_generate=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    for cfg in (config, loaded, copy.deepcopy(config)):
        out = model.generate(input_ids=ids, assistant_model=drafter, generation_config=cfg)
        assert out.report.policy == "static:4" and set(out.report.nominal_lengths) == {4}
    model.generation_config = loaded
    out = model.generate(input_ids=ids, assistant_model=drafter)
    assert out.report.policy == "static:4"
    plain_config = GenerationConfig(max_new_tokens=12, do_sample=False)
    options = {"generation_mode": None, "hybridspec_config": None}
    plain = model.generate(input_ids=ids, generation_config=plain_config, **options)
    assert type(plain) is GenerateDecoderOnlyOutput and torch.equal(out.sequences, plain.sequences)


def test_nothing_sits_on_the_model():
    model = tiny_target()
    drafter, ids = tiny_drafter(model), torch.tensor([[5, 6, 7, 8]])
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_json_string()
    model.generate(
        input_ids=ids, assistant_model=drafter, generation_mode="hybridspec", max_new_tokens=9, do_sample=False
    )
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert "forward" not in vars(module)
        hooks = [len(vars(module)[key]) for key in ("_forward_hooks", "_forward_pre_hooks")]
        assert hooks == [0, 0], name
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.config.to_json_string() == config
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)


def test_release_and_garbage_collection_free_the_engine():
    model = tiny_target()
    drafter, ids = tiny_drafter(model), torch.tensor([[5, 6, 7, 8]])
    options = dict(
        input_ids=ids, assistant_model=drafter, generation_mode="hybridspec", max_new_tokens=9, do_sample=False
    )
    first = model.generate(**options)
    engine = hybridspec_hf.engine.get_engine(model, drafter)
    cache = weakref.ref(engine._idle.cache)
    assert list(engine.costs) == ["block, PyTorch, modules"]
    del engine
    hybridspec_hf.release(model)
    gc.collect()
    assert cache() is None
    hybridspec_hf.release(model)
    assert torch.equal(model.generate(**options), first)
    known, known_drafter = weakref.ref(model), weakref.ref(drafter)
    del model, options, drafter
    gc.collect()
    assert known() is None and known_drafter() is None


def test_engine_follows_the_model_to_another_dtype():
    model = tiny_target()
    drafter, ids = tiny_drafter(model), torch.tensor([[5, 6, 7, 8]])
    options = dict(input_ids=ids, **MODE)
    model.generate(**options, assistant_model=drafter)
    model, drafter = model.to(torch.bfloat16), drafter.to(torch.bfloat16)
    assert model.generate(**options, assistant_model=drafter).shape == (1, 13)


def test_release_works_every_time():
    model = tiny_target()
    drafter = tiny_drafter(model)
    engine = hybridspec_hf.engine.get_engine(model, drafter)
    for _ in range(3):
        model.generate(input_ids=IDS, assistant_model=drafter, **MODE)
        assert engine is hybridspec_hf.engine.get_engine(model, drafter)
        assert engine._idle is not None and engine.costs
        hybridspec_hf.release(model)
        assert engine._idle is None and not engine.costs


def test_a_used_drafter_can_be_copied_pickled_and_saved(tmp_path):
    model = tiny_target()
    drafter = tiny_drafter(model)
    options = {"input_ids": IDS, "generation_mode": "hybridspec", "do_sample": False, "max_new_tokens": 5}
    want = model.generate(assistant_model=drafter, **options)
    drafter.config.num_target_layers = model.config.num_hidden_layers
    drafter.save_pretrained(tmp_path)
    copies = (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter)))
    for other in (*copies, hybridspec_hf.DFlashDrafter.from_pretrained(tmp_path)):
        assert torch.equal(model.generate(assistant_model=other, **options), want)
        assert hybridspec_hf.engine.get_engine(model, other) is not hybridspec_hf.engine.get_engine(model, drafter)


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 2049, 5000, 100_000])
def test_capacities_grow_in_steps_of_their_size(tokens):
    for device, least in (("cpu", 256), ("cuda", 2048)):
        capacity = hybridspec_hf.buffers.bucket(tokens, torch.device(device))
        assert max(tokens, least) <= capacity <= max(tokens + 256, least, 1.15 * tokens)
        assert hybridspec_hf.buffers.bucket(capacity, torch.device(device)) == capacity
