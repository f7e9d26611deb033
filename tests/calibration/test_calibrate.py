"""`hybridspec calibrate` on the shipped pair: a config that generate takes, resuming, and every refusal."""

import contextlib
import copy
import importlib.util
import io
import json
import math
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_drafter, tiny_target
from transformers import AutoTokenizer

import hybridspec_hf
from hybridspec_generation import DecodeReport, cost_at
from hybridspec_generation.cache import TargetCache
from hybridspec_generation.tables import SelectionTables
from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.calibration import contexts
from hybridspec_hf.calibration.acceptance import fit_acceptance_table, leave_out, predict_unseen
from hybridspec_hf.calibration.calibrate import describe_rounds, fit_tables
from hybridspec_hf.calibration.capture import CaptureRounds, capture_rounds, merge_rounds
from hybridspec_hf.calibration.contexts import TEXTS, decode_at, measure_contexts, measure_pair, texts_of
from hybridspec_hf.calibration.cost_files import UnfinishedCosts
from hybridspec_hf.calibration.prompts import load_prompts, prompt_hash
from hybridspec_hf.calibration.store import CaptureStore
from hybridspec_hf.cli import main
from hybridspec_hf.engine import get_engine
from hybridspec_hf.identity import identify, positions
from hybridspec_hf.pair import TINY_PAIR, encode, load_pair, read_prompts, run_plain

PROMPTS, NEW_TOKENS = 8, 48


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    """Enough rounds for a curve of no use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "ROUND_TOKENS", 20)
        yield


class Outcome(NamedTuple):
    """Exit status and output of a command."""

    status: int
    stdout: str
    stderr: str


def hybridspec_calibrate(prompts: Path, folder: Path, *more: object) -> Outcome:
    """Run the command on the shipped pair."""
    arguments = ["--target", TINY_PAIR / "target", "--drafter", TINY_PAIR / "drafter", "--prompts", prompts, "--json"]
    arguments += ["--output", folder, "--max-new-tokens", NEW_TOKENS, "--device", "cpu", "--dtype", "float32", *more]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["calibrate", *map(str, arguments)])
    return Outcome(status, out.getvalue(), err.getvalue())


def write_lines(path: Path, rows: list) -> Path:
    """A JSONL file; strings are written as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: list[dict] = [dict(row) for row in read_prompts(TINY_PAIR / "prompts.jsonl", PROMPTS)]
    rows[1] = {"messages": [{"role": "user", "content": rows[1]["prompt"]}], "split": "calibration"}
    rows.append({"prompt": "Never calibrate on this.", "split": "test"})
    return write_lines(tmp_path_factory.mktemp("prompts") / "some.jsonl", rows)


