"""The GDN benchmark: its check catches wrong backends, its floors count bytes, and it never times a wrong kernel."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hybridspec_generation.gdn import GDNShape, make_gdn
from hybridspec_hf.bench import gdn_check, gdn_timing
from hybridspec_hf.bench.gdn_backends import COMPETITORS, OURS
from hybridspec_hf.bench.gdn_check import Part, cases, check_part, poisoned_memory
from hybridspec_hf.bench.gdn_exact import convolve, exact_round
from hybridspec_hf.bench.gdn_floors import round_bytes
from hybridspec_hf.bench.gdn_inputs import KINDS, SHAPES, random_inputs, shape_of
from hybridspec_hf.bench.gdn_plan import CheckReport, run_check
from hybridspec_hf.bench.gdn_tables import check_lines, timing_lines
from hybridspec_hf.bench.gdn_timing import time_backends
from hybridspec_kernels import gdn_recurrent_ref

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_gdn.py"
# an uninstalled checkout also runs
PYTHONPATH = {"PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in (".", "generation", "kernels/torch-ext"))}
CPU = torch.device("cpu")
SHAPE = GDNShape(
    layers=2, key_heads=2, value_heads=4, key_dim=8, value_dim=16, taps=4, dtype=torch.float32, device=CPU
)


def part(**changes):
    return replace(Part(SHAPE, (2, 5), ("block",), kernels=False), **changes)


def break_backends(monkeypatch, spoil):
    """Let a function spoil every backend of the check."""

    def make(name, shape, *, block, kernels):
        gdn = make_gdn(name, shape, block=block, kernels=kernels)
        spoil(gdn)
        return gdn

    monkeypatch.setattr(gdn_check, "make_gdn", make)


def scale_outputs(gdn):
    verify = gdn.verify_convolved
    gdn.verify_convolved = lambda *args, **kwargs: verify(*args, **kwargs) * 1.001


def commit_one_token_too_many(gdn):
    commit = gdn.commit
    gdn.commit = lambda m, **kwargs: commit((m + 1).clamp_max(gdn.block), **kwargs)


def leave_last_row_unwritten(gdn):
    verify, shape = gdn.verify_convolved, gdn.shape
    buffer = torch.empty(gdn.block, shape.value_heads, shape.value_dim)

    def verify_most(layer, x, *args, **kwargs):
        buffer[: len(x) - 1] = verify(layer, x, *args, **kwargs)[:-1]
        return buffer[: len(x)]

    gdn.verify_convolved = verify_most


def forget_windows(gdn):
    commit = gdn.commit
    gdn.commit = lambda m, **kwargs: commit(m, windows=False)


@pytest.mark.parametrize("name", OURS)
def test_check_passes_our_backends(name):
    found = check_part(part(backends=(name,)))
    groups = {"rounds", "long", "forget"}
    assert {(e.scope, e.group) for e in found} == {(scope, group) for scope in ("core", "conv") for group in groups}
    assert all(e.passed for e in found), found


@pytest.mark.parametrize(
    "spoil, states_right, windows_right",
    [
        (scale_outputs, True, True),
        (leave_last_row_unwritten, True, True),
        (commit_one_token_too_many, False, False),
        (forget_windows, False, False),
    ],
)
def test_check_catches_a_wrong_backend(monkeypatch, spoil, states_right, windows_right):
    break_backends(monkeypatch, spoil)
    report = CheckReport(check_part(part(scopes=("conv",))), "a wrong backend")
    assert not report.passed and any("BROKEN" in line for line in check_lines(report))
    (errors,) = (e for e in report.errors if e.group == "rounds")
    assert errors.output_error > errors.output_bound
    assert (errors.state_error <= errors.state_bound) == states_right
    assert errors.windows_exact == windows_right


def test_check_reports_unwritten_outputs_as_no_number(monkeypatch):
    break_backends(monkeypatch, leave_last_row_unwritten)
    report = CheckReport(check_part(part(scopes=("core",))), "a wrong backend")
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["max_output_error_fp32"] is None and not values["passed"]


def test_check_catches_a_truncated_series(monkeypatch):
    def series(system, rhs, *, upper, unitriangular):
        x = -system.tril(-1)
        return rhs + x @ (rhs + x @ (rhs + x @ rhs))

    monkeypatch.setattr(torch.linalg, "solve_triangular", series)
    keys = [c for c in cases(part(lengths=(8,))) if c.kind == "repeated keys"]
    monkeypatch.setattr(gdn_check, "cases", lambda part: keys)
    (errors,) = check_part(part(shape=replace(SHAPE, dtype=torch.bfloat16), scopes=("core",)))
    assert errors.state_error > errors.state_bound


def test_cases_commit_every_prefix_in_both_orders():
    rounds = {case.rounds for case in cases(part(lengths=(5,))) if case.kind == "random" and case.group == "rounds"}
    assert {pair[0] for pair in rounds} == {pair[1] for pair in rounds} == {(5, m) for m in range(1, 6)}
    assert {((5, 5), (5, 3)), ((5, 3), (5, 5))} <= rounds


def test_empty_check_does_not_pass():
    assert not CheckReport([], "nothing").passed


def test_poisoned_memory_fills_and_restores():
    with poisoned_memory():
        assert torch.Tensor.new_empty(torch.zeros(1), 3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", KINDS)
def test_exact_round_is_the_recurrence_of_each_layer(kind):
    start, (item,) = random_inputs(SHAPE, [3], kind=kind, seed=1)
    exact = exact_round(SHAPE, start.params, item, start.states, start.windows, "conv")
    for layer, params in enumerate(start.params):
        weight = params.conv_weight.double().t()[:, None]
        x = F.silu(F.conv1d(exact.window[layer].double().t()[None], weight, groups=SHAPE.channels))[0].t()
        q, k, v = x.split([16, 16, 64], dim=-1)
        inputs = (q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 16)))
        gates = (item.a[layer].double(), item.b[layer], params.A_log.double(), params.dt_bias.double())
        outputs, states = gdn_recurrent_ref(*inputs, *gates, start.states[layer].double())
        # x was rounded to fp32 twice
        torch.testing.assert_close(exact.outputs[layer], outputs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(exact.states[layer], states, rtol=1e-4, atol=1e-5)


def test_convolve_rounds_the_sum_and_the_activation():
    rows, weights = torch.randn(1, 5, 8).bfloat16(), torch.randn(1, 4, 8).bfloat16()
    total = F.conv1d(rows[0].double().t()[None], weights[0].double().t()[:, None], groups=8)[0].t().bfloat16()
    assert torch.equal(convolve(rows, weights)[0], F.silu(total.double()).bfloat16())


def test_inputs_are_what_their_kinds_say():
    start, (item,) = random_inputs(SHAPE, [6], kind="repeated keys")
    keys = item.rows[..., 16:32]
    assert torch.equal(keys, start.windows[:, :1, 16:32].expand_as(keys))
    _, (item,) = random_inputs(SHAPE, [6], kind="all or nothing")
    assert {0.0, 1.0} <= set(item.b.sigmoid().unique().tolist())
    _, (item,) = random_inputs(SHAPE, [6], kind="forget")
    assert ((item.a == 1e4).sum(1) == 1).all()


# one layer's bytes of w = 3 and m = 2 tokens, by hand: H = 1, HV = 2, K = 4, V = 3, C = 14, bf16
TINY = GDNShape(layers=2, key_heads=1, value_heads=2, key_dim=4, value_dim=3, taps=4, dtype=torch.bfloat16, device=CPU)
STATE = 2 * 3 * 4 * 4
FACTORS = 2 * 3 * 4 + 2 * 4 + 4 * 2
ROWS, GATES, OUT, PARAMS = 14 * 2, 2 * 2 * 2, 2 * 3 * 2, 2 * 4 + 2 * 2
COMMON = 3 * (ROWS + GATES + OUT) + PARAMS


@pytest.mark.parametrize(
    "method, expected",
    [
        ("block", 3 * STATE + 5 * FACTORS),
        ("recurrent", 6 * STATE),
        # a ring of 16 folds after 7 commits: 14 + 3 > 16; before, it holds 0, 2, ..., 12 tokens
        ("replay", STATE + 3 * FACTORS + (42 * FACTORS + 2 * STATE + 14 * FACTORS) / 7),
        ("rerun", 3 * STATE + 2 * (ROWS + GATES)),
    ],
)
def test_round_bytes(method, expected):
    assert round_bytes(method, TINY, 3, 2, "core") == pytest.approx(2 * (COMMON + expected))
    # weights once; the window read by the convolution, then read and written by the commit
    conv = (4 + 3 * 3) * 14 * 2
    assert round_bytes(method, TINY, 3, 2, "conv") == pytest.approx(2 * (COMMON + conv + expected))


@pytest.mark.parametrize("w, method, microseconds", [(2, "block", 45.2), (16, "block", 51.7), (2, "recurrent", 74.0)])
def test_round_bytes_of_the_35b_shape(w, method, microseconds):
    # counted independently, at a copy bandwidth of 4.262 TB/s
    shape = shape_of(SHAPES["35b"], torch.bfloat16, CPU)
    assert round_bytes(method, shape, w, w, "core") / 4.262e6 == pytest.approx(microseconds, abs=0.3)


def test_per_token_states_hold_what_the_paper_says():
    shape = replace(shape_of(SHAPES["35b"], torch.bfloat16, CPU), layers=3)
    bytes_of = {name: COMPETITORS[name].build(shape, 16).verification_bytes() for name in ("recurrent", "block")}
    held = {name: 10 * count / 2**30 for name, count in bytes_of.items()}
    assert held == {"recurrent": pytest.approx(0.94, abs=0.005), "block": pytest.approx(0.01, abs=0.002)}


# ---- timing, with the GPU replaced


class Immediate:
    """A captured graph that runs its work again."""

    def __init__(self, work):
        self.replay = work
        work()


def sampled(replay, samples, replays):
    """Made-up times; a mean over rounds asks for one."""
    return [6.0] if samples == 1 else [6.0, 7.0, 9.0]


@pytest.fixture
def no_gpu(monkeypatch):
    """Graphs run on the CPU, and times are made up."""
    monkeypatch.setattr(gdn_timing, "capture", Immediate)
    monkeypatch.setattr(gdn_timing, "num_nodes", lambda graph: 3)
    monkeypatch.setattr(gdn_timing, "sample_us", sampled)
    monkeypatch.setattr(gdn_timing, "mean_parts_us", lambda parts, rounds: [4.0, 2.0])
    monkeypatch.setattr(gdn_timing, "copy_bandwidth", lambda device, samples: 1e12)
    monkeypatch.setattr(gdn_timing, "LaunchFloor", lambda *args: SimpleNamespace(us=lambda n, overlap: 2.0 * n))
    monkeypatch.setattr(gdn_timing, "has_programmatic_launch", lambda device: True)


def missing(shape, block):
    raise ModuleNotFoundError("No module named 'sglang'")


def test_timing_reports_every_row_with_floors_and_ratios(monkeypatch, no_gpu):
    monkeypatch.setitem(COMPETITORS, "sglang", replace(COMPETITORS["sglang"], build=missing))
    names = ("block", "recurrent", "replay", "sglang")
    report = time_backends(SHAPE, names, lengths=(1, 5), samples=3, replays=1)
    assert report.not_run == {"sglang": "ModuleNotFoundError: No module named 'sglang'"}
    keys = {(r.scope, r.w, r.m, r.backend, r.overlap) for r in report.rows}
    tokens = [(1, 1), (5, 5), (5, 3)]
    assert keys == {(s, w, m, b, o) for s in ("core", "conv") for w, m in tokens for b in OURS for o in (True, False)}
    block = next(r for r in report.rows if r.backend == "block" and r.w == 5 and r.m == 3 and r.scope == "conv")
    assert (block.total_us, block.spread_us, block.launch_floor_us) == (7.0, 3.0, 6.0)
    assert block.byte_floor_us == pytest.approx(round_bytes("block", SHAPE, 5, 3, "conv") / 1e6)
    replay = next(r for r in report.rows if r.backend == "replay")
    assert (replay.total_us, replay.spread_us, replay.verify_us, replay.commit_us) == (6.0, None, 4.0, 2.0)
    assert report.ratio(replay, "recurrent") == pytest.approx(7 / 6) and report.ratio(replay, "sglang") is None
    assert report.passed and set(report.memory) == set(OURS)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["rows"][0]["vs_recurrent"] is not None and "random inputs" in values["method"]
    lines = list(timing_lines(report))
    assert sum(line.startswith(("core ", "conv ")) for line in lines) == len(report.rows)
    assert any(line.startswith("sglang not run") for line in lines)


def test_timing_refuses_a_wrong_backend(monkeypatch, no_gpu, capsys):
    def build(shape, block):
        gdn = make_gdn("block", shape, block=block)
        commit_one_token_too_many(gdn)
        return gdn

    monkeypatch.setitem(COMPETITORS, "block", replace(COMPETITORS["block"], build=build))
    report = time_backends(SHAPE, ("block", "recurrent"), lengths=(4,), scopes=("core",), samples=3, replays=1)
    assert not report.passed and "wrong at w = 4, m = 2" in report.not_run["block"]
    # at m = 4 the spoiled commit stops at the end of the block, and is right
    assert {r.backend for r in report.rows} == {"recurrent"}


# ---- the script


def run_script(monkeypatch, *argv):
    """Its exit status, in this process."""
    spec = importlib.util.spec_from_file_location("bench_gdn", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert list(COMPETITORS) == script.BACKENDS
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *argv])
    # the script sets it; this puts it back
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return script.main()


QUICK = ("--check", "--device", "cpu", "--lengths", "2", "--dtypes", "float32", "bfloat16", "--scopes", "core")


def test_script_prints_a_json_object_last(monkeypatch, capsys, tmp_path):
    assert run_script(monkeypatch, *QUICK, "--backends", "block", "--json", str(tmp_path / "out.json")) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values == json.loads((tmp_path / "out.json").read_text())
    assert values["passed"] and 1e-4 < values["max_output_error"] <= 1.8e-3 and values["max_state_error"] <= 1e-4
    assert values["max_output_error_fp32"] <= 1e-5 and values["max_state_error_fp32"] <= 1e-6
    assert "references" in values["checked"] and values["torch"] == torch.__version__ and values["argv"]


def test_script_fails_when_a_bound_breaks(monkeypatch, capsys):
    break_backends(monkeypatch, scale_outputs)
    assert run_script(monkeypatch, *QUICK, "--backends", "block") == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] is False


def test_script_interprets_the_kernels_on_a_cpu():
    pytest.importorskip("triton")
    argv = ("--check", "--device", "cpu", "--lengths", "3", "--dtypes", "float16", "--scopes", "core")
    command = [sys.executable, str(SCRIPT), *argv, "--backends", "block", "replay"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **PYTHONPATH})
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout.splitlines()[-1])
    assert {(e["implementation"], e["backend"]) for e in values["errors"]} == {
        (implementation, backend) for implementation in ("reference", "interpreter") for backend in ("block", "replay")
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("argv", [(), ("--device", "cpu"), ("--check", "--device", "cuda")])
def test_script_says_that_it_needs_a_gpu(monkeypatch, argv):
    with pytest.raises(SystemExit, match="needs --device cuda and an NVIDIA GPU"):
        run_script(monkeypatch, *argv)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--lengths", "2", "17"), "invalid choice: 17"),
        (("--lengths", "0"), "invalid choice: 0"),
        (("--jobs", "0"), "--jobs needs a positive number, got 0"),
        (("--check", "--producer"), "give one of them"),
        (("--json", "no/such/folder/x.json"), "there is no folder"),
    ],
)
def test_script_refuses_arguments_before_any_work(monkeypatch, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        run_script(monkeypatch, *argv, "--device", "cpu")
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_script_checks_its_own_backends_only(monkeypatch):
    with pytest.raises(SystemExit, match="--backends sglang: choose from block recurrent replay"):
        run_script(monkeypatch, "--check", "--device", "cpu", "--backends", "sglang")


def test_check_says_what_ran(monkeypatch):
    report = run_check("cpu", ("block",), ("core",), lengths=(2,), dtypes=("bfloat16",))
    # the interpreter has no part in bf16
    assert report.checked.startswith("the PyTorch references only") and report.passed


@pytest.mark.gpu
def test_timing_on_a_gpu():
    shape = shape_of(SHAPES["tiny"], torch.bfloat16, torch.device("cuda"))
    report = time_backends(shape, OURS, lengths=(1, 3), samples=3, replays=2)
    assert report.passed and all(r.total_us > 0 and r.launches >= shape.layers + 1 for r in report.rows)
    assert all(r.byte_floor_us < r.total_us for r in report.rows)
