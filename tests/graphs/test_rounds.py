"""Rounds as CUDA graphs against plain generate and against rounds launched one by one: tokens, caches, memory."""

import copy
import gc
import os

import pytest
import torch
import triton
from support.streamers import TokenStreamer
from support.tiny_models import FAMILIES, tiny_drafter, tiny_target

import hybridspec_hf
from hybridspec_hf.engine import get_engine
from hybridspec_hf.graphs import conditional, driver
from hybridspec_hf.graphs import rounds as graph_rounds
from hybridspec_hf.graphs.capture import CaptureError
from hybridspec_hf.graphs.rounds import GraphedRounds
from hybridspec_kernels.triton_support import jit, tl

pytestmark = pytest.mark.gpu


def pair(family="qwen3_5_moe"):
    model = tiny_target(family, gain=1.0).to("cuda")
    return model, tiny_drafter(model, gain=1.0).to("cuda")


def generate(model, drafter, ids, new_tokens, **config):
    options = {"generation_mode": "hybridspec", "return_dict_in_generate": True, "do_sample": False}
    if config:
        options["hybridspec_config"] = hybridspec_hf.HybridSpecConfig(**config)
    return model.generate(input_ids=ids, assistant_model=drafter, max_new_tokens=new_tokens, **options)


def plain(model, ids, new_tokens):
    return model.generate(input_ids=ids, do_sample=False, max_new_tokens=new_tokens)


LAUNCHES = {"parent": "parent graph", "per-length": "per-length graphs", "off": "kernels"}


def test_prompts_of_every_length():
    model, drafter = pair()
    for n in range(1, 41):
        ids = torch.randint(1, 90, (1, n), device="cuda")
        assert torch.equal(generate(model, drafter, ids, 12, policy="full").sequences, plain(model, ids, 12)), n


@pytest.mark.parametrize("graphs", LAUNCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_launch_gives_the_targets_tokens(family, graphs):
    model, drafter = pair(family)
    for n in (1, 2, 3, 7, 40):
        ids = torch.randint(1, 90, (1, n), device="cuda")
        want = plain(model, ids, 30)
        for policy in ("full", "static:5", "hybridspec", "nominal"):
            out = generate(model, drafter, ids, 30, policy=policy, graphs=graphs)
            assert torch.equal(out.sequences, want), (n, policy)
            assert out.report.launches == LAUNCHES[graphs], out.report.notes
        out = generate(model, None, ids, 30, graphs=graphs)
        assert torch.equal(out.sequences, want)
        assert out.report.launches == ("kernels" if graphs == "off" else "one graph")


def test_caches_of_a_graph_are_those_of_single_launches():
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 9), device="cuda")
    held = []
    for graphs in ("parent", "off"):
        hybridspec_hf.release(model)
        out = generate(model, drafter, ids, 50, policy="full", graphs=graphs)
        buffers = get_engine(model, drafter)._idle
        # the graph has run one round behind the end, which commits nothing
        n = int(buffers.cache.length)
        assert n == ids.shape[1] + 50 - 1
        caches = (buffers.cache.keys[:, :, :n], buffers.cache.values[:, :, :n], buffers.cache.gdn.states(),
                  buffers.cache.gdn.windows(), *(t[..., :n, :] for t in buffers.context))  # fmt: skip
        held.append(([t.clone() for t in caches], out.report.emitted))
    assert held[0][1] == held[1][1]
    for a, b in zip(held[0][0], held[1][0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", ["off", "parent"])
@pytest.mark.parametrize("rounds", [1, 5])
def test_a_capture_behind_other_requests_leaves_the_cache_alone(first, rounds):
    # what the last round of the first request committed must not be committed again by a capture
    for policy in ("static:5", "hybridspec", "nominal"):
        model, drafter = pair()
        ids = torch.randint(1, 90, (1, 5), device="cuda")
        want = plain(model, ids, 40)
        generate(
            model, drafter, ids, 40, policy="full", graphs=first, rounds_per_launch=1 if first == "off" else rounds
        )
        for _ in range(2):
            out = generate(model, drafter, ids, 40, policy=policy, rounds_per_launch=rounds)
            assert torch.equal(out.sequences, want)


def test_requests_of_mixed_lengths_on_the_same_graphs():
    model, drafter = pair()
    captured = []
    for n, new in ((40, 50), (3, 5), (1, 200), (17, 1), (2, 33), (5, 2)):
        ids = torch.randint(1, 90, (1, n), device="cuda")
        out = generate(model, drafter, ids, new, policy="full")
        assert torch.equal(out.sequences, plain(model, ids, new)), (n, new)
        captured.append(dict(get_engine(model, drafter)._idle.rounds))
    assert all(known == captured[0] for known in captured), "captured once"


def test_graphs_are_captured_again_where_the_buffers_grow():
    model, drafter = pair()

    def rounds_of(n, new):
        ids = torch.randint(1, 90, (1, n), device="cuda")
        assert torch.equal(generate(model, drafter, ids, new, policy="full").sequences, plain(model, ids, new)), n
        (graphs,) = get_engine(model, drafter)._idle.rounds.values()
        return graphs

    short, long = rounds_of(30, 20), rounds_of(2100, 20)
    assert long is not short
    # what has grown serves the shorter ones
    assert all(rounds_of(n, new) is long for n, new in ((5, 40), (2100, 30), (1, 9)))


@pytest.mark.parametrize("policy", ["full", "hybridspec"])
@pytest.mark.parametrize("rounds", [1, 5])
def test_eos_and_streams_stop_in_the_middle(rounds, policy):
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 5), device="cuda")
    text = plain(model, ids, 40)[0, 5:].tolist()
    config = hybridspec_hf.HybridSpecConfig(policy=policy, rounds_per_launch=rounds)
    for at in (0, 1, 5, 17):
        streamed, want = TokenStreamer(), text[: text.index(text[at]) + 1]
        out = model.generate(
            input_ids=ids, assistant_model=drafter, max_new_tokens=40, do_sample=False, eos_token_id=text[at],
            generation_mode="hybridspec", hybridspec_config=config, streamer=streamed,
        )  # fmt: skip
        assert out[0, 5:].tolist() == want and streamed.tokens == [*ids[0].tolist(), *want]


