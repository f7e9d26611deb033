"""`hybridspec bench` on a random pair: its figures, its files, exactness that can fail, and every refusal."""

import importlib.util
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pair_folder import save_pair
from support.tiny_models import tiny_drafter, tiny_target
from transformers import AutoTokenizer

from hybridspec_generation import CalibratedFor, CostTable, HybridSpecConfig
from hybridspec_hf.bench import pair_run
from hybridspec_hf.bench.pair_prompts import BenchPrompt
from hybridspec_hf.bench.pair_report import summarise
from hybridspec_hf.bench.pair_run import Recording, Request, in_turn, shared_copy
from hybridspec_hf.bench.pair_tables import bench_lines
from hybridspec_hf.bench.rows import parse_rows
from hybridspec_hf.calibration.cost_files import cache_folder, without_cache_folder
from hybridspec_hf.calibration.prompts import load_prompts, prompt_hash
from hybridspec_hf.cli import main
from hybridspec_hf.commands import bench
from hybridspec_hf.engine import get_engine

PROMPTS = [("math", "What is 2 + 3?"), ("writing", "Write about rain."), ("math", "And 7 times 8, then?")]


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"category": category, "prompt": prompt, "split": "test"} for category, prompt in PROMPTS]
    folder = save_pair(tmp_path_factory.mktemp("pair"), rows)
    calibration = [row | {"split": "calibration"} for row in rows]
    (folder / "calibration.jsonl").write_text("".join(json.dumps(row) + "\n" for row in calibration))
    return folder


def run_bench(folder: Path, output: Path, *arguments: str) -> int:
    pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    options = ["--prompts", str(folder / "prompts.jsonl"), "--device", "cpu", "--max-new-tokens", "8"]
    return main(["bench", *pair, *options, "--output", str(output), *arguments])


def test_every_row_on_every_prompt(
    pair_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    rows = ["hybridspec", "full+recurrent", "evict+replay"]
    assert run_bench(pair_folder, tmp_path, "--repeats", "2", "--policies", *rows) == 0
    captured = capsys.readouterr()
    assert "24/24" in captured.err and "No plots: they need matplotlib" in captured.out

    result = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in result["rows"]] == ["ar", *rows]
    assert (result["device"], result["dtype"], result["torch"]) == ("cpu", "float32", torch.__version__)
    assert [prompt["category"] for prompt in result["prompts"]] == ["math", "math", "writing"]
    cells = {(cell["row"], cell["category"]): cell for cell in result["cells"]}
    assert len(cells) == 4 * 3 and result["identical"] is True and result["divergences"] == {}
    for (row, category), cell in cells.items():
        assert cell["identical"] == cell["prompts"] == {"math": 2, "writing": 1, None: 3}[category]
        assert cell["rounds"] == sum(cell["lengths"].values()) and len(cell["speedups"]) == 2
        assert cell["speedup"] == pytest.approx(1.0) if row == "ar" else cell["speedup"] > 0
    assert cells["ar", "math"]["acceptance_length"] == cells["ar", "math"]["mean_verify_length"] == 1
    assert result["ran"]["evict+replay"].startswith("replay") and result["ran"]["ar"].startswith("block")
    assert any("shipped default" in note for note in result["notes"]["hybridspec"])
    text = (tmp_path / "bench.md").read_text()
    assert text in captured.out
    for part in ("| vanilla DFlash", "average SR", "Every request wrote AR's tokens.", "no GPU"):
        assert part in text
    assert "## Ablations" not in text


