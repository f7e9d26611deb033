"""The analysis of captured rounds: policies' own choices, modelled time, the oracle, reliability, and the command."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hybridspec_generation import AcceptanceTable, CalibratedFor, CostTable, ExpertTable, HybridSpecConfig
from hybridspec_hf.bench import plots
from hybridspec_hf.bench.analysis import (
    ORACLE,
    Tables,
    analyse,
    oracle_lengths,
    round_seconds,
    to_dict,
    unseen_folds,
)
from hybridspec_hf.bench.captured import Capture, load_capture
from hybridspec_hf.bench.choices import choose_lengths, experts_like
from hybridspec_hf.bench.pair_tables import analysis_lines
from hybridspec_hf.bench.reliability import reliability
from hybridspec_hf.calibration.acceptance import predict_acceptance, reached_positions
from hybridspec_hf.calibration.capture import CaptureRounds
from hybridspec_hf.calibration.store import CaptureStore
from hybridspec_hf.cli import main
from hybridspec_hf.commands import bench
from hybridspec_kernels import correct_length_ref, new_experts_ref, select_length_ref

BLOCK, TOP_K, LAYERS = 5, 3, 4
COST = CostTable(
    target_cost=(0.0, 0.0, 0.0, 0.2, 0.35, 0.45),
    fixed_cost=1.0,
    stage0_token_cost=0.001,
    expert_cost=0.01,
    device="cpu",
)


def random_rounds(count: int, seed: int = 0) -> CaptureRounds:
    """Hard and easy rounds, whose drafter is overconfident and whose routing varies."""
    generator = torch.Generator().manual_seed(seed)
    easy = 0.5 * torch.randint(0, 2, (count, 1), generator=generator)
    confidence = torch.rand(count, BLOCK - 1, generator=generator) * 0.4 + 0.1 + easy
    right = torch.rand(count, BLOCK - 1, generator=generator) < confidence**2
    new_layer0 = torch.randint(0, TOP_K + 1, (count, BLOCK), generator=generator)
    new_layer0[:, 0] = TOP_K
    later = torch.randint(0, TOP_K, (count, BLOCK), generator=generator)
    later[:, 0] = 0
    return CaptureRounds(
        confidence, 1.5 - confidence, right.long().cumprod(1).sum(1), new_layer0, (LAYERS - 1) * new_layer0 + later
    )


@pytest.fixture(scope="module")
def prompts() -> list[CaptureRounds]:
    return [random_rounds(120, seed) for seed in range(7)]


@pytest.fixture(scope="module")
def config() -> HybridSpecConfig:
    acceptance = AcceptanceTable(
        confidence_knots=((0.0, 1.0),) * 4, acceptance_knots=((0.05, 0.95),) * 4,
        weights=(-4.0, 7.0, 0.0, 0.0, 0.0, 0.0), reference_rounds=((0.5, 0.3, 0.1, 0.05),),
    )  # fmt: skip
    mean = (12.0, 8.0, 7.0, 6.0, 5.0, 5.0)
    given = tuple(tuple(value - 6.0 + 4.0 * n for n in range(TOP_K + 1)) for value in mean)
    experts = ExpertTable(mean_new_pairs=mean, mean_new_pairs_given=given, num_moe_layers=LAYERS, top_k=TOP_K)
    return HybridSpecConfig(acceptance=acceptance, experts=experts, cost=COST, throughput=1.6)


def test_expert_ids_have_the_counts_that_were_captured(prompts):
    for new in prompts[0].new_layer0:
        ids = experts_like(new, TOP_K)
        assert torch.equal(new_experts_ref(ids).long(), new)
        assert all(len(set(row)) == TOP_K for row in ids.tolist())


def test_policies_choose_as_their_references_do(prompts, config):
    rounds, config = prompts[0], replace(config, cost=replace(COST, expert_cost=0.05))
    prefix = predict_acceptance(rounds, config.acceptance).cumprod(1)
    cost, rho = torch.tensor(COST.target_cost), torch.tensor([config.throughput])
    nominal = choose_lengths(replace(config, policy="nominal"), rounds)
    corrected = choose_lengths(replace(config, policy="hybridspec"), rounds)
    experts = config.experts
    for i in range(len(rounds.accepted)):
        w0 = select_length_ref(prefix[i].float(), cost, rho)
        assert nominal.verify[i] == nominal.stage0[i] == w0
        u = torch.clamp(w0 + 1, max=BLOCK)
        w = correct_length_ref(
            w0, u, prefix[i].float(), rounds.new_layer0[i], cost, torch.tensor([0.001]), torch.tensor([0.05]),
            torch.tensor(experts.mean_new_pairs), torch.tensor(experts.mean_new_pairs_given), rho,
        )  # fmt: skip
        assert (corrected.stage0[i], corrected.verify[i]) == (u, w)
    grown = int((corrected.verify > nominal.verify).sum())
    assert 0 < grown < len(rounds.accepted), "a correction that never or always grows shows nothing"
    for name, lengths in (("static:3", [3]), ("full", [5]), ("dcut", [2, 3, 4, 5]), ("evict", range(2, 6))):
        chosen = choose_lengths(replace(config, policy=name), rounds)
        assert set(chosen.verify.tolist()) <= set(lengths) and torch.equal(chosen.verify, chosen.stage0)


def test_time_follows_the_curve_and_the_rounds_own_routing(config):
    rounds = random_rounds(3)
    seconds = round_seconds(rounds, Tables.of(config))
    pairs = rounds.new_layer0[1, :3].sum() + rounds.new_later[1, :3].sum()
    # of three tokens: fixed, curve, and eta for each pair above the table's 12 + 8 + 7
    assert float(seconds[1, 1]) == pytest.approx(1.0 + 0.2 + 0.01 * (float(pairs) - 27.0))


def test_oracle_is_the_best_of_all_choices():
    rounds = random_rounds(4, seed=3)
    generator = torch.Generator().manual_seed(1)
    seconds = 1 + torch.rand(4, BLOCK - 1, dtype=torch.float64, generator=generator).cumsum(1)

    def rate(lengths) -> float:
        w = torch.tensor(lengths)
        emitted = 1 + torch.minimum(rounds.accepted, w - 1)
        return float(emitted.sum() / seconds.gather(1, (w - 2)[:, None]).sum())

    best = max(map(rate, itertools.product(range(2, BLOCK + 1), repeat=4)))
    assert rate(oracle_lengths(rounds, seconds).tolist()) == pytest.approx(best)


def test_figures_of_the_policies(prompts, config):
    result = analyse(prompts, config, refit=False)
    names = [found.policy for found in result.policies]
    assert names == ["hybridspec", "nominal", "dcut", "evict", "dspark", "full", *(f"static:{w}" for w in range(2, 6)),
                     ORACLE]  # fmt: skip
    assert (result.rounds, result.prompts, result.unseen) == (840, 7, True)
    for found in result.policies:
        assert found.of_oracle <= 1 and sum(found.lengths.values()) == 840
        assert found.tokens_per_second == pytest.approx(1e3 * found.acceptance_length / found.round_ms)
    full, longest = result.policy("full"), result.policy("static:5")
    assert full.tokens_per_second == longest.tokens_per_second and full.mean_verify_length == 5
    accepted = torch.cat([part.accepted for part in prompts]).double()
    assert full.acceptance_length == pytest.approx(1 + float(accepted.mean()))
    assert result.policy("hybridspec").tokens_per_second > result.best_static().tokens_per_second
    assert result.routing_correlation > 0.8, "later layers were made to follow Layer 0"
    assert result.round_ms == pytest.approx([1000, 1200, 1350, 1450])


def test_refitting_judges_prompts_that_no_table_has_seen(prompts, config):
    own, refitted = analyse(prompts, config, refit=False), analyse(prompts, config)
    assert refitted.unseen and refitted.rounds == own.rounds
    before, after = refitted.reliability["confidence"], refitted.reliability["table"]
    assert before.error == pytest.approx(own.reliability["confidence"].error) and after.error < 0.5 * before.error
    flipped = [prompts[0]._replace(accepted=4 - prompts[0].accepted), *prompts[1:]]
    # what is predicted for the first prompt does not change with its own labels
    folds = [fold_predictions(captured, config) for captured in (prompts, flipped)]
    assert torch.equal(folds[0][0], folds[1][0]) and not torch.equal(folds[0][1], folds[1][1])


def fold_predictions(captured: list[CaptureRounds], config: HybridSpecConfig) -> list[torch.Tensor]:
    """What the tables of each fold predict for the first prompt's signals."""
    folds = unseen_folds(captured, Tables.of(config))
    return [predict_acceptance(captured[0], fold.tables.acceptance) for fold in folds]