@pytest.fixture(scope="module")
def calibrated(prompt_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("calibrated") / "new"
    return folder, hybridspec_calibrate(prompt_file, folder)


@pytest.fixture(scope="module")
def pair():
    return load_pair(str(TINY_PAIR / "target"), str(TINY_PAIR / "drafter"), dtype="float32", device_map="cpu")


def captured_in(folder: Path) -> dict:
    """The rounds that a folder keeps."""
    path = folder / "capture.jsonl"
    return CaptureStore(path, json.loads(path.read_text().splitlines()[0])).captured


def generate(pair, config: HybridSpecConfig, prompt: str):
    """One request, and what plain generate says."""
    inputs = encode(pair, prompt, chat_template=True)
    out = pair.model.generate(
        **inputs, assistant_model=pair.drafter, generation_mode="hybridspec", hybridspec_config=config,
        do_sample=False, max_new_tokens=40, return_dict_in_generate=True,
    )  # fmt: skip
    return out, run_plain(pair, inputs, max_new_tokens=40)


def test_command_reports_and_saves(calibrated):
    folder, outcome = calibrated
    assert outcome.status == 0, outcome.stderr
    report = json.loads(outcome.stdout.splitlines()[-1])
    rounds = captured_in(folder)
    assert report["prompts"] == len(rounds) == PROMPTS and "1 prompts of another split" in outcome.stdout
    accepted = torch.cat([rounds[i].accepted for i in range(PROMPTS)])
    assert report["rounds"] == len(accepted) >= 30
    assert report["acceptance_length"] == pytest.approx(float(accepted.double().mean()) + 1, abs=1e-4)
    errors = report["calibration_error"]
    assert errors["unseen"] and len(errors["table_by_position"]) == 15
    assert all(0 <= errors[name] <= 1 for name in ("confidence", "table"))
    times = list(report["round_ms"].values())
    assert list(report["round_ms"]) == [str(w) for w in range(2, 17)] and times == sorted(times)
    assert list(report["contexts"]) == list(report["interpolation_gain"]) and len(report["contexts"]) == 1
    for word in ("rounds ", "acceptance length", "calibration error", "rho ", "ms/round"):
        assert word in outcome.stdout

    config = HybridSpecConfig.from_pretrained(folder)
    (cost,) = config.costs
    assert cost.throughput == pytest.approx(report["throughput"], abs=1e-3) and config.throughput is None
    assert (cost.device, cost.runtime) == ("cpu", "block, PyTorch, modules") and cost.context > NEW_TOKENS // 2
    for table in (config.acceptance, config.experts, cost):
        for part in ("tiny_pair/target", "tiny_pair/drafter", "cpu", "torch", "transformers"):
            assert part in table.source and str(TINY_PAIR) not in table.source
    # rho is a rate that the selector reaches on these rounds: between the slowest and the fastest possible
    assert 1 / (cost.fixed_cost + cost.target_cost[16]) < cost.throughput < 16 / cost.fixed_cost
    made_for = config.calibrated_for
    assert (made_for.target, made_for.drafter, made_for.hardware) == ("tiny_pair/target", "tiny_pair/drafter", "cpu")
    assert "torch" in made_for.versions and made_for.date.startswith("20") and made_for.prompts == "some.jsonl"
    assert len(set(made_for.prompt_hashes)) == PROMPTS
    # what the curve goes through, and all of its requests in the bar
    lengths = [w for w, _ in cost.measured]
    assert len(set(lengths)) == 5 and lengths == sorted(lengths) and all(seconds > 0 for _, seconds in cost.measured)
    assert "20/20" in outcome.stderr and f"latency behind {cost.context} tokens" in outcome.stderr
    assert f"{TEXTS} texts" in cost.source and not (folder / "latency.jsonl").exists()
    # a published folder is small: the numbers are not in the JSON
    assert (folder / "hybridspec_config.json").stat().st_size < 4000


def test_generate_takes_the_config(pair, calibrated):
    config = HybridSpecConfig.from_pretrained(calibrated[0])
    out, plain = generate(pair, config, "Write a Python function that adds two numbers.")
    assert torch.equal(out.sequences, plain) and out.report.notes == [] and out.report.cost == "given"
    assert out.report.acceptance_length > 1.5


def test_cost_of_another_gpu_is_measured_again(pair, calibrated):
    config = HybridSpecConfig.from_pretrained(calibrated[0])
    config = replace(config, cost=replace(config.costs[0], device="NVIDIA Some GPU"), throughput=1e-9)
    get_engine(pair.model, pair.drafter).costs.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = []
        for prompt in ("How many apples are 3 + 4?", "Say hello."):
            out, plain = generate(pair, config, prompt)
            assert torch.equal(out.sequences, plain)
            reports.append(out.report)
    assert len([w for w in caught if "measured on NVIDIA Some GPU, this is cpu" in str(w.message)]) == 1
    for report in reports:
        assert [note.partition(" ")[0] for note in report.notes] == ["the", "cost:"]
    assert [report.cost for report in reports] == ["measured now", "kept from an earlier request"]
    # the given rho, tiny, would have verified whole blocks
    assert min(reports[0].nominal_lengths) < 16


def notes_and_warnings(pair, config: HybridSpecConfig) -> tuple[list, list]:
    """Of a request whose tokens are plain generate's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, plain = generate(pair, config, "How many apples are 3 + 4?")
    assert torch.equal(out.sequences, plain)
    return out.report.notes, [str(w.message) for w in caught if "HybridSpec" in str(w.message)]


def test_cost_of_another_backend_is_measured_again(pair, calibrated):
    config = replace(HybridSpecConfig.from_pretrained(calibrated[0]), gdn_backend="recurrent")
    notes, caught = notes_and_warnings(pair, config)
    assert "measured with block, PyTorch, modules, rounds run here with recurrent, PyTorch, modules" in notes[0]
    assert len(notes) == 2 and notes[1].startswith("cost:") and len(caught) == 1


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_another_pair_keeps_the_acceptance_and_measures_the_cost(pair, calibrated, which, monkeypatch):
    config = HybridSpecConfig.from_pretrained(calibrated[0])
    made_for = replace(config.calibrated_for, **{f"{which}_weights": "0" * 16})
    built = []
    original = SelectionTables.build
    monkeypatch.setattr(SelectionTables, "build", lambda *args: built.append(args) or original(*args))
    config = replace(config, calibrated_for=made_for)
    notes, caught = notes_and_warnings(pair, config)
    assert "tiny_pair/target" in notes[0] and "another pair" in notes[0] and notes[1].startswith("cost:")
    assert len(notes) == 2 and len(caught) == 1
    acceptance, cost, experts = built[0][:3]
    assert (acceptance, experts) == (config.acceptance, config.experts) and cost not in config.costs
    assert notes_and_warnings(pair, config)[1] == [], "it warns once"
    # nothing to measure again: the note is still there
    notes, caught = notes_and_warnings(pair, replace(config, cost=None))
    assert "they are kept" in notes[0] and len(caught) == 1
    # a second wrong pair is told, too
    with torch.no_grad():
        pair.drafter.fc.weight.neg_()
    notes, caught = notes_and_warnings(pair, replace(config, cost=None))
    assert "they are kept" in notes[0] and len(caught) == 1
    with torch.no_grad():
        pair.drafter.fc.weight.neg_()


def test_weights_that_changed_are_another_pair(pair, calibrated):
    model, drafter = pair.model, pair.drafter
    before = identify(get_engine(model, drafter).target, drafter)
    assert before == identify(get_engine(copy.deepcopy(model), drafter).target, drafter)
    config = HybridSpecConfig.from_pretrained(calibrated[0])
    assert before == (config.calibrated_for.target_weights, config.calibrated_for.drafter_weights)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[2].mlp.gate.weight[0, 0] += 1
    after = identify(get_engine(other, drafter).target, drafter)
    assert after.target != before.target and after.drafter == before.drafter
    assert identify(get_engine(model.to(torch.bfloat16), drafter.to(torch.bfloat16)).target, drafter) != before
    model.float(), drafter.float()


def test_weights_that_are_written_in_place_are_another_pair():
    model = tiny_target()
    drafter = tiny_drafter(model)
    engine = get_engine(model, drafter)
    before = engine.identity(drafter)
    engine.costs["kept"] = "a curve"
    assert engine.identity(drafter) is before and engine.costs
    other = {name: weight + 1 for name, weight in model.state_dict().items()}
    model.load_state_dict(other)
    assert get_engine(model, drafter) is engine
    after = engine.identity(drafter)
    assert after.target != before.target and after.drafter == before.drafter and not engine.costs
    assert after == identify(engine.target, drafter)


@pytest.mark.parametrize("shape", [(16, 64), (48, 60), (240, 7), (3, 16, 32), (2880, 45)])
def test_the_fingerprint_looks_at_many_rows_and_columns(shape):
    size = torch.Size(shape).numel()
    found = positions(size, torch.device("cpu"))
    assert found.max() < size and len(found.unique()) >= 15
    for i, width in enumerate(shape):
        index = torch.unravel_index(found, shape)[i]
        assert len(index.unique()) >= min(width, 6), i
    assert positions(3, torch.device("cpu")).shape == (3,) and not len(positions(0, torch.device("cpu")))


def test_several_contexts_are_measured_and_interpolated(pair, prompt_file, calibrated, tmp_path, monkeypatch):
    shutil.copy(calibrated[0] / "capture.jsonl", tmp_path)
    outcome = hybridspec_calibrate(prompt_file, tmp_path, "--context", 300, 60)
    assert outcome.status == 0, outcome.stderr
    config = HybridSpecConfig.from_pretrained(tmp_path)
    assert [cost.context for cost in config.costs] == [60, 300] and all(cost.throughput for cost in config.costs)
    report = json.loads(outcome.stdout.splitlines()[-1])
    # the best lengths of a context cannot lose against those of another, up to the rounding of the report
    assert list(report["interpolation_gain"]) == ["60", "300"] and min(report["interpolation_gain"].values()) > 0.9999
    assert re.search(r"^60 .*^300 ", outcome.stdout, re.MULTILINE | re.DOTALL)
    built = []
    original = SelectionTables.build
    monkeypatch.setattr(SelectionTables, "build", lambda *args: built.append(args) or original(*args))
    out, plain = generate(pair, config, "How many apples are 3 + 4? " * 8)
    assert torch.equal(out.sequences, plain)
    middle = out.report.prompt_tokens + 39 // 2
    assert 60 < middle < 300 and built[0][1] == cost_at(config.costs, middle)
    assert built[0][3] == cost_at(config.costs, middle).throughput


@pytest.mark.parametrize("context, message", [([0, 5], "context must be 1 to"), ([10**9], "context must be 1 to")])
def test_contexts_out_of_range_are_refused(prompt_file, tmp_path, context, message):
    outcome = hybridspec_calibrate(prompt_file, tmp_path / "out", "--context", *context)
    assert outcome.status == 2 and message in outcome.stderr, outcome.stderr
    assert not (tmp_path / "out").exists()


def round_seconds(w):
    """A curve that could be a GPU's."""
    return (5 + 0.3 * w - 0.004 * w * w) / 1e3


def fake_answer(model, drafter, text, w):
    """An answer at one length, which takes no time here: more rounds, and slower ones, the larger its first token."""
    rounds = 10 * int(text[0])
    # a short round at the end, as the output budget leaves it
    lengths = [*[w] * (rounds - 1), 2]
    seconds = int(text[0]) * sum(map(round_seconds, lengths))
    return DecodeReport(policy="", emitted=[1] * rounds, verify_lengths=lengths, decode_seconds=seconds)


@pytest.mark.parametrize("where", ["cache", "forward"])
def test_a_context_that_does_not_fit_is_left_out(pair, monkeypatch, where):
    def full(size):
        if size > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")

    allocate, said = TargetCache.__init__, []
    if where == "cache":
        monkeypatch.setattr(contexts, "decode_at", fake_answer)
        monkeypatch.setattr(TargetCache, "__init__", lambda self, *args, capacity, **options: full(capacity - 256) or (
            allocate(self, *args, capacity=capacity, **options)))  # fmt: skip
    else:
        monkeypatch.setattr(contexts, "decode_at", lambda *args: full(len(args[2])) or fake_answer(*args))
    prompts = [torch.randint(1, 90, (1, 20))]
    costs = measure_contexts(pair.model, pair.drafter, prompts, [30, 700, 900], said.append)
    assert [cost.context for cost in costs] == [30] and len(said) == 1 and "700 tokens" in said[0]
    assert ("static cache" if where == "cache" else "out of memory") in said[0]
    with pytest.raises(RuntimeError, match="static cache" if where == "cache" else "out of memory"):
        measure_contexts(pair.model, pair.drafter, prompts, [700], said.append)


def test_rounds_that_fell_back_are_no_curve(pair, monkeypatch):
    """They are of another runtime: kernels for which memory did not suffice, say."""

    def answer(model, drafter, text, w):
        fell_back = len(text) == 60 or (len(text) == 90 and w > 4)
        launches = "modules" if fell_back else "kernels"
        return replace(fake_answer(model, drafter, text, w), launches=launches, notes=["a kernel failed"])

    monkeypatch.setattr(contexts, "decode_at", answer)
    prompts, said = [torch.randint(1, 90, (1, 20))], []
    for others, why in (
        (60, "ran in .*modules there, not in .*kernels"),
        (90, "ran as kernels, others as modules: a k"),
    ):
        costs = measure_contexts(pair.model, pair.drafter, prompts, [30, others, 120], said.append)
        assert [cost.context for cost in costs] == [30] and costs[0].runtime.endswith("kernels")
        assert re.search(f"No latency behind {others} tokens, nor behind more: .*{why}", said[-1])
    with pytest.raises(RuntimeError, match="some rounds ran as kernels, others as modules"):
        measure_contexts(pair.model, pair.drafter, prompts, [90], said.append)
    # all of them: the curve is that of the modules
    (cost,) = measure_contexts(pair.model, pair.drafter, prompts, [60], said.append)
    assert cost.runtime.endswith("modules")


@pytest.mark.parametrize("content", ['{"my": "own results"}\n', "text\n"])
def test_a_file_that_is_not_a_calibrations_is_left_alone(tmp_path, content):
    path = tmp_path / "latency.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not a calibration's. Choose another output folder"):
        UnfinishedCosts(path, {"block": 16})
    assert path.read_text() == content
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="latency.jsonl cannot be read"):
        UnfinishedCosts(path, {"block": 16})