def test_ablations_and_plots(pair_folder: Path, tmp_path: Path) -> None:
    arguments = ("--ablations", "--static-lengths", "2", "4", "--limit", "1", "--repeats", "1")
    assert run_bench(pair_folder, tmp_path, *arguments) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    found = {row["row"]: row for row in result["ablations"]}
    fastest = max(("static:2", "static:4"), key=lambda name: average_of(result, name)["speedup"])
    assert list(found) == ["hybridspec", fastest, "full", "nominal", "hybridspec+recurrent", "full+recurrent"]
    for name, row in found.items():
        expected = average_of(result, "hybridspec")["speedup"] / average_of(result, name)["speedup"]
        assert row["gain"] == pytest.approx(expected)
    assert "| length selection" in (tmp_path / "bench.md").read_text()
    if bench.can_plot():
        for name in ("categories.png", "lengths.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def average_of(result: dict[str, Any], row: str) -> dict[str, Any]:
    return next(cell for cell in result["cells"] if (cell["row"], cell["category"]) == (row, None))


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_a_difference_is_shown_and_fails_in_fp32(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, status: int
) -> None:
    call = pair_run.Call.__call__

    def differ(self: pair_run.Call, prompt: BenchPrompt) -> Any:
        output = call(self, prompt)
        if self.row.name == "full" and prompt.category == "math":
            output.sequences = output.sequences.clone()
            output.sequences[0, -2] = (output.sequences[0, -2] + 1) % 90
        return output

    monkeypatch.setattr(pair_run.Call, "__call__", differ)
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    options = ("--policies", "full", "--dtype", dtype, "--repeats", "2")
    assert run_bench(pair_folder, tmp_path, *options) == status
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["identical"] is False and average_of(result, "full")["identical"] <= 1
    positions = {found["prompt"]: found["position"] for found in result["divergences"]["full"]}
    assert set(positions) >= {0, 1} and all(0 <= position <= 6 for position in positions.values())
    assert len(result["divergences"]["full"]) == len(positions), "a prompt is reported once"
    text = (tmp_path / "bench.md").read_text()
    assert "of 3 prompts wrote AR's tokens. First differences:" in text and "prompt 0, new token" in text


def test_figures_are_pooled_and_categories_count_the_same() -> None:
    rows = parse_rows(["full"])
    prompts = [BenchPrompt(str(i), category, torch.ones(1, 2)) for i, category in enumerate("aab")]

    def request(row: str, prompt: int, repetition: int, tokens: int, rounds: int, seconds: float, w: int) -> Request:
        return Request(row, prompt, repetition, tokens, rounds, seconds, {w: rounds}, (row, prompt) != ("full", 1))

    recording = Recording()
    for repetition, slow in ((0, 1.0), (1, 2.0)):
        recording.requests += [
            request("ar", 0, repetition, 10, 10, 10.0, 1), request("ar", 1, repetition, 30, 30, 30.0, 1),
            request("ar", 2, repetition, 8, 8, 4.0, 1), request("full", 0, repetition, 10, 5, 4.0 * slow, 16),
            request("full", 1, repetition, 30, 5, 4.0 * slow, 10), request("full", 2, repetition, 8, 8, 8.0, 4),
        ]  # fmt: skip
    report = summarise(recording, prompts, rows)
    cell = report.cell("full", "a")
    # 80 tokens in 20 rounds and 24 seconds, AR's in 80
    assert (cell.acceptance_length, cell.mean_verify_length, cell.rounds) == (4.0, 13.0, 20)
    assert cell.speedup == pytest.approx(80 / 24) and cell.speedups == pytest.approx([5.0, 2.5])
    assert cell.round_ms == pytest.approx(1200) and cell.lengths == {10: 10, 16: 10}
    assert (cell.prompts, cell.identical) == (2, 1) and not report.identical
    average = report.cell("full")
    assert average.speedup == pytest.approx((80 / 24 + 0.5) / 2) and average.acceptance_length == 2.5
    assert average.speedups == pytest.approx([2.75, 1.5]) and (average.prompts, average.identical) == (3, 2)


def test_prompts_without_rounds_are_no_error() -> None:
    prompts = [BenchPrompt("0", "a", torch.ones(1, 2))]
    recording = Recording([Request(name, 0, 0, 0, 0, 0.0, {}, True) for name in ("ar", "full")])
    cell = summarise(recording, prompts, parse_rows(["full"])).cell("full")
    assert (cell.acceptance_length, cell.speedup, cell.round_ms) == (0, 0, 0)


def test_rows_take_turns_to_be_first() -> None:
    order: list[int] = []

    def call(i: int) -> Any:
        return lambda prompt: order.append(i) or SimpleNamespace(row=i)

    prompt = BenchPrompt("0", "a", torch.ones(1, 2))
    for turn in range(3):
        outputs = in_turn([call(i) for i in range(3)], turn, prompt)
        assert [output.row for output in outputs] == [0, 1, 2]
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1]