def test_too_few_rounds_are_judged_by_the_given_tables(prompts, config):
    few = [part._replace(**{name: column[:4] for name, column in part._asdict().items()}) for part in prompts[:2]]
    assert not analyse(few, config).unseen
    none = [part._replace(**{name: column[:0] for name, column in part._asdict().items()}) for part in prompts]
    with pytest.raises(ValueError, match="no rounds to analyse"):
        analyse(none, config)
    with pytest.raises(ValueError, match="config with all tables"):
        analyse(prompts, replace(config, cost=None))


def test_one_prompt_is_judged_by_the_given_tables(prompts, config):
    result = analyse(prompts[:1], config)
    assert (result.rounds, result.prompts, result.unseen) == (120, 1, False)
    assert unseen_folds(prompts[:1], Tables.of(config)) == []


def costs_at(*contexts: int) -> tuple[CostTable, ...]:
    return tuple(replace(COST, context=n, fixed_cost=float(n), source=f"curve of {n}") for n in contexts)


@pytest.mark.parametrize(("context", "chosen"), [(0, 500), (700, 500), (900, 1024), (5000, 8192), (99999, 8192)])
def test_the_cost_table_of_the_nearest_context_is_used_and_named(prompts, config, context, chosen):
    config = replace(config, cost=costs_at(500, 1024, 8192))
    result = analyse(prompts[:2], config, refit=False, context=context)
    assert result.cost.context == chosen and result.round_ms[0] == pytest.approx(1e3 * chosen)
    assert result.cost_line() == f"Cost table behind {chosen} tokens, rho 1.6 tokens/s, from: curve of {chosen}"
    assert f"{result.cost_line()}.\n" in list(analysis_lines(result))
    saved = json.loads(json.dumps(to_dict(result)))
    assert (saved["cost"]["context"], saved["cost"]["source"]) == (chosen, f"curve of {chosen}")
    assert saved["throughput"] == [1.6]


