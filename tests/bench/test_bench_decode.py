"""The decoding benchmark: the text is known, the script plays its trace, traces have their means, all of it runs."""

import importlib.util
import json
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from hybridspec_generation import HybridSpecConfig, RoundState
from hybridspec_generation.state import Draft
from hybridspec_hf import strategy
from hybridspec_hf.bench import decode_models, decode_parts, decode_record, decode_report, decode_run
from hybridspec_hf.bench.decode_contexts import compare_contexts
from hybridspec_hf.bench.decode_floors import DecodeFloors, weight_bytes
from hybridspec_hf.bench.decode_launches import EveryLength, busy_while_decoding, compare_launches, compare_split
from hybridspec_hf.bench.decode_models import build, build_pair, follow
from hybridspec_hf.bench.decode_report import (
    DecodeBenchmark,
    Launches,
    Row,
    Split,
    head_lines,
    launch_line,
    mean_lines,
    row_line,
    split_line,
)
from hybridspec_hf.bench.decode_routing import (
    bisect_strength,
    distinct_curve,
    distinct_experts,
    independent_experts,
    new_experts,
    pool_size,
    route,
    wanted_distinct,
)
from hybridspec_hf.bench.decode_run import request
from hybridspec_hf.bench.decode_script import Script, ScriptedDrafter, scripted
from hybridspec_hf.bench.decode_shapes import FAMILIES, SHAPES, Shape, drafter_config, shortened, target_config
from hybridspec_hf.bench.decode_traces import PAPER_AL, RECORDED, load_acceptance, load_trace, recorded_rounds
from hybridspec_hf.calibration import contexts
from hybridspec_hf.drafters.dflash import DFlashDrafter
from hybridspec_hf.engine import get_engine
from hybridspec_hf.prefill import prefill
from hybridspec_hf.validation import check_drafter

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# before conftest wraps it
EMPTY = torch.empty
DENSE = Shape(
    "qwen3_5",
    {key: value for key, value in SHAPES["tiny"].target.items() if "expert" not in key and "moe" not in key}
    | {"intermediate_size": 64},
    SHAPES["tiny"].drafter,
    "test",
)
NEXT = replace(SHAPES["tiny"], family="qwen3_next")


@pytest.fixture(scope="module")
def pair():
    return build("tiny", "cpu", torch.float32)


@pytest.fixture
def plain_empty(monkeypatch):
    """For torch.device("meta"), which remembers functions: it lets a wrapped one allocate 122 billion weights."""
    monkeypatch.setattr(torch, "empty", EMPTY)
    _device_constructors.cache_clear()


def script_of(pair, name="coding"):
    return Script(load_trace(name), pair.successor, pair.drafter.config.block_size - 1)


def generate(pair, prompt, new_tokens, policy):
    out = pair.target.generate(
        **request(prompt, new_tokens),
        generation_mode="hybridspec",
        assistant_model=pair.drafter,
        hybridspec_config=HybridSpecConfig(policy=policy),
        return_dict_in_generate=True,
    )
    return out.sequences[0, prompt.shape[1] :], out.report


# ---- models


@pytest.mark.parametrize("shape", [SHAPES["tiny"], DENSE, NEXT], ids=["moe", "dense", "next"])
def test_the_greedy_text_is_known_in_bf16(shape):
    pair = build_pair(shape, CPU, torch.bfloat16, seed=3)
    for text in (pair.text(120, start=7), torch.randint(512, (1, 120))):
        with torch.no_grad():
            logits = pair.target(input_ids=text, use_cache=False).logits[0].float()
        assert torch.equal(logits.argmax(-1), pair.successor[text[0]])
        best = logits.topk(2).values
        # a bf16 number that large is exact to 1/256 of it
        assert ((best[:, 0] - best[:, 1]) > 8 * best[:, 0] / 256).all()


def test_the_text_is_one_cycle(pair):
    text = follow(pair.successor, torch.tensor([5]), 512)
    assert len(text.unique()) == 512 and pair.successor[text[-1]] == 5


def test_the_same_seed_makes_the_same_pair(pair):
    again = build("tiny", "cpu", torch.float32)
    assert torch.equal(pair.successor, again.successor)
    assert torch.equal(pair.target.lm_head.weight, again.target.lm_head.weight)


