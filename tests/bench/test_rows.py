"""Rows and prompts of a bench: names, the paper's tables, splits, and every refusal."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from hybridspec_hf import CostTable, HybridSpecConfig
from hybridspec_hf.bench.pair_prompts import SHIPPED, load_bench_prompts
from hybridspec_hf.bench.pair_tables import factor
from hybridspec_hf.bench.rows import SYSTEMS, BenchRow, ablation_names, parse_row, parse_rows
from hybridspec_hf.pair import TINY_PAIR


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_PAIR / "target")


def test_systems_are_the_papers():
    labels = [row.label for row in parse_rows(SYSTEMS)]
    assert labels == ["AR", "vanilla DFlash", "D-Cut", "EVICT", "ReplaySSM", "EVICT + ReplaySSM", "HybridSpec"]
    assert parse_row("evict+replay") == BenchRow("evict", "replay")
    assert [row.name for row in parse_rows(SYSTEMS)] == list(SYSTEMS)
    assert ablation_names([3])[:4] == ["ar", "hybridspec", "static:3", "full"]


def test_ar_runs_first_and_every_row_once():
    assert [row.name for row in parse_rows(["full", "full+block", "static:4"])] == ["ar", "full", "static:4"]
    assert [row.name for row in parse_rows(["full", "ar+recurrent"])] == ["ar+recurrent", "full"]


def test_an_online_rho_is_the_last_part():
    row = parse_row("nominal+replay+online")
    assert row == BenchRow("nominal", "replay", online=True) and row.name == "nominal+replay+online"
    assert parse_row("hybridspec+block+online").name == "hybridspec+online"
    tables = HybridSpecConfig(online_throughput=True)
    assert parse_row("hybridspec+online").config(HybridSpecConfig()).online_throughput
    assert not parse_row("hybridspec").config(tables).online_throughput
    for name in ("dcut+online", "full+online", "static:4+replay+online", "ar+online"):
        with pytest.raises(ValueError, match=r"reads no rho. Use \+online with hybridspec or nominal"):
            parse_row(name)


def test_ar_is_launched_as_the_tables_say():
    tables = HybridSpecConfig(policy="dcut", graphs="off", rounds_per_launch=4, throughput=1.0)
    config = parse_row("ar").config(tables)
    assert config == HybridSpecConfig(graphs="off", rounds_per_launch=4)
    assert parse_row("ar+replay").config() == HybridSpecConfig(gdn_backend="replay")


@pytest.mark.parametrize("name", [
    "fast", "static:1", "full+", "full+fast", "ar+", "hybridspec+replay+block", "", "online", "+online",
    "hybridspec+online+replay", "hybridspec++online",
])  # fmt: skip
def test_unknown_rows_are_refused(name):
    with pytest.raises(ValueError, match=r"Unknown (policy|GDN backend)"):
        parse_row(name)


def test_costs_of_one_backend_are_not_used_for_another():
    cost = CostTable(target_cost=(0.0, 0.0, 0.0, 1.0), fixed_cost=1.0, stage0_token_cost=0.0, expert_cost=0.0)
    tables = HybridSpecConfig(cost=cost, throughput=2.0)
    same = parse_row("nominal").config(tables)
    assert (same.policy, same.cost, same.throughput) == ("nominal", cost, 2.0)
    other = parse_row("evict+recurrent").config(tables)
    assert (other.gdn_backend, other.cost, other.throughput) == ("recurrent", None, None)
    recurrent = replace(tables, gdn_backend="recurrent")
    assert parse_row("evict+recurrent").config(recurrent).cost == cost
    assert parse_row("evict").config(recurrent).cost is None


def test_shipped_prompts_have_every_category_and_a_licence(tokenizer):
    rows = [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()]
    counts = Counter((row["category"], row["split"]) for row in rows)
    assert len(rows) == 56 and set(counts.values()) == {4} and len({row["id"] for row in rows}) == 56
    notice = (SHIPPED.parent / "README.md").read_text(encoding="utf-8")
    for licence in {row["licence"] for row in rows}:
        assert licence.partition(" or ")[0].replace("CC-BY-SA-4.0", "CC BY-SA 4.0") in notice
    test = load_bench_prompts(SHIPPED, tokenizer, limit=2)
    assert Counter(prompt.category for prompt in test) == dict.fromkeys({row["category"] for row in rows}, 2)
    assert {prompt.name for prompt in test} <= {row["id"] for row in rows if row["split"] == "test"}


def test_split_limit_and_category(tokenizer, tmp_path):
    path = tmp_path / "some.jsonl"
    rows = [
        {"prompt": "a", "category": "x", "split": "test"},
        {"prompt": "b", "category": "x", "split": "calibration"},
        {"prompt": "c"},
        {"prompt": "d", "category": "x", "id": "seven", "split": "test"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")

    def names(**options):
        return [(p.name, p.category) for p in load_bench_prompts(path, tokenizer, **options)]

    assert names() == [("1", "x"), ("seven", "x"), ("3", "prompts")]
    assert names(split="calibration") == [("2", "x"), ("3", "prompts")]
    assert names(split="all", limit=1) == [("1", "x"), ("3", "prompts")]
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match=r"no prompts of split 'calibration' \(1 of split 'test'\)"):
        load_bench_prompts(path, tokenizer, split="calibration")
    with pytest.raises(ValueError, match="limit must be at least 1"):
        load_bench_prompts(path, tokenizer, limit=0)
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="line 1: needs"):
        load_bench_prompts(path, tokenizer)
    with pytest.raises(FileNotFoundError, match="no prompt file"):
        load_bench_prompts(tmp_path / "missing", tokenizer)


@pytest.mark.parametrize("after, words", [(0.05, "2.0 times less"), (0.2, "no better"), (0.1, "no better"), (0.0, "")])
def test_a_calibration_that_does_not_help_is_told(after, words):
    text = factor(0.1, after)
    assert words in text and bool(text) == bool(words)
