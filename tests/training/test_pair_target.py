"""Training the tiny target: experts, losses, gradients, budgets, loops in its answers."""

import random

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM

from hybridspec_hf.training import target as tiny
from hybridspec_hf.training.graphs import GradientStep
from hybridspec_hf.training.loop import Budget, Documents, TrainLog, learning_rate
from hybridspec_hf.training.onpolicy import Answered, loops, repeated, unlearn_loops

SMALL = dict(hidden_size=32, num_hidden_layers=4, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8)


def small_target(**overrides):
    return Qwen3_5MoeForCausalLM(tiny.target_config(96, **(SMALL | overrides)))


def some_documents(count=48):
    rng = random.Random(0)
    ids = [[rng.randrange(4, 40)] * 6 + [rng.randrange(4, 96) for _ in range(30)] for _ in range(count)]
    return Documents(ids, [[1.0] * 36 for _ in ids], tokens_per_batch=512)


def test_dense_experts_match_transformers():
    model = small_target()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    ids = torch.randint(0, 96, (2, 21))
    model.set_experts_implementation("eager")
    expected = model(input_ids=ids, use_cache=False).logits
    tiny.use_dense_experts(model)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


def test_default_config_is_what_the_issue_asks_for():
    config = tiny.target_config(2048)
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config.num_experts == 32 and config.num_experts_per_tok == 4 and config.tie_word_embeddings


def test_balance_loss_is_one_for_even_routing():
    logits = torch.eye(32).repeat(4, 1) * 0.0 + torch.rand(128, 32) * 1e-6
    assert tiny.balance_loss((logits,), torch.ones(128)).item() == pytest.approx(1.0, abs=1e-3)
    skewed = logits.clone()
    skewed[:, :4] += 20
    assert tiny.balance_loss((skewed,), torch.ones(128)).item() == pytest.approx(8.0, abs=1e-2)


def test_gradient_step_equals_backward():
    model, batch = small_target(), next(some_documents().batches(torch.device("cpu"), seed=0))
    tiny.use_dense_experts(model)
    value = GradientStep(model, lambda ids, weights: tiny.target_loss(model, ids, weights))(batch)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss, ce = tiny.target_loss(model, *batch)
    loss.backward()
    torch.testing.assert_close(value, ce)
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_train_target_learns_resumes_and_removes_dropout(tmp_path):
    documents, model = some_documents(), small_target()
    before = tiny.evaluate_target(model, documents)
    log = TrainLog(tmp_path, "target")
    after = tiny.train_target(model, documents, documents, Budget(10, max_steps=15), log)
    assert after < before - 0.1
    again, budget = small_target(), Budget(10, max_steps=16)
    tiny.train_target(again, documents, documents, budget, log)
    # fifteen of the sixteen steps came from the checkpoint
    assert budget.steps == 16
    assert tiny.evaluate_target(again, documents) == pytest.approx(after, abs=0.1)
    again.train()
    ids = torch.randint(0, 96, (1, 9))
    assert torch.equal(again(input_ids=ids).logits, again(input_ids=ids).logits)


def test_learning_rate_and_budget():
    assert learning_rate(1.0, 0.0) == pytest.approx(0.02) and learning_rate(1.0, 0.03) == pytest.approx(1.0)
    assert learning_rate(1.0, 1.0) == pytest.approx(0.02)
    assert Budget(0.0).done() and not Budget(1.0).done() and Budget(1.0, max_steps=2, steps=2).done()


def test_loops_finds_repetition_only():
    rng = random.Random(0)
    free = [rng.randrange(2048) for _ in range(100)]
    once = free[:20] + list(range(10)) * 2
    answers = [
        free,
        free[:30] + [5] * 30,
        free[:20] + list(range(10)) * 4,
        once,
        free[:9],
        (free[:9] + free[4:13]) * 6,
    ]
    assert loops(answers) == [False, True, True, False, False, True]


def test_repeated_flags_the_second_time():
    assert repeated([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]) == [0] * 11 + [1]


def test_unlearning_makes_repetition_less_probable(tmp_path):
    model, documents = small_target(), some_documents()
    tiny.use_dense_experts(model)
    answered = Answered([[4, 5], [6, 7]], [[7, 8, 9] * 12, [*range(30, 90), 2]])
    ids = torch.tensor([answered.prompts[0] + answered.answers[0]])

    def repetition():
        logp = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None])[:, 10:].mean().item()

    before = repetition()
    unlearn_loops(model, answered, documents, 2, Budget(10, max_steps=6), TrainLog(tmp_path, "unlearn"), lr=5e-3)
    assert repetition() < before
