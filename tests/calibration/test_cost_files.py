"""Curves in the cache folder: measured once, read by the next process, belonging to what they were measured on."""

import copy
import json
import os
import re
import stat
import warnings
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from support.tiny_models import tiny_drafter, tiny_target

import hybridspec_hf
from hybridspec_hf.calibration import cost_files
from hybridspec_hf.engine import get_engine

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


@pytest.fixture(scope="module")
def pair():
    model = tiny_target()
    return model, tiny_drafter(model)


def first_report(pair, **config):
    """The report of a request in what could be another process."""
    model, drafter = pair
    hybridspec_hf.release(model)
    out = model.generate(
        input_ids=IDS, assistant_model=drafter, generation_mode="hybridspec", do_sample=False, max_new_tokens=6,
        hybridspec_config=hybridspec_hf.HybridSpecConfig(**config), return_dict_in_generate=True,
    )  # fmt: skip
    return out.report


def costs_of(pair):
    return get_engine(*pair).costs


def test_a_curve_is_measured_once_and_read_after_that(pair, cache):
    report = first_report(pair)
    measured = dict(costs_of(pair))
    assert report.cost == "measured now" and any(note.startswith("cost: measured now,") for note in report.notes)
    (path,) = cache.iterdir()
    assert path.name.startswith("cpu-") and path.suffix == ".json"
    kept = json.loads(path.read_text())
    assert kept["facts"]["torch"] == torch.__version__ and kept["facts"]["threads"] == 1
    report = first_report(pair)
    assert report.cost == "from the cache folder" and costs_of(pair) == measured
    assert "from the cache folder, measured on cpu" in report.notes[-1]
    # what runs the rounds decides their time
    assert first_report(pair, gdn_backend="replay").cost == "measured now" and len(list(cache.iterdir())) == 2


def test_another_pair_or_machine_has_its_own_curve(pair, cache):
    facts = cost_files.cost_facts(get_engine(*pair), pair[1], "r")
    paths = {cost_files.cost_path(facts)}
    for name, value in facts.items():
        paths.add(cost_files.cost_path({**facts, name: f"other {value}"}))
    assert len(paths) == 1 + len(facts)
    other = copy.deepcopy(pair[0])
    with torch.no_grad():
        other.model.layers[1].mlp.gate.weight.neg_()
    # the same sizes with other routers choose other experts
    other_facts = cost_files.cost_facts(get_engine(other, pair[1]), pair[1], "r")
    assert other_facts["sizes"] == facts["sizes"] and other_facts["target"] != facts["target"]


@pytest.mark.parametrize("damage", [
    lambda text: "", lambda text: text[: len(text) // 2], lambda text: "[]", lambda text: "null",
    lambda text: text.replace('"fixed_cost"', '"fixed"'),
    lambda text: re.sub(r'"fixed_cost": [^,]+', '"fixed_cost": NaN', text),
    lambda text: text.replace('"hybridspec_hf": "', '"hybridspec_hf": "9'),
    lambda text: text.replace('"target_cost": [', '"target_cost": [0.0,'),
    lambda text: "\ud800".encode("utf-8", "surrogatepass").decode("latin-1") + text,
])  # fmt: skip
def test_a_damaged_file_is_measured_again_and_replaced(pair, cache, damage):
    first_report(pair)
    (path,) = cache.iterdir()
    whole = path.read_text()
    path.write_text(damage(whole), encoding="latin-1")
    with pytest.warns(UserWarning, match="is damaged"):
        report = first_report(pair)
    assert report.cost == "measured now"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_report(pair).cost == "from the cache folder"
    assert [entry.name for entry in cache.iterdir()] == [path.name], "nothing half-written stays"


def test_off_keeps_nothing(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDSPEC_CACHE", "OFF")
    monkeypatch.chdir(tmp_path)
    assert cost_files.cache_folder() is None
    assert first_report(pair).cost == first_report(pair).cost == "measured now" and not list(tmp_path.iterdir())


def test_the_folder_is_beside_hugging_faces(monkeypatch):
    monkeypatch.setenv("HYBRIDSPEC_CACHE", "")
    assert cost_files.cache_folder() == Path(constants.HF_HOME) / "hybridspec"
    monkeypatch.setenv("HYBRIDSPEC_CACHE", "~/somewhere")
    assert cost_files.cache_folder() == Path.home() / "somewhere"


def test_a_folder_that_cannot_be_written_is_noted(pair, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HYBRIDSPEC_CACHE", str(tmp_path / "file"))
    report = first_report(pair)
    assert report.cost == "measured now" and any("cannot be kept" in note for note in report.notes)


def test_a_given_curve_is_not_looked_up(pair, cache):
    first_report(pair)
    (cost,) = costs_of(pair).values()
    for path in cache.iterdir():
        path.unlink()
    assert first_report(pair, cost=cost).cost == "given" and not list(cache.iterdir())
    assert first_report(pair, policy="full").cost == "" and not list(cache.iterdir())


def test_a_home_of_nobody_is_noted(pair, monkeypatch):
    monkeypatch.setenv("HYBRIDSPEC_CACHE", "~no-such-user-here/x")
    with pytest.warns(
        UserWarning, match="no kept latency curve can be read .*HYBRIDSPEC_CACHE='~no-such-user-here/x'"
    ):
        report = first_report(pair)
    assert report.cost == "measured now" and any("cannot be kept" in note for note in report.notes)


def test_a_folder_that_cannot_be_read_is_noted(pair, cache, monkeypatch):
    def refuse(self, *args, **options):
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("read_bytes", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    with pytest.warns(UserWarning, match="can be read .*Permission denied.*it is measured"):
        report = first_report(pair)
    assert report.cost == "measured now" and any("Permission denied" in note for note in report.notes)


def test_curves_are_for_all_whom_the_umask_lets_and_leave_nothing_behind(pair, cache, monkeypatch):
    first_report(pair)
    (path,) = cache.iterdir()
    old = os.umask(0)
    os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~old
    path.unlink()
    path.mkdir()
    # a folder in the file's place can neither be read nor replaced
    with pytest.warns(UserWarning, match="can be read"):
        report = first_report(pair)
    assert any("cannot be kept" in note for note in report.notes) and list(cache.iterdir()) == [path]


def test_a_curve_of_weights_that_were_written_is_measured_again(cache):
    model = tiny_target()
    pair = model, tiny_drafter(model)
    first_report(pair)
    options = dict(input_ids=IDS, assistant_model=pair[1], generation_mode="hybridspec", do_sample=False,
                   max_new_tokens=6, return_dict_in_generate=True)  # fmt: skip
    assert model.generate(**options).report.cost == "kept from an earlier request"
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.neg_()
    assert model.generate(**options).report.cost == "measured now"
