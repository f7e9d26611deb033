"""Models that were changed, hooked, compiled, poisoned or built unusually: the text of plain generate, or an error."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support.harness import filled_cache
from support.streamers import CountingStreamer
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target
from torch import nn

from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.evals.exactness import check_exactness, worst_margin
from hybridspec_hf.models import split_target

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
POLICIES = ("ar", "full", "static:3")
SHIFT = torch.linspace(-1, 1, 32)


def plain(model, **options):
    return model.generate(**{"input_ids": IDS, "max_new_tokens": 14, "do_sample": False, **options})


def ours(model, drafter, policy="full", **options):
    options = {"input_ids": IDS, "max_new_tokens": 14, "do_sample": False, **options}
    if policy != "ar":
        options |= {"assistant_model": drafter, "hybridspec_config": HybridSpecConfig(policy=policy)}
    return model.generate(generation_mode="hybridspec", **options)


def assert_equals_plain(model, drafter, policies=POLICIES, **options):
    text = plain(model, **options)
    for policy in policies:
        assert torch.equal(ours(model, drafter, policy, **options), text), policy


def assert_refused(model, drafter, message, policies=POLICIES, **options):
    """An error of our own before the first token, whatever the policy."""
    for policy in policies:
        streamer = CountingStreamer()
        with pytest.raises(ValueError, match=message):
            ours(model, drafter, policy, streamer=streamer, **options)
        # transformers puts the prompt
        assert streamer.puts <= 1


# ---- bf16


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_text_parts_from_plain_generate_at_ties_only(family):
    model = tiny_target(family, dtype=torch.bfloat16, gain=1.0)
    prompts = [torch.randint(1, 90, (1, 9)) for _ in range(10)]
    [result] = check_exactness(model, tiny_drafter(model), prompts, ["ar"], max_new_tokens=25)
    assert result.identical >= 8
    assert worst_margin(result) <= 2, result.divergences


# ---- modules replaced after a call


def noisy(module):
    """A copy with other weights."""
    module = copy.deepcopy(module)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


class Adapted(nn.Module):
    """A linear layer with a low-rank update beside it, as adapters wrap it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight = base, base.weight
        self.update = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.update(x)


def replace_module(path, change=noisy):
    """A change of the model that puts another module at `path`."""

    def run(model):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, change(getattr(owner, name)))

    return run


def swap_layers(model):
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]


def slower_rotary(model):
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model.model.rotary_emb.inv_freq.mul_(0.01)


REPLACEMENTS = {
    "input_embeddings": lambda model: model.set_input_embeddings(noisy(model.get_input_embeddings())),
    "output_embeddings": lambda model: model.set_output_embeddings(nn.Linear(32, 97)),
    "norm": replace_module("model.norm"),
    "layer_0": replace_module("model.layers.0"),
    "layer_2": replace_module("model.layers.2"),
    "mixer_0": replace_module("model.layers.0.linear_attn"),
    "mixer_3": replace_module("model.layers.3.self_attn"),
    "mlp_0": replace_module("model.layers.0.mlp"),
    "router_0": replace_module("model.layers.0.mlp.gate"),
    "order": swap_layers,
    "rotary": slower_rotary,
    "adapted_mixers": lambda model: [
        replace_module(path, Adapted)(model)
        for path in ("model.layers.0.linear_attn.in_proj_qkv", "model.layers.3.self_attn.v_proj")
    ],
    "adapted_head": replace_module("lm_head", Adapted),
    "weights": lambda model: model.load_state_dict(tiny_target(seed=5).state_dict(), assign=True),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_replaced_modules_count_from_the_next_call(name):
    model = tiny_target()
    drafter = tiny_drafter(model)
    before = plain(model)
    assert_equals_plain(model, drafter)
    REPLACEMENTS[name](model)
    assert not torch.equal(plain(model), before)
    assert_equals_plain(model, drafter)


@pytest.mark.parametrize("changes", [
    {"block_size": 8}, {"block_size": 20}, {"target_layer_ids": [1, 2, 3]}, {"mask_token_id": 3},
])  # fmt: skip
def test_a_changed_drafter_config_counts_from_the_next_call(changes):
    model = tiny_target()
    drafter, other = tiny_drafter(model), tiny_drafter(model, **changes)
    ours(model, drafter)
    for name, value in changes.items():
        setattr(drafter.config, name, value)
    reports = [ours(model, d, return_dict_in_generate=True).report for d in (drafter, other)]
    assert reports[0].accepted == reports[1].accepted and reports[0].block == reports[1].block
    assert_equals_plain(model, drafter, (*POLICIES, "hybridspec"))


# ---- hooks and forwards


def shifted(module, args, output):
    return output + SHIFT if torch.is_tensor(output) else (output[0] + SHIFT, *output[1:])


def shifted_input(module, args):
    return (args[0] + SHIFT, *args[1:])


def shifted_model(module, args, output):
    output.last_hidden_state = output.last_hidden_state + SHIFT
    return output


def shifted_logits(module, args, output):
    output.logits = output.logits + torch.linspace(0, 5, 97)
    return output


def hook(path, function=shifted):
    return lambda model: model.get_submodule(path).register_forward_hook(function)


def override_instance(path):
    def run(model):
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **kwargs)

    return run