@pytest.mark.parametrize("error", [RuntimeError("device-side assert"), ValueError("a bug"), KeyError("another")])
def test_what_is_no_lack_of_memory_is_raised(pair, monkeypatch, error):
    def fail(model, drafter, text, w):
        if len(text) > 30:
            raise error
        return fake_answer(model, drafter, text, w)

    monkeypatch.setattr(contexts, "decode_at", fail)
    with pytest.raises(type(error)) as caught:
        measure_contexts(pair.model, pair.drafter, [torch.randint(1, 90, (1, 20))], [30, 40], print)
    assert caught.value is error


def test_the_curve_is_that_of_whole_rounds(pair, monkeypatch):
    monkeypatch.setattr(contexts, "decode_at", fake_answer)
    cost = measure_pair(pair.model, pair.drafter, [torch.arange(1, 40)])
    for w, seconds in cost.measured:
        assert cost.fixed_cost + np.interp(w, range(17), cost.target_cost) == pytest.approx(seconds, rel=1e-3)
        # the mean over 9 rounds of a length and one of 2
        length = (10 * w - 2) / 9
        assert length == pytest.approx(round(length)) and seconds == pytest.approx(
            (9 * round_seconds(length) + round_seconds(2)) / 10
        )
    assert cost.context == 39 and "whole rounds" in cost.source and cost.expert_cost >= 0


