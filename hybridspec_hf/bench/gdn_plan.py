"""A device -> the float64 check that fits it, in parts that several processes can share, and its report."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm

from hybridspec_kernels.triton_support import INTERPRETED

from .gdn_check import Errors, Part, check_part, merge
from .gdn_inputs import SHAPES, shape_of

ALL = tuple(range(1, 17))
SOME = (1, 2, 3, 5, 8, 12, 16)
# enough numbers in a round of one token that the rounding to bf16 averages out
SMALL = {"layers": 2, "key_heads": 4, "value_heads": 8, "key_dim": 32, "value_dim": 128, "taps": 4}
# no power of two among the heads, unlike widths
ODD = {"layers": 2, "key_heads": 3, "value_heads": 6, "key_dim": 64, "value_dim": 32, "taps": 4}
# what Triton's interpreter gets through in seconds
TINY = {"layers": 2, "key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 16, "taps": 4}
SIXTEEN_BITS = ("bfloat16", "float16")
CHECKED = {
    "kernels": "the Triton kernels on the GPU, with the heads of the 35B and 122B shapes and odd ones",
    "references and interpreter": (
        "the PyTorch references, and the Triton kernels in Triton's interpreter at small sizes; the interpreter runs "
        "fp16 and fp32 inputs only: it truncates fp32 to bf16, which doubles the rounding error of a GPU"
    ),
    "references": "the PyTorch references only; the interpreter needs triton, TRITON_INTERPRET=1 and fp16 or fp32",
}


@dataclass(frozen=True)
class CheckReport:
    """Errors of all backends, and what was checked in words."""

    errors: list[Errors]
    checked: str

    @property
    def passed(self) -> bool:
        """Something was checked and no bound broke."""
        return bool(self.errors) and all(e.passed for e in self.errors)

    def worst(self, field: str, dtypes: Sequence[str]) -> float | None:
        """The largest error after two rounds over the dtypes; None if one is not finite or nothing was checked."""
        values = [e.to_dict()[field] for e in self.errors if e.dtype in dtypes and e.group == "rounds"]
        return None if None in values else max(values, default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "passed": self.passed,
            "checked": self.checked,
            "max_output_error": self.worst("output_error", SIXTEEN_BITS),
            "max_state_error": self.worst("state_error", SIXTEEN_BITS),
            "max_output_error_fp32": self.worst("output_error", ("float32",)),
            "max_state_error_fp32": self.worst("state_error", ("float32",)),
            "errors": [e.to_dict() for e in self.errors],
        }


def run_check(
    device: str,
    backends: Sequence[str],
    scopes: Sequence[str],
    *,
    lengths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    jobs: int = 1,
) -> CheckReport:
    """Check our backends against float64: on a GPU the kernels, on the CPU the references and interpreted kernels.

    Args:
        device: "cuda", or "cpu"; Triton interprets its kernels if TRITON_INTERPRET was 1 when it was imported.
        lengths, dtypes: only these of what the device's check covers (default: all of it).
        jobs: processes; on a GPU most of the time is spent compiling.
    """
    common: dict[str, Any] = {"backends": tuple(backends), "scopes": tuple(scopes)}
    if device == "cpu":
        parts = [*reference_parts(**common), *(interpreter_parts(**common) if INTERPRETED else ())]
    else:
        parts = list(gpu_parts(torch.device(device), **common))
    narrowed = [part if lengths is None else part.only(lengths) for part in parts]
    kept = [part for part in narrowed if part.lengths and (dtypes is None or part.dtype in dtypes)]
    interpreted = any(part.kernels for part in kept)
    what = "kernels" if device != "cpu" else "references and interpreter" if interpreted else "references"
    return CheckReport(merge(run_parts(kept, jobs)), CHECKED[what])


def reference_parts(**common: Any) -> Iterator[Part]:
    """PyTorch on the CPU."""
    shape = partial(shape_of, device=torch.device("cpu"))
    common["kernels"] = False
    yield Part(shape(SMALL, torch.bfloat16), ALL, **common)
    yield Part(shape(SMALL, torch.float16), SOME, every=False, **common)
    yield Part(shape(SMALL, torch.float32), ALL, every=False, **common)
    for dtype in (torch.bfloat16, torch.float32):
        yield Part(shape(SHAPES["35b"], dtype, layers=1), (16,), every=False, special=False, **common)


def interpreter_parts(backends: tuple[str, ...], **common: Any) -> Iterator[Part]:
    """The kernels in Triton's interpreter on the CPU; one that loops over the tokens is slow there."""
    blocks = tuple(name for name in backends if name != "recurrent")
    for dtype, special in ((torch.float16, False), (torch.float32, True)):
        shape = shape_of(TINY, dtype, torch.device("cpu"))
        options = {**common, "kernels": True, "every": False}
        if blocks:
            yield Part(shape, (1, 3, 8, 16), blocks, special=special, **options)
        if "recurrent" in backends:
            yield Part(shape, (1, 5), ("recurrent",), special=False, **options)


def gpu_parts(device: torch.device, **common: Any) -> Iterator[Part]:
    """The kernels on a GPU. They compile anew for each length: every part has lengths of its own."""
    shape = partial(shape_of, device=device)
    common["kernels"] = True
    for dtype, lengths in ((torch.bfloat16, ALL), (torch.float16, SOME), (torch.float32, SOME)):
        for pair in zip(lengths, lengths[::-1], strict=True):
            if pair[0] <= pair[1]:
                yield Part(shape(SHAPES["35b"], dtype, layers=3), tuple(sorted({*pair})), **common)
    yield Part(shape(SHAPES["122b"], torch.bfloat16, layers=2), (3, 16), every=False, **common)
    for dtype in (torch.bfloat16, torch.float32):
        yield Part(shape(ODD, dtype), (5, 16), every=False, **common)


def run_parts(parts: Sequence[Part], jobs: int) -> list[Errors]:
    """Check the parts, in processes of their own if there are several."""
    bar = partial(tqdm, total=len(parts), desc="check", unit="part")
    if jobs == 1:
        return [errors for part in bar(parts) for errors in check_part(part)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as workers:
        return [errors for found in bar(workers.map(check_part, parts)) for errors in found]