def test_norms_are_neutral_and_rotary_buffers_are_set(pair):
    config = pair.target.config
    fresh = FAMILIES["qwen3_5_moe"][0](config)
    norms = {name: p for name, p in fresh.named_parameters() if "norm" in name}
    mine = dict(pair.target.named_parameters())
    assert norms and all(torch.equal(mine[name], p) for name, p in norms.items())
    rotary = pair.target.model.rotary_emb
    assert torch.equal(rotary.inv_freq, fresh.model.rotary_emb.inv_freq)
    assert rotary.inv_freq.dtype == torch.float32
    assert all(torch.isfinite(p).all() for p in pair.target.parameters())


def test_every_shape_has_a_drafter_that_fits(plain_empty):
    for name, shape in SHAPES.items():
        with torch.device("meta"):
            target = FAMILIES[shape.family][0](target_config(shape))
            drafter = DFlashDrafter(drafter_config(shape))
        assert check_drafter(drafter, target) is drafter, name
        assert shape.target["vocab_size"] % 2 == 0


def test_the_35b_has_the_sizes_that_were_measured(plain_empty):
    with torch.device("meta"):
        target = FAMILIES["qwen3_5_moe"][0](target_config(SHAPES["35b"])).to(torch.bfloat16)
        drafter = DFlashDrafter(drafter_config(SHAPES["35b"])).to(torch.bfloat16)
    sizes = weight_bytes(target)
    assert sum(sizes.values()) == pytest.approx(69.3e9, rel=1e-3)
    assert sizes["experts"] == pytest.approx(64.4e9, rel=1e-3)
    floors = DecodeFloors(target, drafter, {w: independent_experts(256, 8, w) for w in (1, 4)}, 1024)
    one, four = (floors.verification(w) for w in (1, 4))
    # read here, read and written by the commit
    assert one["states"] == four["states"] == floors.commit()["states"] / 2 == 30 * 32 * 128 * 128 * 4
    assert sum(one.values()) == pytest.approx(5.98e9, rel=0.01)
    assert four["experts"] / one["experts"] == pytest.approx(independent_experts(256, 8, 4) / 8)
    # five layers see at most their window, and all of them the whole of a short context
    assert floors.draft()["kv"] == 6 * 1024 * 2 * 8 * 128 * 2
    # 2048 outputs of eight layers' features, and six layers' keys and values; 30 states of 32 heads, read and written
    assert floors.commit()["drafter"] == 2 * 2048 * (8 * 2048 + 6 * 2 * 8 * 128)
    assert floors.commit()["states"] == 2 * 30 * 32 * 128 * 128 * 4
    # a shared expert of 512 channels, its gate and 256 experts' logits
    assert floors.stage0()["router"] == 2 * 2048 * (256 + 1 + 2 * 512)
    assert floors.stage0()["gdn"] == pytest.approx(sizes["gdn"] / 30)


def test_a_shortened_shape_keeps_its_pattern():
    short = shortened(SHAPES["35b"], 12)
    assert short.target["num_hidden_layers"] == 12 and max(short.drafter["target_layer_ids"]) < 12
    with pytest.raises(ValueError, match="between 8 and 40"):
        shortened(SHAPES["35b"], 4)
    with pytest.raises(ValueError, match="Unknown shape"):
        build("36b", "cpu", torch.float32)


# ---- routing


def test_distinct_experts_of_windows():
    chosen = torch.tensor([[[0, 1], [1, 2], [4, 5], [4, 5]]])
    assert distinct_experts(chosen, 8, 1).item() == 2
    assert distinct_experts(chosen, 8, 2).item() == pytest.approx((3 + 4 + 2) / 3)
    assert distinct_experts(chosen, 8, 4).item() == 5
    layer0, later = new_experts(torch.cat([chosen, chosen]), 8, block=2)
    assert layer0.tolist() == [[2, 1], [2, 0]] == later.tolist()


def test_the_profile_of_the_35b():
    assert wanted_distinct(256, 8) == pytest.approx(60)
    # some way below it, so that the strength can be chosen
    assert 48 < independent_experts(pool_size(256, 8), 8, 16) < 54
    assert bisect_strength(lambda strength: 10 - strength, 7.0) == pytest.approx(3.0, abs=1e-3)
    with pytest.raises(RuntimeError, match="No strength"):
        bisect_strength(lambda strength: 10 - strength, 1.0)