def test_answers_count_by_their_rounds(pair, monkeypatch):
    monkeypatch.setattr(contexts, "decode_at", fake_answer)
    one, many = (torch.full((30,), first) for first in (1, 3))
    once = measure_pair(pair.model, pair.drafter, [one])
    both = measure_pair(pair.model, pair.drafter, [one, many])
    # 10 rounds of 1 beside 30 of 3, at the longest length less the round of 2
    assert both.measured[0] == pytest.approx((2.0, 2.5 * once.measured[0][1]))
    assert both.measured[-1][0] == pytest.approx((38 * 16 + 2 * 2) / 40) and "2 texts" in both.source


def test_an_interrupted_measurement_is_resumed(prompt_file, calibrated, tmp_path, monkeypatch):
    shutil.copy(calibrated[0] / "capture.jsonl", tmp_path)
    asked = []

    def stop(model, drafter, text, w):
        asked.append((len(text), w))
        if asked[-1] == (90, 8):
            raise KeyboardInterrupt
        return fake_answer(model, drafter, text, w)

    monkeypatch.setattr(contexts, "decode_at", stop)
    assert hybridspec_calibrate(prompt_file, tmp_path, "--context", 60, 90).status == 130
    lines = (tmp_path / "latency.jsonl").read_text().splitlines()
    assert len(lines) == 1 and not (tmp_path / "hybridspec_config.json").exists()
    first = json.loads(lines[0])["cost"]
    monkeypatch.setattr(
        contexts, "decode_at", lambda *args: asked.append((len(args[2]), args[3])) or fake_answer(*args)
    )
    # of another machine, half a line, no JSON object: measured
    facts = json.loads(lines[0])["facts"]
    other = json.dumps({"facts": {**facts, "device": "NVIDIA Some GPU"}, "cost": {**first, "context": 90}})
    (tmp_path / "latency.jsonl").write_text("\n".join([lines[0], other, "[]", lines[0][:90]]))
    del asked[:]
    outcome = hybridspec_calibrate(prompt_file, tmp_path, "--context", 60, 90)
    assert outcome.status == 0, outcome.stderr
    assert "latency.jsonl: 3 lines are damaged or of something else" in outcome.stdout
    assert "behind 60 tokens is already measured" in outcome.stdout and {length for length, _ in asked} == {90}
    kept, measured = HybridSpecConfig.from_pretrained(tmp_path).costs
    assert list(kept.target_cost) == first["target_cost"] and kept.throughput > 0 == first["throughput"]
    assert (kept.context, measured.context) == (60, 90) and not (tmp_path / "latency.jsonl").exists()
    # all is there: the next call measures anew
    assert hybridspec_calibrate(prompt_file, tmp_path, "--context", 60).status == 0 and asked[-1] == (60, 16)


