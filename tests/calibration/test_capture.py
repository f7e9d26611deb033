"""A capture run records what full-length decoding does, and nothing of rounds that were cut short."""

import torch
from support.tiny_models import tiny_drafter, tiny_target

from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.calibration.capture import capture_rounds

NEW_TOKENS = 40


def test_capture_equals_the_reports_of_full_decoding():
    model = tiny_target()
    drafter = tiny_drafter(model)
    prompts = [torch.randint(1, 90, (1, n)) for n in (3, 8, 20)]
    full = HybridSpecConfig(policy="full")
    options = {"generation_mode": "hybridspec", "assistant_model": drafter, "hybridspec_config": full}
    options |= {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    accepted = []
    for ids in prompts:
        report = model.generate(input_ids=ids, **options).report
        # near the output limit the target input is shorter than the block
        whole = zip(report.accepted, report.emitted, report.verify_lengths, strict=True)
        accepted += [a for a, emitted, w in list(whole)[:-1] if w == 16 and emitted == a + 1]
    rounds = capture_rounds(model, drafter, prompts, max_new_tokens=NEW_TOKENS, eos=[])
    assert rounds.accepted.tolist() == accepted and len(accepted) > 30
    assert rounds.confidence.shape == rounds.entropy.shape == (len(accepted), 15)
    assert ((rounds.confidence > 0) & (rounds.confidence <= 1)).all() and (rounds.entropy >= 0).all()


def test_capture_counts_new_experts_of_every_layer():
    model = tiny_target()
    drafter = tiny_drafter(model)
    rounds = capture_rounds(model, drafter, [torch.randint(1, 90, (1, 8))], max_new_tokens=30, eos=[])
    top_k, experts = model.config.num_experts_per_tok, model.config.num_experts
    later_layers = model.config.num_hidden_layers - 1
    assert (rounds.new_layer0[:, 0] == top_k).all() and (rounds.new_later[:, 0] == top_k * later_layers).all()
    assert (rounds.new_layer0.sum(1) <= experts).all() and (rounds.new_later.sum(1) <= experts * later_layers).all()


def test_rounds_cut_by_eos_are_left_out():
    model = tiny_target()
    drafter = tiny_drafter(model)
    ids = torch.randint(1, 90, (1, 8))
    text = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, 8:].tolist()
    every = capture_rounds(model, drafter, [ids], max_new_tokens=NEW_TOKENS, eos=[])
    early = capture_rounds(model, drafter, [ids], max_new_tokens=NEW_TOKENS, eos=[text[6]])
    assert len(early.accepted) < len(every.accepted)
    assert early.accepted.tolist() == every.accepted[: len(early.accepted)].tolist()