@jit
def _fresh_kernel(x, N: tl.constexpr):
    tl.store(x, N)


@pytest.mark.parametrize("number, policy", list(enumerate(["ar", "hybridspec", "nominal", "dcut", "static:4"])))
@pytest.mark.parametrize("rounds", [1, 5])
def test_nothing_is_compiled_or_loaded_from_the_first_capture_on(number, policy, rounds, monkeypatch):
    """Loading a module waits for the GPU, which a capture forbids and a round cannot afford."""
    model, drafter = pair()
    ids, late, began = torch.randint(1, 90, (1, 6), device="cuda"), [], []
    config = {"rounds_per_launch": rounds} if policy == "ar" else {"rounds_per_launch": rounds, "policy": policy}

    def capture(*arguments, capture=graph_rounds.capture):
        began.append(True)
        return capture(*arguments)

    def watch(hook):
        monkeypatch.setattr(triton.knobs.runtime, hook, lambda *_, **__: late.append(hook) if began else None)

    monkeypatch.setattr(graph_rounds, "capture", capture)
    watch("jit_cache_hook")
    watch("kernel_load_start_hook")
    generate(model, None if policy == "ar" else drafter, ids, 40, **config)
    assert began and not late
    # the hooks do see it
    _fresh_kernel[(1,)](ids, N=10 * number + rounds)
    assert set(late) == {"jit_cache_hook", "kernel_load_start_hook"}


@pytest.mark.parametrize("rounds", [3, 16])
def test_several_rounds_a_launch(rounds):
    model, drafter = pair()
    for n, new in ((5, 40), (2, 1), (9, 2), (30, 100)):
        ids = torch.randint(1, 90, (1, n), device="cuda")
        for policy in ("full", "hybridspec"):
            out = generate(model, drafter, ids, new, policy=policy, rounds_per_launch=rounds)
            assert torch.equal(out.sequences, plain(model, ids, new))
            assert new == 1 or out.report.launches == f"parent graph of up to {rounds} rounds"
        out = generate(model, None, ids, new, rounds_per_launch=rounds)
        assert torch.equal(out.sequences, plain(model, ids, new))


def test_two_engines_in_one_process():
    first, second = pair(), pair("qwen3_next")
    ids = torch.randint(1, 90, (1, 6), device="cuda")
    wants = [plain(model, ids, 20) for model, _ in (first, second)]
    for _ in range(3):
        for (model, drafter), want in zip((first, second), wants, strict=True):
            assert torch.equal(generate(model, drafter, ids, 20, policy="full").sequences, want)


def test_weights_that_moved_are_read_where_they_are():
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")
    generate(model, drafter, ids, 20, policy="full")
    other = tiny_target(seed=5, gain=1.0).to("cuda")
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(generate(model, drafter, ids, 20, policy="full").sequences, plain(other, ids, 20))
    # and in place
    with torch.no_grad():
        for p, q in zip(model.parameters(), pair()[0].parameters(), strict=True):
            p.copy_(q)
    assert torch.equal(generate(model, drafter, ids, 20, policy="full").sequences, plain(model, ids, 20))