def test_rounds_are_measured_on_answers_of_one_length_that_no_eos_ends(pair, monkeypatch):
    text = torch.randint(1, 90, (20,))
    plain = pair.model.generate(text[None], do_sample=False, max_new_tokens=9)[0, 20:]
    monkeypatch.setattr(pair.model.generation_config, "eos_token_id", int(plain[3]))
    report = decode_at(pair.model, pair.drafter, text, 4)
    assert (report.policy, report.new_tokens) == ("static:4", contexts.ROUND_TOKENS)
    # the budget shortens the last three at most
    assert set(report.verify_lengths[:-3]) == {4} and report.decode_seconds > 0


def test_the_library_call_says_at_once_that_scikit_learn_is_missing(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="hybridspec-hf\\[calibration\\]"):
        hybridspec_hf.calibrate(pair.model, pair.drafter, [], max_new_tokens=40, output=tmp_path)


def test_interrupted_run_is_resumed(prompt_file, calibrated, tmp_path):
    whole = (calibrated[0] / "capture.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "capture.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:100])
    outcome = hybridspec_calibrate(prompt_file, tmp_path)
    assert outcome.status == 0, outcome.stderr
    assert f"3 of {PROMPTS} prompts are already captured" in outcome.stdout
    assert (tmp_path / "capture.jsonl").read_bytes() == whole
    again, first = (HybridSpecConfig.from_pretrained(folder) for folder in (tmp_path, calibrated[0]))
    assert (again.acceptance, again.experts) == (first.acceptance, first.experts)
    assert again.calibrated_for == first.calibrated_for


