"""This process -> what a stored number needs to be understood later: command line, commit, GPU and versions."""

import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Command line, commit, machine and versions as JSON types; None for what this machine lacks."""
    return {
        "argv": sys.argv[1:],
        "commit": commit(),
        "machine": platform.machine(),
        **gpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: installed(name) for name in ("triton", "transformers", "sglang", "flash-linear-attention")},
    }


def describe() -> str:
    """One line for people: the hardware and the versions that decide a kernel's speed."""
    facts = provenance()
    where = f"{facts['gpu']} ({facts['gpu_processors']} processors), driver {facts['driver']}" if facts["gpu"] else (
        f"no GPU, {facts['machine']} CPU"
    )  # fmt: skip
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "cuda", "python"))
    return f"{where}; {versions}; commit {facts['commit']}"


def gpu() -> dict[str, Any]:
    """Name, number of multiprocessors, compute capability and driver version of the current GPU."""
    if not torch.cuda.is_available():
        return {"gpu": None, "gpu_processors": None, "gpu_capability": None, "driver": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{properties.major}.{properties.minor}"
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": properties.name,
        "gpu_processors": properties.multi_processor_count,
        "gpu_capability": capability,
        "driver": driver.splitlines()[0] if driver else None,
    }


def commit() -> str | None:
    """The checkout's commit, with `+changes` if files differ from it; None outside a git checkout."""
    folder = str(Path(__file__).parent)
    sha = output("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    changed = output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{sha}+changes" if sha and changed else sha


def installed(name: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def output(program: str, *arguments: str) -> str | None:
    """What a program prints; None if it is missing or fails."""
    if shutil.which(program) is None:
        return None
    result = subprocess.run([program, *arguments], capture_output=True, text=True)
    return result.stdout.strip() or None if result.returncode == 0 else None
