"""Training and measuring the tiny drafter: blocks, data, rounds, statistics."""

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM

from hybridspec_hf.drafters.dflash import DFlashDrafter
from hybridspec_hf.training import dflash, evaluate
from hybridspec_hf.training import target as tiny
from hybridspec_hf.training.loop import Budget, TrainLog
from hybridspec_hf.training.onpolicy import Answered, greedy_answers
from hybridspec_hf.training.refine import START_WEIGHT, deepen, favour_round_starts
from hybridspec_hf.training.text import train_tokenizer

SMALL = dict(hidden_size=32, num_hidden_layers=4, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8)


@pytest.fixture
def pair():
    target = Qwen3_5MoeForCausalLM(tiny.target_config(96, **SMALL)).eval().requires_grad_(False)
    tiny.use_dense_experts(target)
    config = dflash.drafter_config(target.config, 3, head_dim=8, target_layer_ids=[0, 2], block_size=6)
    drafter = DFlashDrafter(config)
    dflash.initialise(drafter, target.lm_head.weight)
    return target, drafter


@pytest.fixture
def answered(pair):
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 96) for _ in range(rng.randrange(3, 9))] for _ in range(5)]
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answers.append(
            pair[0].generate(ids, max_new_tokens=rng.randrange(2, 22), do_sample=False)[0, len(prompt) :].tolist()
        )
    return Answered(prompts, answers)


def test_proposals_of_a_block_ignore_other_blocks_and_later_text(pair):
    target, drafter = pair
    ids = torch.randint(4, 96, (2, 20))
    features = dflash.target_features(target, ids, drafter.config.target_layer_ids)
    together = dflash.propose(target, drafter, ids, features, torch.tensor([[3, 9], [5, 12]]))
    alone = dflash.propose(
        target, drafter, ids[1:, :13], features[1:, :12].repeat(1, 2, 1)[:, :13], torch.tensor([[12]])
    )
    torch.testing.assert_close(together[1, 1], alone[0, 0], rtol=1e-4, atol=1e-5)


def test_features_are_layer_outputs(pair):
    target, drafter = pair
    ids = torch.randint(4, 96, (1, 7))
    hidden = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    found = dflash.target_features(target, ids, [0, 2])
    torch.testing.assert_close(found, torch.cat([hidden[1], hidden[3]], dim=-1))


def test_block_labels_stop_at_the_end():
    ids = torch.arange(10)[None]
    labels, valid = dflash.block_labels(ids, torch.tensor([8]), torch.tensor([[2, 5]]), 6)
    assert labels[0, 0].tolist() == [3, 4, 5, 6, 7] and valid[0, 0].all()
    assert labels[0, 1, :2].tolist() == [6, 7] and valid[0, 1].tolist() == [True, True, False, False, False]


def test_train_drafter_learns_one_answer(pair, tmp_path):
    target, drafter = pair
    answered = Answered([[5, 6, 7]] * 8, [list(range(20, 60))] * 8)
    data = dflash.DraftData(target, answered, drafter.config.target_layer_ids, tokens_per_batch=256)
    torch.testing.assert_close(data.ids[:5], torch.tensor([5, 6, 7, 20, 21]))
    al = dflash.train_drafter(target, drafter, data, Budget(10, max_steps=60), TrainLog(tmp_path, "drafter"), lr=5e-3)
    assert al > 3


@pytest.mark.parametrize("skill", [0.0, 0.7])
def test_rounds_equal_a_step_by_step_simulation(pair, answered, skill, monkeypatch):
    """The batched simulation against one round at a time; a drafter that knows part of the answer drafts long."""
    target, drafter = pair
    original = dflash.propose

    def propose(target, drafter, ids, features, anchors):
        logits = original(target, drafter, ids, features, anchors)
        where = (anchors[:, :, None] + torch.arange(1, 6)).clamp_max(ids.shape[1] - 1)
        truth = ids[torch.arange(len(ids))[:, None, None], where]
        # depends on the anchor's text only, so that batch and single calls agree
        known = (where * 7 + ids.gather(1, anchors)[:, :, None]) % 10 < 10 * skill
        return logits + 50.0 * torch.nn.functional.one_hot(truth, logits.shape[-1]) * known[..., None]

    monkeypatch.setattr(evaluate, "propose", propose)
    rounds = evaluate.simulate_rounds(target, drafter, answered)
    for i, (prompt, answer) in enumerate(zip(answered.prompts, answered.answers, strict=True)):
        full, at, expected = torch.tensor([prompt + answer]), len(prompt), []
        while at < full.shape[1] - 1:
            features = dflash.target_features(target, full, drafter.config.target_layer_ids)
            draft = propose(target, drafter, full, features, torch.tensor([[at]]))[0, 0].argmax(-1).tolist()
            hits = 0
            while hits < 5 and at + 1 + hits < full.shape[1] and draft[hits] == full[0, at + 1 + hits]:
                hits += 1
            emitted = min(hits + 1, full.shape[1] - 1 - at)
            expected.append((at, emitted))
            at += emitted
        mine = rounds.prompt == i
        found = sorted(zip(rounds.start[mine].tolist(), rounds.emitted[mine].tolist(), strict=True))
        assert found == expected
        assert sum(emitted for _, emitted in found) == len(answer) - 1