def override_class(path):
    def run(model):
        module = model.get_submodule(path)
        kind = type(module)
        module.__class__ = type("Mine", (kind,), {"forward": lambda self, *a, **k: kind.forward(self, *a, **k)})

    return run


class Wrapper(nn.Module):
    """A layer of someone else around transformers' own."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.block_type = layer, layer.block_type

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs) + SHIFT


BYPASSED = ("", "model", "model.layers.0", "model.layers.2", "model.layers.1.linear_attn", "model.layers.3.self_attn",
            "model.layers.0.mlp")  # fmt: skip
UNSEEN = {
    "hook_layer_0": hook("model.layers.0"),
    "hook_layer_2": hook("model.layers.2"),
    "hook_gdn": hook("model.layers.1.linear_attn"),
    "hook_attention": hook("model.layers.3.self_attn"),
    "hook_mlp_0": hook("model.layers.0.mlp"),
    "hook_body": hook("model", shifted_model),
    "hook_model": hook("", shifted_logits),
    "pre_hook": lambda model: model.model.layers[2].register_forward_pre_hook(shifted_input),
    "wrapped_layer": replace_module("model.layers.2", Wrapper),
    **{f"instance_{path}": override_instance(path) for path in BYPASSED},
    **{f"class_{path}": override_class(path) for path in BYPASSED},
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_rounds_would_not_run_is_refused(name):
    model = tiny_target()
    drafter = tiny_drafter(model)
    ours(model, drafter, max_new_tokens=2)
    UNSEEN[name](model)
    plain(model, max_new_tokens=2)
    assert_refused(model, drafter, "rounds would not run")


SEEN = ("model.norm", "model.embed_tokens", "model.layers.1.mlp", "model.layers.0.mlp.shared_expert",
        "model.layers.0.input_layernorm", "model.layers.0.linear_attn.out_proj", "model.layers.3.self_attn.o_proj",
        "model.layers.2.mlp.shared_expert.down_proj")  # fmt: skip


@pytest.mark.parametrize("path", SEEN)
def test_hooks_on_modules_that_rounds_call_are_honoured(path):
    model = tiny_target()
    before = plain(model)
    hook(path)(model)
    assert not torch.equal(plain(model), before)
    assert_equals_plain(model, tiny_drafter(model))


def placed_by_accelerate(model):
    for module in (model, *model.model.layers):
        add_hook_to_module(module, AlignDevicesHook())


def captured(model):
    model(input_ids=IDS, output_hidden_states=True, output_attentions=True)


@pytest.mark.parametrize("prepare", [placed_by_accelerate, captured])
def test_hooks_that_change_nothing_are_allowed(prepare):
    model = tiny_target()
    prepare(model)
    assert_equals_plain(model, tiny_drafter(model))


def compile_in_place(model):
    model.compile(backend="eager")


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compile_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")


@pytest.mark.parametrize("prepare", [compile_in_place, compile_forward, compile_layers])
def test_compiled_forwards_are_not_taken_for_overrides(prepare):
    model = tiny_target()
    prepare(model)
    # nothing is compiled until it is called
    split_target(model, (0, 2))
    override_class("model")(model)
    with pytest.raises(ValueError, match="rounds would not run"):
        split_target(model, (0, 2))


def test_layers_whose_outputs_are_hidden_leave_autoregressive_decoding_only():
    model = tiny_target()
    for layer in model.model.layers:
        # module.compile() stores its code here, and hooks that came later do not run in it
        layer._compiled_call_impl = layer.forward
    assert_equals_plain(model, tiny_drafter(model), ("ar",))
    assert_refused(model, tiny_drafter(model), "forward is compiled", ("full", "static:3", "hybridspec"))


# ---- unusual models


DENSE = {
    "layer_0": {"mlp_only_layers": [0]},
    "odd_layers": {"decoder_sparse_step": 2},
    "later": {"mlp_only_layers": [1, 2]},
    "all": {"mlp_only_layers": [0, 1, 2, 3]},
    "no_experts": {"num_experts": 0},
}


@pytest.mark.parametrize("name", DENSE)
def test_dense_layers_between_moe_layers(name):
    model = tiny_target("qwen3_next", **DENSE[name])
    assert_equals_plain(model, tiny_drafter(model), (*POLICIES, "hybridspec", "nominal"))


def rope(family, **options):
    section = {} if family == "qwen3_next" else {"mrope_section": [2, 1, 1]}
    return {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0, **section, **options}


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 32, "short_factor": [1.0] * 4,
        "long_factor": [1.0, 3.0, 8.0, 20.0]}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("options", [{"rope_type": "dynamic"}, LONG])
def test_rotary_angles_that_depend_on_the_length_are_refused(family, options):
    model = tiny_target(family, rope_parameters=rope(family, **options), max_position_embeddings=32)
    assert_refused(model, tiny_drafter(model), options["rope_type"])


@pytest.mark.parametrize("changes", [
    {"rope_parameters": rope("qwen3_5_moe", rope_type="linear")},
    {"rope_parameters": rope("qwen3_5_moe", **YARN)},
    {"hidden_act": "swish"},
])  # fmt: skip
def test_other_rotary_scalings_and_activation_names(changes):
    model = tiny_target(max_position_embeddings=32, **changes)
    assert_equals_plain(model, tiny_drafter(model), max_new_tokens=40)


def prepared_by(model, change):
    """Let an adapter have the last word on the forward's inputs, as prompt tuning does."""
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: change(prepare(*args, **kwargs))
    plain(model)