def test_ar_runs_as_the_other_rows_do() -> None:
    def options(tables: HybridSpecConfig | None, name: str = "ar") -> dict[str, Any]:
        (row,) = parse_rows([name])
        return pair_run.Call(None, {}, row, tables, 8, None).options

    assert "hybridspec_config" not in options(None) | options(HybridSpecConfig(policy="nominal", throughput=2.0))
    assert options(HybridSpecConfig(graphs="off"))["hybridspec_config"].graphs == "off"
    assert options(None, "ar+replay")["hybridspec_config"].gdn_backend == "replay"


def test_backends_keep_their_buffers_side_by_side() -> None:
    target = tiny_target()
    drafter = tiny_drafter(target)
    copy = shared_copy(drafter)
    assert all(a is b for a, b in zip(drafter.parameters(), copy.parameters(), strict=True))
    assert get_engine(target, copy) is not get_engine(target, drafter)
    assert pair_run.one_drafter_per_backend(drafter, parse_rows(["full", "static:4"])) == {"block": drafter}


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "Nothing to do"),
    (["--target", "x"], "--target and --drafter belong together"),
    (["--target", "x", "--drafter", "y", "--repeats", "0"], "--repeats must be at least 1"),
    (["--target", "x", "--drafter", "y", "--max-new-tokens", "1"], "--max-new-tokens must be at least 2, got 1"),
    (["--analyze", "nowhere"], "No capture.jsonl in nowhere"),
    (["--target", "x", "--drafter", "y", "--analyze", "nowhere"], "No capture.jsonl in nowhere"),
])  # fmt: skip
def test_bad_calls_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("loaded before everything was checked")

    monkeypatch.setattr(bench.AutoModelForCausalLM, "from_pretrained", load)


def test_an_output_that_cannot_be_written_is_refused_at_once(
    pair_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_model: None
) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert run_bench(pair_folder, output) == 2
        assert f"--output {output} cannot be written to" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_results_are_printed_before_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):
        bench.write(tmp_path / "gone", "bench", ["figures of an hour"], {})
    assert "figures of an hour" in capsys.readouterr().out


def test_lengths_and_tables_of_another_block_are_refused_before_loading(
    pair_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_model: None
) -> None:
    assert run_bench(pair_folder, tmp_path, "--policies", "hybridspec", "static:40") == 2
    assert "policy='static:40' verifies 40 tokens, but the drafter's block has" in capsys.readouterr().err
    cost = CostTable(target_cost=(0.0,) * 41, fixed_cost=1.0, stage0_token_cost=0.0, expert_cost=0.0)
    HybridSpecConfig(cost=cost).save_pretrained(tmp_path / "config")
    assert run_bench(pair_folder, tmp_path, "--config", str(tmp_path / "config")) == 2
    assert "The cost table of hybridspec_config is for a block of 40 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("known", [(0, 2), (), None])
