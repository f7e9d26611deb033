"""Compile every kernel of the rounds of a true-size pair for a GPU that need not be there; run as a program.

Launches go as always, on meta tensors, but Triton is told of a device of the given capability and runs nothing. Prints
a JSON line a kernel: its name, its warps and the bytes of shared memory that a program of it takes.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from hybridspec_generation import RoundState
from hybridspec_generation.cache import TargetCache
from hybridspec_generation.policies import FixedLength
from hybridspec_generation.round import Round, run_round, verify
from hybridspec_generation.tables import SelectionTables
from hybridspec_hf.bench.decode_shapes import FAMILIES, SHAPES, drafter_config, shortened, target_config
from hybridspec_hf.bench.decode_traces import load_acceptance
from hybridspec_hf.bench.example_cost import example_cost
from hybridspec_hf.calibration.tables import default_tables, fit_experts
from hybridspec_hf.drafters.block import DraftContext
from hybridspec_hf.drafters.dflash import DFlashDrafter
from hybridspec_hf.drafters.kernel_drafter import KernelDrafter
from hybridspec_hf.lengths import ADAPTIVE
from hybridspec_hf.models import base, split_target
from hybridspec_hf.models.kernel_target import KernelTarget
from hybridspec_kernels import compile_only, triton_support

LAYERS, CAPACITY, LENGTHS = 8, 4096, (2, 5, 16)
META = torch.device("meta")


class NoDevice:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(capability: int) -> None:
    """Let our kernels be launched on meta tensors, as for a GPU of this capability."""
    triton.runtime.driver.set_active(NoDevice(capability))
    for module in [module for name, module in sys.modules.items() if name.startswith("hybridspec_")]:
        if hasattr(module, "has_kernels"):
            module.has_kernels = lambda device: True
    base.check_one_device = lambda model: None
    triton_support.has_programmatic_launch = lambda device: capability >= 90


def rounds(shape: str, dtype: torch.dtype) -> None:
    """Every policy's round, and a verification of each of `LENGTHS`."""
    sizes = shortened(SHAPES[shape], LAYERS)
    with META:
        model = FAMILIES[sizes.family][0](target_config(sizes)).to(dtype).eval()
        drafter = DFlashDrafter(drafter_config(sizes)).to(dtype).eval()
    layers = tuple(drafter.config.target_layer_ids)
    for block in (16, 1):
        target = split_target(model, layers if block > 1 else ())
        cache = TargetCache(target.cache_shape, capacity=CAPACITY, block=block)
        cache.clear_rejected = False
        bound = None
        if block > 1:
            context = DraftContext.allocate(drafter, CAPACITY)
            bound = KernelDrafter(drafter, target.embed_tokens, target.lm_head, context)
        state = RoundState(
            block=block, hidden_size=target.hidden_size, top_k=target.top_k,
            feature_size=len(target.feature_layers) * target.hidden_size, dtype=dtype, device=META,
        )  # fmt: skip
        whole = partial(call_with, block)
        r = Round(KernelTarget(target, cache), bound, cache, state, FixedLength(block), whole)
        run_round(r)
        for w in LENGTHS if block > 1 else ():
            verify(r, w)
    experts = fit_experts(default_tables()[1], 16, target.top_k, target.num_moe_layers)
    tables = SelectionTables.build(load_acceptance(), example_cost(), experts, 1000.0, META)
    big = RoundState(block=16, hidden_size=8, top_k=target.top_k, feature_size=8, dtype=dtype, device=META)
    # without a router in Layer 0 there is nothing to correct
    for policy in [kind(tables) for name, kind in ADAPTIVE.items() if target.top_k or name != "hybridspec"]:
        policy.select(big)
        policy.correct(big)


def call_with(w: int, length: Tensor, body: Callable[[int], None]) -> None:
    """A round's switch that knows the length."""
    body(w)


def main() -> None:
    """Arguments: a shape of `bench_decode.py`, and a capability such as 86."""
    shape, capability = sys.argv[1], int(sys.argv[2])
    pretend(capability)
    compiled: list[Any] = []
    with torch.no_grad(), ThreadPoolExecutor(2) as executor, compile_only(executor):
        run = triton.runtime.jit.JITFunction.run

        def recorded(self: Any, *args: Any, **options: Any) -> Any:
            kernel = run(self, *args, **options)
            compiled.append((self.__name__, kernel))
            return kernel

        triton.runtime.jit.JITFunction.run = recorded
        rounds(shape, torch.bfloat16)
    # compiled by the executor, or known already
    kernels = [(name, kernel.result() if hasattr(kernel, "result") else kernel) for name, kernel in compiled]
    seen = {(name, kernel.hash): kernel.metadata for name, kernel in kernels}
    for (name, _), metadata in sorted(seen.items()):
        print(json.dumps({"kernel": name, "warps": metadata.num_warps, "shared": metadata.shared}))


if __name__ == "__main__":
    main()