def test_every_fold_has_a_rho_of_its_own(prompts, config):
    result = analyse(prompts, config)
    assert len(result.throughput) == 5 and min(result.throughput) > 0
    assert "of unknown context" in result.cost_line() and " to " in result.cost_line()


def test_the_plot_names_the_cost_table(prompts, config, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    result = analyse(prompts[:2], replace(config, cost=replace(COST, source="made $up_ by")), refit=False)
    plots.plot_cost(result, tmp_path / "cost.png", None)
    axes = drawn[0].axes[0]
    assert axes.get_title() == result.cost_line()
    # nothing was measured: no fit, which would only find itself again
    assert [line.get_label() for line in axes.lines] == ["cost table, which keeps no measured points"]
    assert axes.lines[0].get_ydata() == pytest.approx([1000, 1200, 1350, 1450])


def test_the_plot_fits_what_was_measured(prompts, config, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure) or path)
    # two at one length: no curve goes through both
    measured = ((2.0, 1.1), (3.0, 1.0), (4.0, 1.3), (4.0, 1.5), (4.9, 1.6))
    result = analyse(prompts[:2], replace(config, cost=replace(COST, measured=measured)), refit=False)
    plots.plot_cost(result, tmp_path / "cost.png", None)
    points, curve, used = drawn[0].axes[0].lines
    assert used.get_label() == "cost table" and used.get_ydata() == pytest.approx([1000, 1200, 1350, 1450])
    assert points.get_label() == "measured" and curve.get_label().startswith("quadratic: ")
    assert points.get_xydata() == pytest.approx(np.array(measured) * [1, 1e3])
    fit = np.polyfit(*zip(*measured, strict=True), 2)
    assert curve.get_ydata() == pytest.approx(1e3 * np.polyval(fit, [2, 3, 4, 5]))


def shorter(part: CaptureRounds) -> CaptureRounds:
    draft, tokens = slice(0, BLOCK - 2), slice(0, BLOCK - 1)
    return CaptureRounds(
        part.confidence[:, draft], part.entropy[:, draft], part.accepted.clamp_max(BLOCK - 2),
        part.new_layer0[:, tokens], part.new_later[:, tokens],
    )  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [
    (shorter, f"blocks of 4 tokens .*acceptance table of the config is for {BLOCK}"),
    (lambda part: part._replace(new_layer0=part.new_layer0 - 1), "chose 2 experts in Layer 0 .* top_k=3"),
    (lambda part: part._replace(new_later=part.new_later + 3), "12 in later layers; .* 4 MoE layers"),
    (lambda part: part._replace(new_layer0=0 * part.new_layer0, new_later=0 * part.new_later), "chose 0 experts"),
])  # fmt: skip
def test_rounds_of_another_calibration_are_refused(prompts, config, change, message):
    with pytest.raises(ValueError, match=message):
        analyse([*prompts[:-1], change(prompts[-1])], config)


def made_for(drafter_weights: str) -> CalibratedFor:
    names = dict.fromkeys(("target", "prompts", "target_weights", "hardware", "versions", "date"), "x")
    return CalibratedFor(drafter="mine", drafter_weights=drafter_weights, **names)


def test_a_capture_of_another_drafter_is_refused():
    capture = Capture([], drafter="other", drafter_weights="abc")
    with pytest.raises(ValueError, match=r"drafter other \(abc\), the config was calibrated for mine \(def\)"):
        capture.check_drafter(made_for("def"))
    for known in (made_for("abc"), made_for(""), None):
        capture.check_drafter(known)
    Capture([]).check_drafter(made_for("def"))