# a few, and more than the buffers have room for
@pytest.mark.parametrize("count", [5, 300])
def test_virtual_tokens_are_refused(count):
    model = tiny_target()
    embed, virtual = model.get_input_embeddings(), torch.randn(1, count, 32)

    def add_virtual_tokens(inputs):
        embeds = embed(inputs["input_ids"])
        if not inputs["cache"].get_seq_length():
            embeds = torch.cat([virtual, embeds], dim=1)
        return {"cache": inputs["cache"], "use_cache": True, "inputs_embeds": embeds}

    prepared_by(model, add_virtual_tokens)
    assert_refused(model, tiny_drafter(model), "virtual tokens")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_that_runs_the_model_is_refused(family):
    model, calls = tiny_target(family), []

    def run_again(module, args, output):
        calls.append(True)
        if len(calls) % 2:
            model(input_ids=IDS, use_cache=False)

    model.model.norm.register_forward_hook(run_again)
    with pytest.raises(ValueError, match="a hook runs the model, too"):
        ours(model, tiny_drafter(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_moved_positions_are_followed(family):
    model = tiny_target(family)
    prepared_by(model, lambda inputs: {**inputs, "position_ids": inputs["position_ids"] + 5})
    assert_equals_plain(model, tiny_drafter(model))


def test_autocast_is_refused():
    model = tiny_target()
    with torch.autocast("cpu", torch.bfloat16):
        assert_refused(model, tiny_drafter(model), "autocast")
    assert_equals_plain(model, tiny_drafter(model))


# ---- one request after another


def fill_nan(parameter):
    def run(model, drafter):
        owner = drafter if parameter.startswith("layers") else model
        weight = owner.get_parameter(parameter)
        good = weight.detach().clone()
        for policy in POLICIES:
            weight.data.fill_(float("nan"))
            ours(model, drafter, policy, input_ids=torch.randint(1, 90, (1, 30)))
            weight.data.copy_(good)

    return run


def infinite_prompt(model, drafter):
    embeds = model.get_input_embeddings()(torch.randint(1, 90, (1, 30))).detach().clone()
    embeds[0, 20] = float("inf")
    for policy in POLICIES:
        ours(model, drafter, policy, input_ids=None, inputs_embeds=embeds)


POISONS = {
    "attention": fill_nan("model.layers.3.self_attn.v_proj.weight"),
    "gdn": fill_nan("model.layers.1.linear_attn.in_proj_qkv.weight"),
    "drafter": fill_nan("layers.0.self_attn.v_proj.weight"),
    "prompt": infinite_prompt,
}


@pytest.mark.parametrize("name", POISONS)
def test_nan_of_one_request_stays_in_it(name):
    model = tiny_target()
    drafter = tiny_drafter(model)
    accepted = ours(model, drafter, return_dict_in_generate=True).report.accepted
    POISONS[name](model, drafter)
    assert_equals_plain(model, drafter)
    assert ours(model, drafter, return_dict_in_generate=True).report.accepted == accepted


@pytest.mark.parametrize("order", [(True, False), (False, True, False), (True, True)])
def test_inference_mode_and_back(order):
    model = tiny_target()
    drafter = tiny_drafter(model)
    for inference in order:
        with torch.inference_mode(inference):
            assert_equals_plain(model, drafter, (*POLICIES, "hybridspec"))


# ---- long prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_go_through_the_model_in_chunks(family, monkeypatch):
    from hybridspec_hf import prefill

    model = tiny_target(family)
    drafter = tiny_drafter(model)
    ids, sizes = torch.randint(1, 90, (1, 21)), []
    text = plain(model, input_ids=ids)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: sizes.append(output.shape[-2]))
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    for policy in ("ar", "full"):
        sizes.clear()
        assert torch.equal(ours(model, drafter, policy, input_ids=ids), text)
        assert sizes[:3] == [8, 8, 5]
        # a caller's own size stays
        sizes.clear()
        assert torch.equal(ours(model, drafter, policy, input_ids=ids, prefill_chunk_size=16), text)
        assert sizes[:2] == [16, 5]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(device, dtype):
    """Which numbers a buffer holds is not the user's default."""
    model = tiny_target().to(device)
    drafter, ids = tiny_drafter(model).to(device), IDS.to(device)
    text = plain(model, input_ids=ids)
    torch.set_default_dtype(dtype)
    try:
        for policy in ("ar", "full", "hybridspec"):
            assert torch.equal(ours(model, drafter, policy, input_ids=ids), text), policy
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("layers", [[0, 2, 3], [3, 0, 2]])
def test_the_features_of_a_chunk_go_before_the_next_one_comes(layers, monkeypatch):
    """A long prompt's features at once would be as large as its cache."""
    from hybridspec_hf import prefill

    model = tiny_target()
    target, whole, chunked, seen = split_target(model, tuple(layers)), Appended(), Appended(), []
    ids = torch.randint(1, 90, (1, 21))
    filled_cache(model, target, ids, whole)
    monkeypatch.setattr(prefill, "PREFILL_CHUNK", 8)
    model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(sum(chunked.sizes)))
    filled_cache(model, target, ids, chunked)
    assert whole.sizes == [21] and chunked.sizes == [8, 8, 5] and seen == [0, 8, 16]
    assert whole.starts == [0] and chunked.starts == [0, 8, 16]
    assert whole.features[0].shape[1] == 3 * target.hidden_size
    torch.testing.assert_close(torch.cat(chunked.features), whole.features[0], rtol=1e-4, atol=1e-5)


class Appended:
    """A drafter that only keeps what it is given."""

    def __init__(self):
        self.features, self.starts = [], []

    @property
    def sizes(self):
        return [len(part) for part in self.features]

    def append(self, features, start):
        self.features.append(features)
        self.starts.append(int(start))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_another_number_of_experts_on_a_used_model(family):
    model = tiny_target(family)
    drafter = tiny_drafter(model)
    assert_equals_plain(model, drafter, ("ar", "full"))
    model.config.num_experts_per_tok = 1
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1
    assert_equals_plain(model, drafter, ("ar", "full"))
