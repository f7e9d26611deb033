"""A config's folder: two files that belong together, older and newer formats, the Hub; never a half-read config."""

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from hybridspec_generation import CalibratedFor, CostTable, HybridSpecConfig
from hybridspec_hf.calibration.tables import default_tables

JSON, TABLES = "hybridspec_config.json", "hybridspec_tables.safetensors"
ACCEPTANCE, EXPERTS = default_tables()
COST = CostTable(target_cost=tuple(0.1 * i for i in range(17)), fixed_cost=1 / 3, stage0_token_cost=0.1,
                 expert_cost=0.01, context=64, measured=((2.0, 1 / 3), (15.9, 1.0)))  # fmt: skip
CONFIG = HybridSpecConfig(
    policy="nominal", acceptance=ACCEPTANCE, experts=EXPERTS, cost=(COST, replace(COST, context=128)),
    throughput=1 / 7, online_throughput=True,
    calibrated_for=CalibratedFor(target="a/b", drafter="c", prompts="d", target_weights="e", drafter_weights="f",
                                 hardware="g", versions="h", date="2026-01-02", prompt_hashes=(2**48 - 1, 5)),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    CONFIG.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def change(folder, **values):
    """Rewrite keys of the JSON file; None removes one."""
    kept = {**json.loads((folder / JSON).read_text()), **values}
    (folder / JSON).write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))


def test_folder_holds_a_readable_json_and_the_numbers_beside_it(folder):
    assert sorted(path.name for path in folder.iterdir()) == [JSON, TABLES]
    assert HybridSpecConfig.from_pretrained(folder) == CONFIG == HybridSpecConfig.from_pretrained(str(folder))
    text = (folder / JSON).read_text()
    values = json.loads(text)
    assert values["format"] == 1 and values["calibrated_for"]["target"] == "a/b" and len(text.splitlines()) < 80
    tables = load_file(folder / TABLES)
    assert sorted(tables) == values["tables"] and len(tables) == 11
    assert tables["cost.1.target_cost"].tolist() == list(COST.target_cost)
    assert tables["cost.0.measured"].tolist() == [list(point) for point in COST.measured]
    assert tables["calibrated_for.prompt_hashes"].tolist() == [2**48 - 1, 5]


def test_a_folder_from_before_points_and_prompts_were_kept_still_loads(folder):
    tables = load_file(folder / TABLES)
    old = {
        name: table for name, table in tables.items() if name.rpartition(".")[2] not in ("measured", "prompt_hashes")
    }
    save_file(old, folder / TABLES, metadata={"format": "pt"})
    change(folder, tables=sorted(old), tables_hash=None)
    assert len(old) == 8 and HybridSpecConfig.from_pretrained(folder) == replace(
        CONFIG,
        cost=tuple(replace(cost, measured=()) for cost in CONFIG.costs),
        calibrated_for=replace(CONFIG.calibrated_for, prompt_hashes=()),
    )


def test_config_without_tables_is_one_file(folder):
    HybridSpecConfig(policy="static:3").save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == [JSON]
    assert HybridSpecConfig.from_pretrained(folder) == HybridSpecConfig(policy="static:3")


def test_file_of_the_first_version_still_loads(tmp_path):
    old = replace(CONFIG, cost=COST, calibrated_for=None)
    values = {key: value for key, value in old.to_dict().items() if key != "online_throughput"}
    for name in ("context", "throughput", "runtime", "measured"):
        values["cost"].pop(name)
    (tmp_path / JSON).write_text(json.dumps(values))
    assert HybridSpecConfig.from_pretrained(tmp_path) == replace(
        old, cost=replace(COST, context=0, measured=()), online_throughput=False
    )


@pytest.mark.parametrize("found", [2, "1", 1.5, -1])
def test_another_format_is_refused(folder, found):
    change(folder, format=found)
    with pytest.raises(ValueError, match="Update hybridspec_hf, or calibrate again"):
        HybridSpecConfig.from_pretrained(folder)


def test_json_without_its_tables_is_refused(folder):
    (folder / TABLES).unlink()
    with pytest.raises(FileNotFoundError, match=f"No {TABLES} in .*Copy both files"):
        HybridSpecConfig.from_pretrained(folder)


def test_damaged_files_are_refused(folder):
    whole = (folder / TABLES).read_bytes()
    (folder / TABLES).write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=f"{TABLES} is damaged"):
        HybridSpecConfig.from_pretrained(folder)
    (folder / TABLES).write_bytes(whole)
    for text, message in (("{", "is damaged"), ("[]", "holds no JSON object"), ("", "is damaged")):
        (folder / JSON).write_text(text)
        with pytest.raises(ValueError, match=message):
            HybridSpecConfig.from_pretrained(folder)


def test_tables_of_another_calibration_are_refused(folder):
    tables = load_file(folder / TABLES)
    save_file({name: table for name, table in tables.items() if name != "cost.1.target_cost"}, folder / TABLES)
    with pytest.raises(ValueError, match="from the same calibration"):
        HybridSpecConfig.from_pretrained(folder)
    save_file(tables, folder / TABLES, metadata={"format": "pt"})
    change(folder, cost=None)
    with pytest.raises(ValueError, match="no place for its table 'cost"):
        HybridSpecConfig.from_pretrained(folder)