def test_dense_target_has_no_routing(prompts, config):
    dense = [part._replace(new_layer0=0 * part.new_layer0, new_later=0 * part.new_later) for part in prompts]
    nothing = ExpertTable(mean_new_pairs=(0.0,) * 6, mean_new_pairs_given=((0.0,),) * 6, num_moe_layers=0, top_k=0)
    result = analyse(dense, replace(config, experts=nothing), refit=False)
    assert result.routing_correlation is None
    assert result.policy("hybridspec").lengths == result.policy("nominal").lengths


def test_reliability_of_known_predictions():
    accepted = torch.tensor([0] * 30 + [1] * 10 + [2] * 60)
    rounds = random_rounds(100)._replace(accepted=accepted)
    reached, labels = reached_positions(rounds)
    right = torch.tensor([0.7, 60 / 70, 0.0, 0.5], dtype=torch.float64).expand(100, 4)
    found = reliability(right, labels, reached)
    assert found.error == pytest.approx(0, abs=1e-9) and found.by_position[3] is None
    assert found.predicted == pytest.approx(found.accepted) and sum(found.counts) == int(reached.sum()) == 230
    off = reliability((right - 0.1).clamp_min(0), labels, reached)
    assert off.by_position[:2] == pytest.approx([0.1, 0.1]) and off.error == pytest.approx(0.1 * 170 / 230)


@pytest.fixture
def calibrated(tmp_path, prompts, config):
    """A folder as `hybridspec calibrate` leaves it."""
    header: dict[str, Any] = {"format": 1, "block": BLOCK}
    header |= dict.fromkeys(("dtype", "target_weights", "drafter_weights", "prompt_tokens", "max_new_tokens"), "")
    store = CaptureStore(tmp_path / "capture.jsonl", header)
    for i, rounds in enumerate(prompts):
        store.add(i, rounds)
    config.save_pretrained(tmp_path)
    return tmp_path


def test_command_analyses_a_folder(calibrated, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["bench", "--analyze", str(calibrated), "--output", str(output)]) == 0
    result = json.loads((output / "analysis.json").read_text())
    assert (result["rounds"], result["unseen"]) == (840, True) and result["best_static"].startswith("static:")
    text = (output / "analysis.md").read_text()
    assert text in capsys.readouterr().out
    assert re.search(r"\| hybridspec +\| ", text) and "(best fixed)" in text and "times less" in text
    if bench.can_plot():
        for name in ("cost.png", "reliability.png"):
            assert (output / name).read_bytes().startswith(b"\x89PNG")
    assert not (output / "bench.json").exists()


def rewrite_header(folder, **entries: Any) -> None:
    header, rows = (folder / "capture.jsonl").read_text().split("\n", 1)
    (folder / "capture.jsonl").write_text(json.dumps({**json.loads(header), **entries}) + "\n" + rows)


def test_command_takes_the_context_that_the_capture_names(calibrated, tmp_path, config):
    replace(config, cost=costs_at(500, 1024, 8192)).save_pretrained(calibrated)
    assert load_capture(calibrated).context == 0
    rewrite_header(calibrated, context=1000)
    assert main(["bench", "--analyze", str(calibrated), "--output", str(tmp_path / "out")]) == 0
    assert "Cost table behind 1024 tokens" in (tmp_path / "out" / "analysis.md").read_text()


@pytest.mark.parametrize("header", [{"block": 4}, {"drafter_weights": "abc"}])
def test_command_refuses_a_foreign_config_before_it_makes_a_folder(calibrated, tmp_path, config, capsys, header):
    replace(config, calibrated_for=made_for("def")).save_pretrained(calibrated)
    rewrite_header(calibrated, **header)
    assert main(["bench", "--analyze", str(calibrated), "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists() and capsys.readouterr().err


def test_an_analysis_replaces_an_analysis_only(calibrated, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    output = tmp_path / "out"
    output.mkdir()
    for name in ("bench.json", "lengths.png", "analysis.json", "cost.png", "mine.txt"):
        (output / name).write_text("old")
    assert main(["bench", "--analyze", str(calibrated), "--output", str(output)]) == 0
    left = {path.name: path.read_text() == "old" for path in output.iterdir()}
    assert left == {"bench.json": True, "lengths.png": True, "mine.txt": True, "analysis.json": False,
                    "analysis.md": False}  # fmt: skip


@pytest.mark.parametrize("text", ["", "nonsense\n", "\ufeff{}\n", "[]\n", "{}\n", '{"format": 1}\n'])
def test_damaged_capture_is_refused(calibrated, text):
    (calibrated / "capture.jsonl").write_text(text)
    with pytest.raises(ValueError, match="is damaged"):
        load_capture(calibrated)


def test_analysis_without_scikit_learn_says_so(calibrated, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--analyze", str(calibrated), "--output", str(tmp_path / "out")]) == 2
    assert "hybridspec-hf[calibration]" in capsys.readouterr().err