def test_the_routers_are_as_correlated_as_asked(pair):
    wanted = wanted_distinct(32, 4)
    assert pair.routing.distinct[16] == pytest.approx(wanted, rel=0.05)
    chosen = route(pair.target, input_ids=pair.text(256, start=100))
    curve = distinct_curve(chosen, 32)
    assert curve[1] == 4 and curve[16] == pytest.approx(wanted, rel=0.1)
    assert curve[16] < 0.9 * independent_experts(32, 4, 16)
    table = pair.routing.table
    assert (table.block, table.top_k, table.num_moe_layers) == (16, 4, 4)


# ---- traces


@pytest.mark.parametrize("name", PAPER_AL)
def test_a_trace_has_the_mean_of_the_paper(name):
    trace = load_trace(name)
    assert 1 + trace.accepted.double().mean().item() == pytest.approx(PAPER_AL[name], abs=2e-3)
    assert trace.mean_al == pytest.approx(PAPER_AL[name], abs=2e-3)
    assert trace.accepted.min() >= 0 and trace.accepted.max() <= 15 and trace.block == 16
    assert ((trace.confidence >= 0) & (trace.confidence <= 1)).all() and (trace.entropy >= 0).all()
    # a request that plays a part of it sees the same mean
    for part in trace.accepted.double().split(64):
        assert 1 + part.mean().item() == pytest.approx(trace.mean_al, rel=0.06)


def test_short_and_long_rounds_relate_as_in_the_paper():
    traces = [load_trace(name) for name in PAPER_AL]
    share = sum(t.emitted(7) for t in traces) / sum(t.emitted(16) for t in traces)
    assert share == pytest.approx(3.99 / 4.77, abs=5e-3)


def test_recorded_rounds_say_where_they_are_from():
    rounds = recorded_rounds()
    assert "tiny pair" in rounds.source and len(rounds.accepted) > 500
    assert load_trace(RECORDED).accepted.double().mean() + 1 == pytest.approx(rounds.mean_al, abs=2e-3)
    assert load_acceptance().block == 16
    folder = ROOT / "hybridspec_hf" / "assets" / "traces"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000
    with pytest.raises(ValueError, match="Unknown trace"):
        load_trace("poetry")


def test_drawing_rows_keeps_the_mean_and_the_stretches():
    generator = torch.Generator().manual_seed(1)
    accepted = torch.randint(0, 16, (300,), generator=generator)
    rows, base = decode_record.keep(accepted, generator)
    assert base.sum().item() == pytest.approx(1) and torch.equal(rows, rows.sort().values)
    weights = decode_record.tilted(accepted[rows], base, 5.0, 0.3)
    assert 1 + (weights @ accepted[rows].double()).item() == pytest.approx(5.0, abs=1e-6)
    chosen = accepted[rows][decode_record.draw(accepted[rows], weights, 5.0, generator)]
    assert len(chosen) == 512 and chosen.sum() == 4 * 512


# ---- script


def test_a_script_is_right_as_often_as_its_trace_says(pair):
    trace, script = load_trace("math"), script_of(pair, "math")
    block = torch.zeros(16, dtype=torch.int64)
    anchor, draft = block[:1], Draft(block[1:], torch.zeros(15), torch.zeros(15))
    for row in (*range(20), *range(5)):
        if row == 0:
            script.reset()
        anchor.fill_((37 * row) % 512)
        script.rewrite(anchor, draft)
        known = follow(pair.successor, anchor, 16)[1:]
        assert (draft.tokens == known).tolist() == [i < trace.accepted[row] for i in range(15)]
        assert ((draft.tokens >= 0) & (draft.tokens < 512)).all()
        assert torch.equal(draft.confidence, trace.confidence[row]) and torch.equal(draft.entropy, trace.entropy[row])


def test_a_script_repeats_its_rows_in_six_operations(pair):
    script, draft = script_of(pair), Draft(torch.zeros(15, dtype=torch.int64), torch.zeros(15), torch.zeros(15))
    anchor, played = torch.tensor([3]), []
    for _ in range(2 * len(script.plan)):
        script.rewrite(anchor, draft)
        played.append(torch.cat([tensor.double() for tensor in draft]))
    assert torch.equal(torch.stack(played[: len(script.plan)]), torch.stack(played[len(script.plan) :]))
    assert not torch.equal(played[0], played[1])
    with torch.profiler.profile() as profile:
        script.rewrite(anchor, draft)
    views = {"aten::unsqueeze", "aten::select", "aten::slice", "aten::as_strided"}
    counts = {event.key: event.count for event in profile.key_averages() if event.key not in views}
    assert counts == {"aten::index_select": 4, "aten::bitwise_xor_": 1, "aten::copy_": 1}


