"""The text part of the image-text class: prompts with an image, rotary positions behind it, other ways to prefill."""

import pytest
import torch
from support.tiny_models import _MOE, _SHARED, randomize, tiny_drafter, tiny_target
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

from hybridspec_hf import HybridSpecConfig

IMAGE, VISION_START, VISION_END = 90, 91, 92


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "in_channels": 3,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5MoeConfig(
        text_config={**_SHARED, **_MOE}, vision_config=vision, image_token_id=IMAGE, video_token_id=93,
        vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
    )  # fmt: skip
    return randomize(Qwen3_5MoeForConditionalGeneration(config), 1.5).eval()


@pytest.fixture(scope="module")
def image_inputs():
    # a 4 x 8 grid of patches merges to 2 x 4 = 8 image tokens
    grid = torch.tensor([[1, 4, 8]])
    ids = torch.tensor([[5, 6, VISION_START, *[IMAGE] * 8, VISION_END, 7, 8, 9]])
    pixels = torch.randn(32, 3 * 2 * 4 * 4)
    return dict(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE).long())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("policy", ["ar", "full", "hybridspec", "static:4"])
def test_image_prompt_equals_plain_generate(model, image_inputs, policy, device):
    """On a GPU, rounds run in kernels and graphs behind the image, whose positions have three axes."""
    model, image_inputs = model.to(device), {name: value.to(device) for name, value in image_inputs.items()}
    plain = model.generate(**image_inputs, max_new_tokens=24, do_sample=False)
    options = {"generation_mode": "hybridspec", "max_new_tokens": 24, "do_sample": False}
    if policy != "ar":
        drafter = tiny_drafter(model).to(device)
        options |= {"assistant_model": drafter, "hybridspec_config": HybridSpecConfig(policy=policy)}
    out = model.generate(**image_inputs, **options, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert ("graph" in out.report.launches) == (device == "cuda")
    # a text prompt afterwards must not inherit the image's rotary offset
    text = torch.tensor([[5, 6, 7]], device=device)
    plain = model.generate(input_ids=text, max_new_tokens=10, do_sample=False)
    options["max_new_tokens"] = 10
    assert torch.equal(model.generate(input_ids=text, **options), plain)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("how", ["inputs_embeds", "chunks", "static_cache", "position_ids"])
def test_other_prefills_equal_plain_generate(family, how):
    model = tiny_target(family)
    drafter, ids = tiny_drafter(model), torch.randint(1, 90, (1, 21))
    options: dict = {"input_ids": ids, "max_new_tokens": 16, "do_sample": False}
    if how == "inputs_embeds":
        options |= {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
        del options["input_ids"]
    elif how == "chunks":
        options |= {"prefill_chunk_size": 8}
    elif how == "static_cache":
        options |= {"cache_implementation": "static", "disable_compile": True}
    else:
        options |= {"position_ids": torch.arange(21)[None] + 5}
    plain = model.generate(**options)
    spec = {"generation_mode": "hybridspec", "assistant_model": drafter, "return_dict_in_generate": True}
    out = model.generate(**options, **spec)
    assert torch.equal(out.sequences, plain)
    assert out.report.prompt_tokens == 21
