"""The command line and the quick start on a random pair: what they print, and the exit status."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pair_folder import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybridspec_hf
from hybridspec_hf import HybridSpecConfig
from hybridspec_hf.cli import main
from hybridspec_hf.commands import demo
from hybridspec_hf.pair import read_prompts

PROMPTS = [{"category": "math", "prompt": "What is 2 + 3?"}, {"category": "writing", "prompt": "Write about rain."}]
ROW_KEYS = {
    "policy",
    "tokens_per_second",
    "acceptance_length",
    "mean_verify_length",
    "verified_tokens",
    "saved",
    "target_tokens_per_token",
    "identical",
}


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair in the layout of the shipped one."""
    return save_pair(tmp_path_factory.mktemp("pair"), PROMPTS)


def plain_text(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """What transformers alone generates for a prompt that no template wraps."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def run_demo(folder: Path, *arguments: str) -> int:
    return main(["demo", "--pair", str(folder), "--device", "cpu", "--max-new-tokens", "6", *arguments])


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_demo_streams_every_policy_and_ends_with_one_json_line(
    pair_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(pair_folder, "--json") == 0
    captured = capsys.readouterr()
    for text in (*(prompt["prompt"] for prompt in PROMPTS), "--- AR", "--- DFlash", "--- HybridSpec"):
        assert text in captured.out
    assert "8/8" in captured.err, "two prompts, plain generate and three policies each"

    result = json.loads(captured.out.splitlines()[-1])
    assert (result["device"], result["dtype"], result["prompts"]) == ("cpu", "float32", 2)
    assert result["torch"] == torch.__version__
    rows = {row["policy"]: row for row in result["rows"]}
    assert list(rows) == ["ar", "full", "hybridspec"]
    assert all(set(row) == ROW_KEYS and row["identical"] is True for row in rows.values())
    assert rows["ar"]["acceptance_length"] == rows["ar"]["mean_verify_length"] == 1
    assert rows["hybridspec"]["verified_tokens"] <= rows["full"]["verified_tokens"]
    assert rows["full"]["tokens_per_second"] > 0


def test_prompts_of_all_categories_take_turns(tmp_path: Path) -> None:
    rows = [{"category": category, "prompt": f"{category}{i}"} for category in "aab" for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = read_prompts(tmp_path / "prompts.jsonl", 3)
    assert [row["prompt"] for row in chosen] == ["a0", "b0", "a1"]


def test_demo_runs_the_policies_it_is_given(pair_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(pair_folder, "--prompts", "1", "--policies", "static:4", "nominal", "--json") == 0
    rows = last_line(capsys)["rows"]
    assert [row["policy"] for row in rows] == ["static:4", "nominal"]
    assert rows[0]["mean_verify_length"] <= 4
    assert rows[0]["saved"] >= 0.75


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_demo_reports_a_difference_and_fails_in_fp32(
    pair_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, status: int
) -> None:
    plain = demo.run_plain
    monkeypatch.setattr(demo, "run_plain", lambda *args, **options: plain(*args, **options) + 1)
    assert run_demo(pair_folder, "--prompts", "1", "--policies", "full", "--dtype", dtype, "--json") == status
    assert last_line(capsys)["rows"][0]["identical"] is False


@pytest.mark.parametrize("policy", ["hybridspec", "full", "ar"])
def test_generate_prints_what_plain_generate_would(
    pair_folder: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    pair = ["--target", str(pair_folder / "target"), "--drafter", str(pair_folder / "drafter")]
    options = ["--prompt", "Once", "--max-new-tokens", "20", "--policy", policy, "--no-chat-template", "--json"]
    assert main(["generate", *pair, *options, "--device-map", "cpu"]) == 0
    streamed, result = capsys.readouterr().out.strip().rsplit("\n", 1)
    expected = plain_text(pair_folder, "Once", 20)
    assert json.loads(result)["text"] == expected
    assert streamed == expected.strip()
    assert json.loads(result)["policy"] == policy


def test_generate_with_a_calibrated_config(
    pair_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HybridSpecConfig(policy="static:3", throughput=100.0).save_pretrained(tmp_path)
    pair = ["--target", str(pair_folder / "target"), "--drafter", str(pair_folder / "drafter")]
    call = ["generate", *pair, "--prompt", "Once", "--max-new-tokens", "9", "--no-stream", "--json", "--config"]
    call += [str(tmp_path), "--device-map", "cpu"]
    assert main(call) == 0
    report = last_line(capsys)
    assert report["policy"] == "static:3" and max(report["verify_lengths"]) <= 3
    assert main([*call, "--policy", "nominal"]) == 0
    assert last_line(capsys)["policy"] == "nominal"
    assert main([*call, "--policy", "ar"]) == 2
    assert "nothing is drafted" in capsys.readouterr().err
    call[call.index(str(tmp_path))] = str(tmp_path / "missing")
    assert main(call) == 2
    assert "No hybridspec_config.json" in capsys.readouterr().err


def test_generate_without_a_drafter_is_autoregressive(pair_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["generate", "--target", str(pair_folder / "target"), "--prompt", "Once", "--device-map", "cpu"]
    assert main([*call, "--max-new-tokens", "3", "--no-stream", "--json"]) == 0
    assert last_line(capsys)["policy"] == "ar"
    assert main([*call, "--policy", "full"]) == 2
    assert "no --drafter was given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "static:1"], "Unknown policy 'static:1'"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
    ],
)
def test_demo_refuses_a_bad_argument_before_loading(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--threads", "0"], "must be a whole number from 1, got '0'"),
        (["--threads", "two"], "must be a whole number from 1, got 'two'"),
        (["--max-new-tokens", "-1"], "must be a whole number from 1"),
        (["--dtype", "float31"], "invalid choice: 'float31'"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "calibrate", "demo"])
def test_bad_arguments_are_refused_before_loading(
    capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], message: str
) -> None:
    needed = {
        "generate": ["--target", "a", "--prompt", "b"],
        "calibrate": ["--target", "a", "--drafter", "b", "--prompts", "c", "--output", "d"],
        "demo": [],
    }
    with pytest.raises(SystemExit) as exit_info:
        main([command, *needed[command], *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_an_error_of_the_engine_is_a_message_and_no_traceback(
    pair_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("HybridSpec could not allocate its static cache.")

    monkeypatch.setattr(demo, "compare", refuse)
    assert run_demo(pair_folder) == 2
    assert capsys.readouterr().err == "hybridspec demo: HybridSpec could not allocate its static cache.\n"


def test_missing_pair_is_an_error_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--pair", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hybridspec demo: --pair {tmp_path} has no target, drafter, prompts.jsonl.")


@pytest.mark.parametrize("command, more", [
    ("generate", ["--prompt", "b"]),
    ("calibrate", ["--drafter", "b", "--prompts", "c", "--output", "d"]),
    ("bench", ["--drafter", str(demo.TINY_PAIR / "drafter"), "--output", "d"]),
])  # fmt: skip
def test_a_target_folder_that_is_not_there_is_called_so(command, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "nowhere"
    assert main([command, "--target", str(missing), *more]) == 2
    assert capsys.readouterr().err.startswith(f"hybridspec {command}: There is no folder {missing}.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", ["--device", "--device-map"])
def test_a_gpu_that_is_not_there_is_called_so(option, pair_folder, capsys):
    names = ["--target", str(pair_folder / "target"), "--prompt", "a"]
    assert main(["generate", *names, option, "cuda"]) == 2
    assert "this torch sees no GPU" in capsys.readouterr().err


def test_options_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--target", "a", "--prompt", "b", "--max-new", "8"])
    assert "unrecognized arguments: --max-new 8" in capsys.readouterr().err


def test_quickstart_example_runs(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "tiny_pair").symlink_to(pair_folder)
    monkeypatch.setattr(hybridspec_hf, "__file__", str(tmp_path / "__init__.py"))
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "examples" / "quickstart.py"))
    assert "verified per round" in capsys.readouterr().out


def test_an_interrupted_command_says_so(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert "hybridspec demo: interrupted" in capsys.readouterr().err