def test_prompts_of_the_calibration_are_told(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: tuple[int, ...] | None
) -> None:
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    tokenizer = AutoTokenizer.from_pretrained(pair_folder / "target")
    prompts = load_prompts(pair_folder / "calibration.jsonl", tokenizer).input_ids
    hashes = None if known is None else tuple(prompt_hash(prompts[i]) for i in known) + (3,)
    names = dict.fromkeys(("target", "drafter", "prompts", "target_weights", "drafter_weights", "hardware", "versions",
                           "date"), "x")  # fmt: skip
    HybridSpecConfig(calibrated_for=CalibratedFor(**names, prompt_hashes=hashes or ())).save_pretrained(
        tmp_path / "config"
    )
    options = ("--config", str(tmp_path / "config"), "--policies", "full", "--repeats", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_bench(pair_folder, tmp_path, *options) == 0
    told = [str(w.message) for w in caught if "prompts are among" in str(w.message)]
    result, text = json.loads((tmp_path / "bench.json").read_text()), (tmp_path / "bench.md").read_text()
    # the third in the file is of the first category
    assert result["calibrated_prompts"] == (None if known is None else ["1", "3"] if known else [])
    assert len(told) == bool(known) == ("prompts are among" in text)
    if known:
        assert told[0].startswith("2 of 3 prompts are among those that --config was calibrated on") and told[0] in text


def test_a_damaged_capture_beside_the_config_is_a_note_and_old_files_go(
    pair_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    HybridSpecConfig().save_pretrained(tmp_path / "config")
    (tmp_path / "config" / "capture.jsonl").write_text("nonsense\n")
    output = tmp_path / "out"
    output.mkdir()
    for name in (*bench.BENCH_FILES, *bench.ANALYSIS_FILES, "mine.txt"):
        (output / name).write_text("old")
    options = ("--config", str(tmp_path / "config"), "--policies", "full", "--limit", "1", "--repeats", "1")
    assert run_bench(pair_folder, output, *options) == 0
    printed = capsys.readouterr().out
    if importlib.util.find_spec("sklearn"):
        assert "No analysis of the captured rounds beside --config:" in printed and "is damaged" in printed
    assert sorted(path.name for path in output.iterdir()) == ["bench.json", "bench.md", "mine.txt"]
    assert "old" not in ((output / "bench.json").read_text(), (output / "bench.md").read_text())


def test_categories_may_have_any_name() -> None:
    prompts = [BenchPrompt(str(i), name, torch.ones(1, 2)) for i, name in enumerate(("average", "a|b\nc"))]
    recording = Recording([
        Request(row, i, 0, 10, 5, seconds, {2: 5}, True)
        for row, times in (("ar", (4.0, 4.0)), ("full", (1.0, 2.0))) for i, seconds in enumerate(times)
    ], ran={"ar": "", "full": ""}, notes={"ar": [], "full": []})  # fmt: skip
    report = summarise(recording, prompts, parse_rows(["full"]))
    assert report.categories == ["average", "a|b\nc"]
    assert (report.cell("full", "average").speedup, report.cell("full").speedup) == (4.0, 3.0)
    lines = "\n".join(bench_lines(report)).splitlines()
    header, rule, *rows = [line.replace("\\|", "") for line in lines if line.startswith("|")][:4]
    assert len({line.count("|") for line in (header, rule, *rows)}) == 1 and "a\\|b c AL" in "\n".join(lines)


def test_unknown_row_is_refused_by_the_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--output", str(tmp_path), "--policies", "full+fast"])
    assert "Unknown GDN backend 'fast'" in capsys.readouterr().err


def test_a_calibration_that_is_not_finished_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "load_capture", lambda folder: None)
    with pytest.raises(FileNotFoundError, match="is not finished. Run the same command again"):
        bench.load_captured(tmp_path)


def test_rows_measure_their_own_curves(monkeypatch):
    """Not what an earlier request kept, which may be of another context."""
    monkeypatch.setenv("HYBRIDSPEC_CACHE", "/somewhere")
    with without_cache_folder():
        assert cache_folder() is None
    assert str(cache_folder()) == "/somewhere"
    monkeypatch.delenv("HYBRIDSPEC_CACHE")
    with pytest.raises(KeyError), without_cache_folder():
        raise KeyError
    assert "HYBRIDSPEC_CACHE" not in os.environ


def test_a_bench_forgets_the_curves_of_earlier_requests(monkeypatch):
    model = tiny_target()
    drafter, seen = tiny_drafter(model), []
    engine = get_engine(model, drafter)
    engine.costs["of another context"] = object()
    monkeypatch.setattr(pair_run, "warm_up", lambda *_: seen.append((dict(engine.costs), cache_folder())))
    prompts = [BenchPrompt("a", "coding", torch.tensor([[3, 4, 5]]))]
    pair_run.run_rows(model, drafter, prompts, parse_rows(["full"]), None, max_new_tokens=4, repeats=1)
    assert seen == [({}, None)] * 2