def test_a_script_needs_a_trace_that_is_wide_enough(pair):
    with pytest.raises(ValueError, match="15 draft tokens; the script plays .* of 16"):
        Script(load_trace("math"), pair.successor, 16)


@pytest.mark.parametrize("policy", ["full", "static:5", "hybridspec"])
def test_generate_by_a_script(pair, policy):
    prompt = pair.text(40, start=9)
    trace, script = load_trace("coding"), script_of(pair)
    with scripted(pair.target, pair.drafter, script):
        # the first request of an adaptive policy times the drafter, which plays the script
        generate(pair, prompt, 8, policy)
        script.reset()
        tokens, report = generate(pair, prompt, 100, policy)
    assert torch.equal(tokens, follow(pair.successor, prompt[0, -1:], 101)[1:])
    # the last rounds are cut by the output's end
    played = trace.accepted[: report.rounds - 2].tolist()
    longest = [w - 1 for w in report.verify_lengths]
    assert report.accepted[: len(played)] == [min(a, w) for a, w in zip(played, longest, strict=False)]


def test_outside_of_the_script_the_drafter_is_itself_again(pair):
    engine = get_engine(pair.target, pair.drafter)
    prompt = pair.text(30)
    with scripted(pair.target, pair.drafter, script_of(pair)):
        buffers = engine.borrow(pair.drafter, 64)
        assert isinstance(engine.bind(pair.drafter, buffers), ScriptedDrafter)
        assert engine.bind(None, buffers) is None
    assert not isinstance(engine.bind(pair.drafter, buffers), ScriptedDrafter)
    assert max(generate(pair, prompt, 40, "full")[1].accepted) < 3


@pytest.mark.gpu
def test_a_graph_can_hold_a_script():
    pair = build("tiny", "cuda", torch.bfloat16)
    trace, script = load_trace("rag"), script_of(pair, "rag")
    anchor = torch.tensor([3], device="cuda")
    draft = Draft(torch.zeros_like(script.next_tokens[0]), *(torch.zeros(15, device="cuda") for _ in range(2)))
    script.rewrite(anchor, draft)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        script.rewrite(anchor, draft)
    script.reset()
    known = follow(pair.successor, anchor, 16)[1:]
    for row in range(8):
        graph.replay()
        assert (draft.tokens == known).tolist() == [i < trace.accepted[row] for i in range(15)]


# ---- report and script file


def test_ratios_are_means_of_the_categories_ratios():
    def row(policy, category, speed):
        return Row(policy, category, speed, 0.0, 1.0, 10, 3.0, 8.0, True, [])

    rows = [row("ar", "all", 100.0), row("full", "math", 200.0), row("full", "rag", 100.0),
            row("hybridspec", "math", 300.0), row("hybridspec", "rag", 200.0)]  # fmt: skip
    report = DecodeBenchmark({"bandwidth": None}, rows=rows)
    ar, full, ours = report.summaries()
    assert ar["vs_ar"] is None and full["vs_ar"] == 1.5
    assert ours["vs_ar"] == 2.5 and ours["vs_full"] == 1.75
    header, _, *lines = decode_report.table_lines(report)
    assert [cell.strip() for cell in header.strip("|").split("|")][:4] == ["AL, SR", "math", "rag", "mean"]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["whole block", "3.00, 2.00", "3.00, 1.00", "3.00, 1.500", "1.00", "8.0", "1.667"],
        ["HybridSpec", "3.00, 3.00", "3.00, 2.00", "3.00, 2.500", "1.00", "8.0", "1.000"],
    ]
    assert report.passed and "scripted acceptance, random weights" in next(head_lines(report))
    wrong = DecodeBenchmark({"bandwidth": None}, rows=[*rows, replace(rows[0], known_text=False)])
    assert not wrong.passed and "WRONG" in row_line(wrong, wrong.rows[-1]) and "WRONG" not in row_line(wrong, rows[0])