def test_another_run_is_not_resumed(prompt_file, calibrated, tmp_path):
    shutil.copy(calibrated[0] / "capture.jsonl", tmp_path)
    before = (tmp_path / "capture.jsonl").read_bytes()
    fewer = write_lines(tmp_path / "fewer.jsonl", prompt_file.read_text().splitlines()[1:])
    for outcome, message in (
        (hybridspec_calibrate(fewer, tmp_path), "other prompts .*: some.jsonl, now fewer.jsonl"),
        (hybridspec_calibrate(prompt_file, tmp_path, "--max-new-tokens", 50), "another max_new_tokens: 48, now 50"),
        (hybridspec_calibrate(prompt_file, tmp_path, "--dtype", "bfloat16"), "another dtype: float32, now bfloat16"),
    ):
        assert outcome.status == 2 and re.search(message, outcome.stderr), outcome.stderr
    assert (tmp_path / "capture.jsonl").read_bytes() == before


@pytest.mark.parametrize("key, message", [
    ("target_weights", "another target: .*target, whose content has changed"),
    ("drafter_weights", "another drafter"),
    ("format", "another version of hybridspec_hf"),
    ("eos", "other EOS ids"),
    ("block", "another block size"),
])  # fmt: skip
def test_store_refuses_another_pair(calibrated, key, message):
    path = calibrated[0] / "capture.jsonl"
    header = json.loads(path.read_text().splitlines()[0])
    assert (
        header["eos"]
        and header["num_prompts"] == PROMPTS
        and header["context"] > NEW_TOKENS // 2
        and header["top_k"]
        and header["num_moe_layers"]
    )
    now = {**header, key: "other", **({"drafter": "elsewhere"} if key == "drafter_weights" else {})}
    with pytest.raises(ValueError, match=message + ".*Choose another output folder"):
        CaptureStore(path, now)


@pytest.mark.parametrize("damage", [
    "nonsense", '{"prompt": 0}', "[]", '{"a": 1', '{"prompt": 0, "accepted": [1]}', "[" * 100_000,
    ("prompt", PROMPTS), ("prompt", -1), ("prompt", "0"), ("prompt", 1.0), ("prompt", None),
    ("accepted", -1), ("accepted", 16), ("accepted", 1.5), ("accepted", "1"), ("accepted", None),
    *(("confidence", value) for value in (-0.1, 1.1, math.nan, "1", [0.5], None)),
    *(("entropy", value) for value in (-0.1, math.inf, math.nan)),
    *((name, value) for name in ("new_layer0", "new_later") for value in (-1, 10**4, 0.5, 10**400)),
])  # fmt: skip
def test_damaged_store_is_refused(calibrated, tmp_path, damage):
    lines = (calibrated[0] / "capture.jsonl").read_text().splitlines()
    if not isinstance(damage, str):
        name, value = damage
        row = json.loads(lines[1])
        damage = json.dumps({**row, name: with_first(row[name], value)})
    path = write_lines(tmp_path / "capture.jsonl", [lines[0], damage, lines[2]])
    with pytest.raises(ValueError, match=f"{path} is damaged in line 2"):
        CaptureStore(path, json.loads(lines[0]))


def with_first(value, leaf):
    """`value` with the first number inside replaced."""
    return [with_first(value[0], leaf), *value[1:]] if isinstance(value, list) else leaf


