"""What every test runs under: one thread, a fixed seed, uninitialised memory that shows; the gpu tier."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

# kernels run in Triton's interpreter where there is no GPU; Triton reads this when the kernels are defined
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# no test reads or writes the user's cache of latency curves: each measures its own
os.environ["HYBRIDSPEC_CACHE"] = "off"

OUR_PACKAGES = ("hybridspec_hf", "hybridspec_generation", "hybridspec_kernels")

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu tier on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers, alone or in a suite."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    """fp32 means fp32: on a GPU, cuDNN's convolutions default to TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what our own packages allocate uninitialised with NaN: reading it before writing it fails a test."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))
    yield


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _poison(tensor) if caller.split(".")[0] in OUR_PACKAGES else tensor

    return allocate_poisoned


def _poison(tensor: Tensor) -> Tensor:
    if tensor.is_meta or tensor.dtype == torch.bool:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        # no token id, index or length: an index of this size raises, and a loop that long times out
        return tensor.fill_(torch.iinfo(tensor.dtype).max)