def load_script():
    spec = importlib.util.spec_from_file_location("bench_decode", ROOT / "scripts" / "bench_decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_whole_benchmark_runs(monkeypatch, capsys, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--context", "48", "--new-tokens", "32", "--lengths", "3", "16",
                 "--categories", "coding", "roleplay", "--policies", "hybridspec+online",
                 "--json", str(path)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", *arguments])
    grad = torch.is_grad_enabled()
    try:
        assert load_script().main() == 0
    finally:
        torch.set_grad_enabled(grad)
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads(path.read_text())
    assert report["label"] == "scripted acceptance, random weights" and report["passed"]
    # for people too, ahead of every number
    before, _, _ = out.partition("ms a token")
    assert "All numbers: scripted acceptance, random weights." in before and len(before) < len(out)
    policies = {row["policy"] for row in report["rows"]}
    assert policies == {"ar", "full", "static:3", "static:16", "hybridspec", "hybridspec+online"}
    assert {row["category"] for row in report["rows"]} == {"all", "coding", "roleplay"}
    assert len(report["stock"]) == 3 and report["routing"]["distinct"]["16"] > 4
    assert all(row["vs_ar"] > 0 for row in report["rows"])
    assert report["traces"]["coding"]["mean_al"] == pytest.approx(6.43, abs=2e-3)


def test_bad_arguments_are_refused(monkeypatch, capsys, tmp_path):
    for arguments, message in (
        (["--new-tokens", "1"], "too small"),
        (["--json", "/nowhere/x.json"], "no folder"),
        (["--json", str(tmp_path)], "is a folder: name a file"),
    ):
        monkeypatch.setattr(sys, "argv", ["bench_decode.py", *arguments])
        with pytest.raises(SystemExit):
            load_script().main()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("policies", "message"), [
    (["static:20"], "--policies: policy='static:20' verifies 20 tokens, but the drafter's block has 16"),
    (["dcut", "ar"], "--policies: 'ar' does not draft"),
    (["ar+replay"], "--policies: 'ar+replay' does not draft"),
])  # fmt: skip
def test_policies_that_cannot_run_are_refused_before_building(monkeypatch, policies, message):
    monkeypatch.setattr(decode_models, "build", lambda *a, **k: pytest.fail("built before the policies were checked"))
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", "--device", "cpu", "--policies", *policies])
    with pytest.raises(SystemExit, match=re.escape(message)):
        load_script().main()


def test_a_category_given_twice_runs_once(monkeypatch):
    categories = ["roleplay", "coding", "roleplay"]
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", "--device", "cpu", "--categories", *categories])
    assert load_script().parse().categories == ["roleplay", "coding"]


def test_a_trace_given_twice_is_warm_the_second_time(pair, monkeypatch):
    seen = []
    row = Row("full", "coding", 1.0, 0.0, 1.0, 1, 1.0, 1.0, True, [])
    monkeypatch.setattr(decode_run, "time_requests", lambda *a, warm: seen.append((a[2].name, warm)) or row)
    monkeypatch.setattr(decode_run, "time_parts", lambda *a: [])
    # equal, not the same object
    traces = [load_trace("coding"), load_trace("coding")]
    plan = decode_run.Plan(["dflash"], ["static:3"], [3], 8, 8, 1)
    decode_run.run_benchmark(pair, traces, plan, None, lambda line: None)
    assert seen == [("full", False), ("full", True), ("static:3", False), ("static:3", True)]


def test_ways_to_launch_are_told_and_counted():
    way = Launches("parent graph", True, 4.5, 9.0, 1 << 30, True)
    report = DecodeBenchmark({"bandwidth": None}, launches=[way], split=Split(3100, True, 5.3, 5.2, 5.1, 5.0))
    assert launch_line(way) == (
        "HybridSpec, parent graph, beside a busy Python thread: 4.500 ms a round; capture 9.0 s; 1024 MiB of the GPU"
    )
    line = split_line(Split(3100, True, 5.3, 5.2, 5.1, 5.0))
    assert "unsplit 5.200 ms, over 3100 rounds of every length: tokens, acceptance and rounds the same" in line
    assert report.passed and report.to_dict()["split"]["rounds"] == 3100
    for wrong in (
        replace(report, launches=[replace(way, known_text=False)]),
        replace(report, split=Split(9, False, 1, 1, 1, 1)),
    ):
        assert not wrong.passed