@pytest.mark.parametrize("name", ["accepted", "confidence", "new_later"])
def test_rows_of_other_lengths_are_refused(calibrated, tmp_path, name):
    lines = (calibrated[0] / "capture.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    ragged = [row[name][:-1], [*row[name], row[name][0]]]
    if name != "accepted":
        ragged += [[row[name][0][:-1], *row[name][1:]], [part[:-1] for part in row[name]], sum(row[name], [])]
    for value in ragged:
        path = write_lines(tmp_path / "capture.jsonl", [lines[0], {**row, name: value}])
        with pytest.raises(ValueError, match="is damaged in line 2"):
            CaptureStore(path, json.loads(lines[0]))


@pytest.mark.parametrize("header", ["{}", "[]", "nonsense", '{"format": 2}'])
def test_damaged_header_is_refused(calibrated, tmp_path, header):
    good = json.loads((calibrated[0] / "capture.jsonl").read_text().splitlines()[0])
    with pytest.raises(ValueError, match="capture.jsonl is damaged"):
        CaptureStore(write_lines(tmp_path / "capture.jsonl", [header]), good)


def test_a_capture_that_is_no_utf8_is_refused(calibrated, tmp_path):
    lines = (calibrated[0] / "capture.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "capture.jsonl").write_bytes(lines[0] + lines[1].replace(b"prompt", b"\xff\xfe"))
    with pytest.raises(ValueError, match="capture.jsonl is damaged in line 2"):
        CaptureStore(tmp_path / "capture.jsonl", json.loads(lines[0]))


def test_reading_a_capture_writes_nothing(calibrated, tmp_path):
    lines = (calibrated[0] / "capture.jsonl").read_bytes().splitlines(keepends=True)
    header, path = json.loads(lines[0]), tmp_path / "new" / "capture.jsonl"
    assert CaptureStore(path, header).captured == {} and not path.parent.exists()
    path.parent.mkdir()
    half = b"".join(lines[:2]) + lines[2][:50]
    path.write_bytes(half)
    store = CaptureStore(path, header)
    assert len(store.captured) == 1 and path.read_bytes() == half
    # the half line goes with the first that is added
    rounds = captured_in(calibrated[0])
    for index in (1, 2):
        store.add(index, rounds[index])
    assert path.read_bytes() == b"".join(lines[:4])


@pytest.mark.parametrize("lines, message", [
    ([{"prompt": "a"}, "{nonsense"], "line 2: not a JSON object"),
    ([{"prompt": "a"}, "", {"text": "b"}], 'line 3: needs .* "prompt" or "messages"'),
    ([["prompt"]], "line 1: needs"),
    ([{"prompt": "a", "messages": []}], "line 1: needs"),
    ([{"prompt": ""}], "line 1: .*not empty"),
    ([{"prompt": 3}], "line 1: .*must be a text"),
    ([{"messages": [{"role": "user"}]}], 'line 1: "messages" must'),
    ([{"messages": []}], 'line 1: "messages" must'),
    ([], "has no prompts"),
    ([{"prompt": "a", "split": "test"}], "has no prompts whose split"),
    (None, "no prompt file"),
])  # fmt: skip
def test_bad_prompt_files_are_refused(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    if lines is not None:
        write_lines(path, lines)
    outcome = hybridspec_calibrate(path, tmp_path / "out")
    assert outcome.status == 2 and re.search(message, outcome.stderr), outcome.stderr
    assert not (tmp_path / "out").exists()


def test_too_few_rounds_are_refused(prompt_file, tmp_path):
    one = write_lines(tmp_path / "one.jsonl", prompt_file.read_text().splitlines()[:1])
    for tokens, message in ((16, "no round a whole block"), (17, "at least 30 uncut rounds, got")):
        outcome = hybridspec_calibrate(one, tmp_path / "out", "--max-new-tokens", tokens)
        assert outcome.status == 2 and message in outcome.stderr, outcome.stderr
    assert not (tmp_path / "out" / "hybridspec_config.json").exists()


def test_one_prompt_is_enough_where_it_has_the_rounds(calibrated):
    rounds = merge_rounds([captured_in(calibrated[0])[i] for i in range(PROMPTS)])
    with pytest.raises(ValueError, match="no others"):
        predict_unseen([rounds])
    report = describe_rounds([rounds], fit_acceptance_table(rounds, "one"), 3)
    assert report["prompts"] == 1 and report["calibration_error"]["unseen"] is False


IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("changes, message", [
    ({"drafter": None}, "needs a drafter"),
    ({"prompts": []}, "needs prompts"),
    *(({"prompts": [IDS, bad]}, r"prompts\[1\] must be token ids \[1, T\]") for bad in (
        IDS[0], IDS.repeat(2, 1), IDS[:, :0], IDS.float(), IDS.bool(), [1, 2, 3], "text", None,
    )),
    ({"prompts": IDS}, r"prompts\[0\] must be"),
    *(({"context": bad}, "context must be") for bad in (1.5, True, "64", [64.0], [True], ["64"], [], 0, [64, -1])),
])  # fmt: skip
def test_the_library_call_refuses_mistakes_before_anything_runs(pair, tmp_path, changes, message):
    call = {"drafter": pair.drafter, "prompts": [IDS], "max_new_tokens": 40, "output": tmp_path / "out", **changes}
    with pytest.raises(ValueError, match=message):
        hybridspec_hf.calibrate(pair.model, **call)
    assert not (tmp_path / "out").exists()


def test_prompts_without_a_chat_template(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TINY_PAIR / "target")
    templated = load_prompts(write_lines(tmp_path / "a.jsonl", [{"prompt": "Hello"}]), tokenizer).input_ids[0]
    tokenizer.chat_template = None
    plain = load_prompts(tmp_path / "a.jsonl", tokenizer).input_ids[0]
    assert plain.tolist() == [tokenizer("Hello")["input_ids"]] and templated.shape[1] > plain.shape[1]
    with pytest.raises(ValueError, match="line 1: .*no chat template"):
        load_prompts(write_lines(tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": "a"}]}]), tokenizer)


def test_unseen_predictions_do_not_know_their_own_labels(calibrated):
    rounds = captured_in(calibrated[0])
    prompts = [rounds[i] for i in range(PROMPTS)]
    empty = rounds[0]._replace(**{name: part[:0] for name, part in rounds[0]._asdict().items()})
    before = predict_unseen([*prompts, empty])
    size = len(prompts[0].accepted)
    flipped = prompts[0]._replace(accepted=15 - prompts[0].accepted)
    after = predict_unseen([flipped, *prompts[1:], empty])
    assert torch.equal(before[:size], after[:size]) and not torch.equal(before[size:], after[size:])


def test_dense_target_has_no_experts_to_count():
    model = tiny_target("qwen3_5")
    drafter = tiny_drafter(model)
    prompts = [torch.randint(1, 90, (1, n)) for n in (4, 9)]
    rounds = capture_rounds(model, drafter, prompts, max_new_tokens=50, eos=[])
    assert not rounds.new_layer0.any() and not rounds.new_later.any()
    rounds = rounds._replace(accepted=torch.randint(0, 16, rounds.accepted.shape))
    _, experts = fit_tables(rounds, get_engine(model, drafter).target, "dense")
    assert (experts.top_k, experts.num_moe_layers, experts.block) == (0, 0, 16) and not any(experts.mean_new_pairs)


@pytest.mark.parametrize("accepted, message", [(0, "rejected.*trained for this target"), (15, "accepted.*varied")])
def test_rounds_that_are_all_alike_are_refused(calibrated, accepted, message):
    rounds = captured_in(calibrated[0])
    alike = max(rounds.values(), key=lambda r: len(r.accepted))
    alike = alike._replace(
        **{name: part.repeat(30, *(1,) * (part.ndim - 1)) for name, part in alike._asdict().items()}
    )
    with pytest.raises(ValueError, match=message):
        fit_acceptance_table(alike._replace(accepted=torch.full_like(alike.accepted, accepted)), "alike")


def test_texts_to_measure_on_begin_at_different_prompts():
    prompts = [torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[6, 7, 8]])]
    texts = [text.tolist() for text in texts_of(prompts, 9)]
    assert texts == [[1, 2, 3, 4, 5, 6, 7, 8, 1], [3, 4, 5, 6, 7, 8, 1, 2, 3],
                     [5, 6, 7, 8, 1, 2, 3, 4, 5], [7, 8, 1, 2, 3, 4, 5, 6, 7]]  # fmt: skip
    assert [text.tolist() for text in texts_of([torch.tensor([[1, 2]])], 3)] == [[1, 2, 1], [2, 1, 2]]
    # a long context is prefilled less often, and once at least
    assert [len(texts_of(prompts, n)) for n in (1, 16384, 32768, 65536, 200_000)] == [4, 4, 2, 1, 1]


def test_a_prompt_has_a_hash_of_its_token_ids():
    ids = torch.tensor([[1, 2, 3]])
    assert prompt_hash(ids) == prompt_hash(ids.int()) == 179680479821700
    assert len({prompt_hash(torch.tensor([each])) for each in ([1, 2, 3], [1, 2], [12, 3], [3, 2, 1], [123])}) == 5


def test_every_prompt_is_left_out_once():
    prompts = [capture_of(i) for i in range(7)]
    folds = list(leave_out(prompts))
    assert [list(fold) for fold, _ in folds] == [[0, 5], [1, 6], [2], [3], [4]]
    for fold, others in folds:
        assert others.accepted.tolist() == [i for i in range(7) if i not in fold]


def capture_of(accepted):
    """One round."""
    draft, counts = torch.zeros(1, 15), torch.zeros(1, 16, dtype=torch.int64)
    return CaptureRounds(draft, draft, torch.tensor([accepted]), counts, counts)