def test_no_memory_grows_over_many_requests():
    model, drafter = pair()

    def some():
        for n, new, policy in ((3, 20, "hybridspec"), (30, 5, "full"), (7, 40, "nominal"), (55, 11, "dcut")):
            generate(model, drafter, torch.randint(1, 90, (1, n), device="cuda"), new, policy=policy)

    def held():
        gc.collect()
        torch.cuda.synchronize()
        free = 0 if "PYTEST_XDIST_WORKER" in os.environ else torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), -free

    some()
    some()
    before = held()
    # 200 requests; graphs and modules are not in PyTorch's count, but in the driver's
    for _ in range(50):
        some()
    assert all(now <= then for now, then in zip(held(), before, strict=True))


def test_a_capture_that_fails_falls_back_with_a_warning(monkeypatch):
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")

    def refuse(self):
        self.r.state.remaining.zero_()
        raise CaptureError("Capturing Stage 1 of 3 tokens failed with ValueError: deliberate")

    monkeypatch.setattr(GraphedRounds, "_build", refuse)
    with pytest.warns(UserWarning, match="rounds run without graphs: Capturing Stage 1 of 3 tokens"):
        out = generate(model, drafter, ids, 20, policy="full")
    assert torch.equal(out.sequences, plain(model, ids, 20)) and out.report.launches == "kernels"


def test_a_kernel_that_fails_leaves_the_rounds_to_the_modules(monkeypatch):
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")

    def refuse(self):
        self.r.state.remaining.zero_()
        raise ValueError("deliberate")

    monkeypatch.setattr(GraphedRounds, "_build", refuse)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="one by one, without graphs: a kernel failed with ValueError: deliberate"
        ):
            out = generate(model, drafter, ids, 20, policy="full")
        assert torch.equal(out.sequences, plain(model, ids, 20)) and out.report.launches == "modules"


def test_a_failure_while_measuring_leaves_the_rounds_to_the_modules(monkeypatch):
    from hybridspec_hf.calibration import latency

    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")

    def refuse(*arguments, **options):
        raise ValueError("deliberate")

    monkeypatch.setattr(latency, "graph_seconds", refuse)
    with pytest.warns(UserWarning, match="without graphs: a kernel failed with ValueError: deliberate"):
        out = generate(model, drafter, ids, 20)
    assert torch.equal(out.sequences, plain(model, ids, 20)) and out.report.launches == "modules"


def test_a_round_keeps_the_interpreters_lock_where_it_launches(monkeypatch):
    """Another thread has the lock for 5 ms each time that it is given up."""
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")
    for drafts in (drafter, None):
        generate(model, drafts, ids, 20)
        called = []

        def watched(name, *arguments, called=called, call=driver.call):
            called.append(name)
            call(name, *arguments)

        def refuse(graph):
            raise AssertionError("replay gives the lock up")

        with monkeypatch.context() as patch:
            for module in (driver, conditional):
                patch.setattr(module, "call", watched)
            patch.setattr(torch.cuda.CUDAGraph, "replay", refuse)
            out = generate(model, drafts, ids, 20)
        assert torch.equal(out.sequences, plain(model, ids, 20))
        # a request starts by asking for the driver's version and the context
        assert called.count("cuGraphLaunch") >= out.report.rounds
        assert set(called[called.index("cuGraphLaunch") :]) <= set(driver.QUICK)


def test_a_streamer_that_raises_leaves_clean_buffers():
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")
    want = plain(model, ids, 30)

    class Raises:
        def put(self, value):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 4:
                raise KeyError("deliberate")

    options = {"do_sample": False, "max_new_tokens": 30, "generation_mode": "hybridspec", "assistant_model": drafter}
    for _ in range(3):
        try:
            model.generate(input_ids=ids, streamer=Raises(), **options)
        except KeyError:
            assert torch.equal(model.generate(input_ids=ids, **options), want)


def test_inference_mode_and_then_without():
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")
    want = plain(model, ids, 20)
    with torch.inference_mode():
        assert torch.equal(generate(model, drafter, ids, 20).sequences, want)
    assert torch.equal(generate(model, drafter, ids, 20).sequences, want)
    assert torch.equal(generate(model, None, ids, 20).sequences, want)


def test_hooked_modules_run_as_modules_and_say_so():
    model, drafter = pair()
    ids = torch.randint(1, 90, (1, 6), device="cuda")
    doubled = copy.deepcopy(model)
    layer = doubled.model.layers[1].mlp.shared_expert.down_proj
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.warns(UserWarning, match=r"one by one, without graphs: layers.1.mlp.shared_expert.down_proj"):
        out = generate(doubled, drafter, ids, 20, policy="full")
    assert torch.equal(out.sequences, plain(doubled, ids, 20)) and out.report.launches == "modules"