def test_area_under_curve_matches_pairs():
    score = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.9, 0.4])
    label = torch.tensor([False, False, True, True, False, True])
    wins = [float(p > n) + 0.5 * float(p == n) for p in score[label] for n in score[~label]]
    assert evaluate.area_under_curve(score, label) == pytest.approx(sum(wins) / len(wins))


def test_routing_novelty_counts_new_experts(pair, answered):
    target, drafter = pair
    rounds = evaluate.simulate_rounds(target, drafter, answered)
    first, later = evaluate.routing_novelty(target, answered, rounds, window=4)
    prompt, start = int(rounds.prompt[0]), int(rounds.start[0])
    ids = torch.tensor([answered.prompts[prompt] + answered.answers[prompt]])
    chosen = [x.topk(4).indices for x in target(input_ids=ids, output_router_logits=True).router_logits]
    for step in (1, 2, 3):
        new = [set(c[start + step].tolist()) - set(c[start : start + step].flatten().tolist()) for c in chosen]
        assert len(new[0]) == first[0, step - 1] and sum(map(len, new[1:])) == later[0, step - 1]


def test_correlation_removes_each_positions_mean():
    x = torch.randn(50, 3)
    assert evaluate.correlation(x, 2 * x + torch.tensor([1.0, 50.0, -9.0])) == pytest.approx(1.0)


def test_greedy_answers_do_not_depend_on_the_batch(pair):
    target, _ = pair
    rows = [{"prompt": "some words", "answer": "and more words"}] * 3
    tokenizer: PreTrainedTokenizerFast = train_tokenizer(rows, vocab_size=300)
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    together = greedy_answers(target, tokenizer, prompts, max_new_tokens=12, batch=2)
    for prompt, answer in zip(together.prompts, together.answers, strict=True):
        assert greedy_answers(target, tokenizer, [prompt], max_new_tokens=12).answers == [answer]


def test_deeper_drafter_starts_where_the_first_one_ended(pair):
    target, drafter = pair
    deeper = deepen(drafter, target.lm_head.weight)
    assert len(deeper.layers) == len(drafter.layers) + 1 == deeper.config.num_hidden_layers
    ids = torch.randint(4, 96, (2, 20))
    features = dflash.target_features(target, ids, drafter.config.target_layer_ids)
    anchors = torch.tensor([[3, 9], [5, 12]])
    before = dflash.propose(target, drafter, ids, features, anchors)
    assert torch.equal(dflash.propose(target, deeper, ids, features, anchors), before)


def test_round_starts_become_likelier_anchors(pair, answered):
    target, drafter = pair
    data = dflash.DraftData(target, answered, drafter.config.target_layer_ids, tokens_per_batch=256)
    al = favour_round_starts(target, drafter, data, batch=2)
    rows = Answered([p for p, _ in data.rows], [a for _, a in data.rows])
    rounds = evaluate.simulate_rounds(target, drafter, rows)
    assert al == pytest.approx(rounds.emitted.float().mean().item())
    wanted = torch.ones(len(data.ids))
    wanted[data.starts[rounds.prompt] + rounds.start] = START_WEIGHT
    assert torch.equal(data.anchor_weight, wanted)


def test_anchors_are_answer_tokens_with_a_successor(pair, answered):
    target, drafter = pair
    data = dflash.DraftData(target, answered, drafter.config.target_layer_ids, tokens_per_batch=64)
    data.anchor_weight[: len(data.ids) // 2] = 5.0
    prompts = {tuple(p + a): len(p) for p, a in data.rows}
    for _, (ids, _, lengths, anchors) in zip(range(8), data.batches(6, seed=0), strict=False):
        for row, length, chosen in zip(ids, lengths, anchors, strict=True):
            first = prompts[tuple(row[:length].tolist())]
            assert ((chosen >= first) & (chosen <= max(first, int(length) - 2))).all()