def test_a_thread_is_busy_while_a_request_decodes(pair, monkeypatch):
    alive, run_rounds = [], strategy.run_rounds

    def watched(*arguments):
        alive.append(threading.active_count())
        return run_rounds(*arguments)

    monkeypatch.setattr(strategy, "run_rounds", watched)
    monkeypatch.setattr(strategy, "prefill", lambda *a: alive.append(threading.active_count()) or prefill(*a))
    before = threading.active_count()
    with busy_while_decoding():
        generate(pair, pair.text(8), 8, "full")
    assert alive == [before, before + 1] and threading.active_count() == before
    assert strategy.run_rounds is watched


def test_contexts_have_curves_of_their_own(pair, monkeypatch):
    monkeypatch.setattr(contexts, "ROUND_TOKENS", 32)
    said = []
    measured = compare_contexts(pair, script_of(pair), said.append, (40, 100))
    assert [each.cost.context for each in measured] == [40, 100] and not said
    assert all(each.cost.throughput > 0 for each in measured)
    # over itself; noise decides about the other
    assert measured[0].gain == 1.0 and 0.5 < measured[1].gain < 2
    lines = list(decode_report.context_lines(measured))
    assert lines[1].startswith("Behind 100 tokens: ") and "with the curve of 40: " in lines[1]


def test_graphs_are_compared_on_a_gpu_only(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", "--device", "cpu", "--modes", "launches"])
    with pytest.raises(SystemExit):
        load_script().main()
    assert "need --device cuda" in capsys.readouterr().err


@pytest.mark.gpu
def test_ways_to_launch_write_the_same_text():
    pair = build("tiny", "cuda", torch.bfloat16)
    script = script_of(pair, "roleplay")
    with torch.no_grad():
        ways = list(compare_launches(pair, pair.text(40), script, 64))
        split = compare_split(pair, pair.text(40), script, 50)
    assert [way.busy for way in ways] == [False, True] * 4 and all(way.known_text for way in ways)
    assert len({way.way for way in ways}) == 4
    assert split.same and split.rounds >= 50


def test_every_length_is_verified_in_turn():
    state = RoundState(
        block=16, hidden_size=8, top_k=2, feature_size=8, dtype=torch.float32, device=torch.device("cpu")
    )
    policy, seen = EveryLength(state.remaining.device), []
    for remaining in [100] * 15 + [5] * 15:
        state.remaining.fill_(remaining)
        policy.select(state)
        policy.correct(state)
        seen.append(int(state.verify_length))
    assert seen == [*range(2, 17), *(min(w, 5) for w in range(2, 17))]


def test_parts_of_a_round_are_named(pair):
    floors = DecodeFloors(pair.target, pair.drafter, pair.routing.distinct, 40)
    with torch.no_grad():
        parts = decode_parts.time_parts(pair, pair.text(40), [4], floors, 1e12)
    assert [part.part for part in parts][:3] == ["draft", "Stage 0 of 16", "verification of 1"]
    assert all(part.ms > 0 and part.floor_ms > 0 for part in parts)
    # on a GPU by kind of layer, too
    assert {part.part for part in parts} >= {"verification of 4", "verification of 16"}


@pytest.mark.gpu
def test_parts_of_a_round_by_kind_of_layer():
    pair = build("tiny", "cuda", torch.float32)
    floors = DecodeFloors(pair.target, pair.drafter, pair.routing.distinct, 40)
    with torch.no_grad():
        parts = [part.part for part in decode_parts.time_parts(pair, pair.text(40), [4], floors, 1e12)]
    kinds = ("GDN", "attention", "MoE", "head", "acceptance and commit")
    assert {f"  {w}: {kind}" for w in (1, 4, 16) for kind in kinds} < set(parts)
    assert {"100 calls of the selector", "100 calls of the routing correction"} < set(parts)


def test_notes_say_whose_they_are():
    rows = [Row(name, "coding", 1.0, None, 1.0, 1, 1.0, 1.0, True, notes) for name, notes in (
        ("full", []), ("evict", ["cost: measured now"]), ("hybridspec", ["cost: measured now", "another"]),
    )]  # fmt: skip
    report = DecodeBenchmark({"bandwidth": None}, rows=rows)
    notes = [line for line in mean_lines(report) if line.startswith("note")]
    assert notes == ["note of hybridspec: another", "note of evict, hybridspec: cost: measured now"]