def test_tables_with_other_values_are_refused(folder, tmp_path):
    replace(CONFIG, cost=(replace(COST, target_cost=(1.0,) * 17), CONFIG.cost[1])).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / TABLES, folder)
    with pytest.raises(ValueError, match=f"{TABLES} holds other values .*from the same calibration"):
        HybridSpecConfig.from_pretrained(folder)
    # written before there was a hash
    change(folder, tables_hash=None)
    assert HybridSpecConfig.from_pretrained(folder).cost[0].target_cost == (1.0,) * 17


def test_an_interrupted_save_is_noticed(folder, monkeypatch):
    def stop(source, target, replaced=os.replace):
        if Path(target).name == JSON:
            raise OSError("disk full")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(OSError, match="disk full"):
        replace(CONFIG, cost=replace(COST, target_cost=(1.0,) * 17)).save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == [JSON, TABLES], "nothing half-written stays"
    with pytest.raises(ValueError, match="from the same calibration"):
        HybridSpecConfig.from_pretrained(folder)


def test_files_are_for_all_whom_the_umask_lets(tmp_path):
    old = os.umask(0o027)
    try:
        CONFIG.save_pretrained(tmp_path)
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in (JSON, TABLES)] == [0o640, 0o640]


@pytest.mark.parametrize("name", [JSON, TABLES])
def test_a_file_that_cannot_be_read_is_not_called_damaged(folder, name, monkeypatch):
    def refuse(self, read=Path.read_bytes):
        if self.name == name:
            raise PermissionError(13, "Permission denied")
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OSError, match=f"{name} cannot be read .*Permission denied"):
        HybridSpecConfig.from_pretrained(folder)


@pytest.mark.parametrize("names", ["cost", 3, {"a": 1}, [1], [None], [["a"]]])
def test_names_of_tables_are_a_list_of_text(folder, names):
    change(folder, tables=names)
    with pytest.raises(ValueError, match="needs a list of names"):
        HybridSpecConfig.from_pretrained(folder)


def test_json_that_is_nested_too_deeply_is_damaged(folder):
    (folder / JSON).write_text('{"policy": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="is damaged"):
        HybridSpecConfig.from_pretrained(folder)


def test_the_json_file_itself_is_no_folder(folder):
    with pytest.raises(ValueError, match=f"{JSON} is a file. Pass its folder"):
        HybridSpecConfig.from_pretrained(folder / JSON)


class FakeHub:
    """Repositories as folders."""

    def __init__(self, root, monkeypatch):
        self.root, self.calls = root, []
        for name in ("create_repo", "create_branch", "upload_folder", "snapshot_download"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", options))
        (self.root / "user" / repo_id).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=f"user/{repo_id}")

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", options))

    def upload_folder(self, *, repo_id, folder_path, **options):
        self.calls.append(("upload_folder", options))
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def snapshot_download(self, repo_id, **options):
        self.calls.append(("snapshot_download", options))
        if not (self.root / repo_id).is_dir():
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        return str(self.root / repo_id)


def test_config_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    hub = FakeHub(tmp_path, monkeypatch)
    url = CONFIG.push_to_hub("tables", private=True, token="secret", commit_message="mine", revision="dev")
    assert url == "https://hub/user/tables/commit/1"
    assert hub.calls == [
        ("create_repo", {"private": True, "token": "secret", "exist_ok": True}),
        ("create_branch", {"branch": "dev", "token": "secret", "exist_ok": True}),
        ("upload_folder", {"commit_message": "mine", "token": "secret", "revision": "dev"}),
    ]
    assert sorted(path.name for path in (tmp_path / "user" / "tables").iterdir()) == [JSON, TABLES]
    assert HybridSpecConfig.from_pretrained("user/tables", revision="dev", token="secret") == CONFIG
    assert hub.calls[3][1] == {"revision": "dev", "token": "secret", "allow_patterns": [JSON, TABLES]}
    for revision in (None, "refs/pr/3"):
        del hub.calls[:]
        CONFIG.push_to_hub("tables", revision=revision)
        assert [name for name, _ in hub.calls] == ["create_repo", "upload_folder"]
        assert hub.calls[-1][1]["commit_message"] == "Upload HybridSpecConfig"


def test_no_folder_and_no_repository(tmp_path, monkeypatch):
    FakeHub(tmp_path, monkeypatch)
    with pytest.raises(FileNotFoundError, match=f"No {JSON} in user/missing: .*on the Hub"):
        HybridSpecConfig.from_pretrained("user/missing")


def test_a_path_is_not_looked_up_on_the_hub(tmp_path):
    with pytest.raises(FileNotFoundError, match=JSON):
        HybridSpecConfig.from_pretrained(tmp_path / "missing" / "deeper")
