"""Streamers, stopping criteria and the report see what plain generate would have shown them."""

import threading

import pytest
import torch
from support.tiny_models import tiny_drafter, tiny_target
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from hybridspec_hf import HybridSpecConfig


@pytest.fixture(scope="module")
def pair():
    model = tiny_target()
    # a drafter that is right now and then would be better; the walk is the same for emitted tokens of any round
    return model, tiny_drafter(model)


class Recorder:
    """Keeps every put and the end."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


class StopAfter(StoppingCriteria):
    """Stops when the sequence ends in a token; remembers every sequence length that it saw."""

    def __init__(self, token):
        self.token, self.seen = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.tensor([bool(input_ids[0, -1] == self.token)])


IDS = torch.tensor([[5, 6, 7, 8, 9]])
MODE = {"generation_mode": "hybridspec", "do_sample": False, "max_new_tokens": 24}


def test_streamer_gets_the_prompt_then_each_token(pair):
    model, drafter = pair
    plain, ours = Recorder(), Recorder()
    model.generate(input_ids=IDS, do_sample=False, max_new_tokens=24, streamer=plain)
    model.generate(input_ids=IDS, assistant_model=drafter, streamer=ours, **MODE)
    assert ours.values == plain.values and ours.ended == plain.ended == 1


@pytest.mark.parametrize("at", [0, 1, 2, 9, 23])
def test_criteria_are_called_once_per_token_and_cut_the_block(pair, at):
    model, drafter = pair
    text = model.generate(input_ids=IDS, do_sample=False, max_new_tokens=24)[0]
    stop_plain, stop_ours = StopAfter(int(text[5 + at])), StopAfter(int(text[5 + at]))
    plain = model.generate(
        input_ids=IDS, do_sample=False, max_new_tokens=24, stopping_criteria=StoppingCriteriaList([stop_plain])
    )
    ours = model.generate(
        input_ids=IDS, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([stop_ours]), **MODE
    )
    assert torch.equal(ours, plain) and stop_ours.seen == stop_plain.seen


def assert_same_text(pair, **options):
    """AR, whole blocks and short ones against plain generate, dtype included."""
    model, drafter = pair
    options = {"input_ids": IDS, "max_new_tokens": 24, "do_sample": False, **options}
    plain = model.generate(**options)
    for config in (None, HybridSpecConfig(policy="full"), HybridSpecConfig(policy="static:3")):
        drafting = {"assistant_model": drafter, "hybridspec_config": config} if config else {}
        ours = model.generate(generation_mode="hybridspec", **options, **drafting)
        assert ours.dtype == plain.dtype and torch.equal(ours, plain), config
    return plain


@pytest.mark.parametrize("length, budget, want", [(12, 24, 12), (20, 4, 20), (5, 24, 6), (2, 24, 6)])
def test_a_length_criterion_of_the_caller_replaces_the_config(pair, length, budget, want):
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=length)])
    assert assert_same_text(pair, max_new_tokens=budget, stopping_criteria=criteria).shape[1] == want


def test_a_length_criterion_below_a_long_prompt_still_emits_a_token(pair):
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=8)])
    ids = torch.randint(1, 90, (1, 300))
    assert assert_same_text(pair, input_ids=ids, stopping_criteria=criteria).shape[1] == 301


@pytest.mark.parametrize("config_eos", [None, 9])
def test_an_eos_criterion_of_the_caller_replaces_the_config(pair, config_eos):
    text = pair[0].generate(input_ids=IDS, do_sample=False, max_new_tokens=24)[0].tolist()
    criteria = StoppingCriteriaList([EosTokenCriteria(eos_token_id=text[16])])
    eos = None if config_eos is None else text[config_eos]
    out = assert_same_text(pair, eos_token_id=eos, pad_token_id=0, stopping_criteria=criteria)
    assert out.shape[1] == 6 + text[5:].index(text[16])


@pytest.mark.parametrize("answer", [bool, lambda done: torch.tensor(done), lambda done: torch.tensor([[done]])])
def test_criteria_may_answer_with_a_bool_or_any_shape(pair, answer):
    criteria = StoppingCriteriaList([lambda ids, scores, **kwargs: answer(ids.shape[1] >= 14)])
    assert assert_same_text(pair, stopping_criteria=criteria).shape[1] == 14


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_prompt_dtypes(pair, dtype):
    assert_same_text(pair, input_ids=IDS.to(dtype))


def test_a_config_without_drafter_is_noted(pair):
    options = {"input_ids": IDS, "return_dict_in_generate": True, **MODE}
    assert pair[0].generate(**options).report.notes == []
    out = pair[0].generate(hybridspec_config=HybridSpecConfig(), **options)
    assert out.report.policy == "ar" and "only gdn_backend" in out.report.notes[0]
    # a drafter was forgotten
    with pytest.warns(UserWarning, match="policy='full' has no effect without assistant_model"):
        out = pair[0].generate(hybridspec_config=HybridSpecConfig(policy="full"), **options)
    assert out.report.policy == "ar" and "policy='full'" in out.report.notes[0]


def test_max_time_stops_early(pair):
    model, drafter = pair
    out = model.generate(input_ids=IDS, assistant_model=drafter, max_time=0.0, **MODE)
    assert out.shape[1] == 6


def test_report_adds_up(pair):
    model, drafter = pair
    out = model.generate(input_ids=IDS, assistant_model=drafter, return_dict_in_generate=True,
                         hybridspec_config=HybridSpecConfig(policy="hybridspec"), **MODE)  # fmt: skip
    report = out.report
    assert report.new_tokens == out.sequences.shape[1] - 5 == 1 + sum(report.emitted)
    assert report.rounds == len(report.verify_lengths) == len(report.accepted) == len(report.stage0_lengths)
    for w0, u, w, accepted in zip(
        report.nominal_lengths, report.stage0_lengths, report.verify_lengths, report.accepted, strict=True
    ):
        assert u <= w0 + 1 and w in (w0, w0 + 1, u) and w <= u <= 16 and accepted <= w - 1
    assert report.prefill_seconds > 0 and report.decode_seconds > 0 and report.tokens_per_second > 0
    assert any("shipped default" in note for note in report.notes) and any("measured" in note for note in report.notes)
    assert out.cache is None and out.scores is None
    report.to_dict()


def test_two_threads_on_one_model(pair):
    model, drafter = pair
    prompts = [torch.randint(1, 90, (1, n)) for n in (4, 30, 7, 19)]
    plain = [model.generate(input_ids=p, do_sample=False, max_new_tokens=24) for p in prompts]
    results: dict[int, torch.Tensor] = {}

    def run(i):
        for _ in range(3):
            results[i] = model.generate(input_ids=prompts[i], assistant_model=drafter, **MODE)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(torch.equal(results[i], plain[i]) for i in range(len(prompts)))
