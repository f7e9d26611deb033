"""The shipped pair: exact in fp32 on 200 held-out prompts (120 are slow); in bf16 it differs at near-ties only."""

import pytest

from hybridspec_hf.evals.exactness import check_exactness, worst_margin
from hybridspec_hf.pair import TINY_PAIR, encode, load_pair, read_prompts

ROTATING = ["full", "nominal", "dcut", "evict", "dspark", *(f"static:{n}" for n in range(2, 17))]
PROMPTS, NEW_TOKENS, SHARDS = 200, 64, 10
# the others take minutes more
QUICK_SHARDS = 4
# best and second best logit at most this many bf16 spacings apart where an output may leave plain generate's
NEAR_TIE = 4.0


def load(dtype, device="cpu"):
    return load_pair(str(TINY_PAIR / "target"), str(TINY_PAIR / "drafter"), dtype=dtype, device_map=device)


def prompts_of(pair, count):
    rows = read_prompts(TINY_PAIR / "prompts.jsonl", count)
    assert len(rows) == count
    return [encode(pair, row["prompt"], chat_template=True)["input_ids"] for row in rows]


@pytest.fixture(scope="module")
def pair():
    return load("float32")


@pytest.mark.parametrize(
    "shard", [i if i < QUICK_SHARDS else pytest.param(i, marks=pytest.mark.slow) for i in range(SHARDS)]
)
def test_fp32_equals_plain_generate(pair, shard):
    """Every prompt with hybridspec and one more policy; scripts/check_exactness.py runs all with all."""
    prompts = prompts_of(pair, PROMPTS)[shard::SHARDS]
    accepted = 0
    for turn in range(2):
        policy = ROTATING[(2 * shard + turn) % len(ROTATING)]
        part = prompts[turn::2]
        for result in check_exactness(
            pair.model, pair.drafter, part, ["hybridspec", policy], max_new_tokens=NEW_TOKENS
        ):
            assert not result.divergences, result
            accepted += result.tokens - result.rounds
    assert accepted > 100, "a run that accepts nothing proves nothing"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bf16_differs_at_near_ties_only(device):
    count = 12 if device == "cpu" else 8
    pair, exact = load("bfloat16", device), load("float32", device).model
    results = check_exactness(
        pair.model, pair.drafter, prompts_of(pair, count), ["ar", "full", "hybridspec", "static:4"],
        max_new_tokens=NEW_TOKENS, fp32_model=exact,
    )  # fmt: skip
    for result in results:
        print(
            result.policy, f"identical {result.identical}/{result.prompts}", f"worst margin {worst_margin(result):.2f}"
        )
        assert worst_margin(result) <= NEAR_TIE, result


def test_drafter_borrows_embedding_and_head(pair):
    from hybridspec_hf.engine import get_engine

    engine = get_engine(pair.model, pair.drafter)
    bound = engine.bind(pair.drafter, engine.borrow(pair.drafter, 8))
    assert bound.embed_tokens is pair.model.get_input_embeddings()
    assert bound.lm_head is pair.model.get_output_embeddings()
    assert not any("embed" in name or "lm_head" in name for name, _ in pair.drafter.named_parameters())


def test_feature_taps_are_the_trained_ones(pair):
    """Reading the features one layer off only lowers acceptance; the trained layers must be the best."""
    prompts = prompts_of(pair, 8)
    lengths = {}
    for shift in (-1, 0, 1):
        shifted = load("float32").drafter
        shifted.config.target_layer_ids = [i + shift for i in shifted.config.target_layer_ids]
        (result,) = check_exactness(pair.model, shifted, prompts, ["full"], max_new_tokens=NEW_TOKENS)
        assert not result.divergences
        lengths[shift] = (result.tokens - result.prompts) / result.rounds
    assert lengths[0] > 1.2 * max(lengths[-1], lengths[1]), lengths
