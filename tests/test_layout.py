"""The layout holds: three import packages, one wheel, knowledge flows one way, and one place for each fact."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybridspec_hf.versions import BELOW_TRANSFORMERS, MIN_TRANSFORMERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_ROOTS = [ROOT, ROOT / "generation", ROOT / "kernels" / "torch-ext"]

# a module of ours must not end up at one of these top-level names
FOREIGN_NAMES = {"kernels", "generation", "tests", "scripts", "examples", "custom_generate"}

PURE_IMPORT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
sys.path[:0] = {paths!r}

import importlib, pkgutil

package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
ours = {{name.split(".")[0] for name in sys.modules if name.startswith("hybridspec_")}}
assert ours <= {allowed!r}, ours
"""


def import_every_module(package: str, allowed: set[str], blocked: set[str]) -> subprocess.CompletedProcess[str]:
    """Import all modules of `package` in a fresh interpreter in which `blocked` top-level names do not exist."""
    code = PURE_IMPORT.format(
        package=package, allowed=allowed, blocked=blocked, paths=[str(path) for path in PACKAGE_ROOTS]
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; skips outside a git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def read_pyproject() -> dict:
    """pyproject.toml as a dictionary; skips on Python 3.10, which has no parser for it."""
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "folder",
    ["kernels", "kernels/torch-ext", "generation", "generation/custom_generate", "scripts", "examples", "tests"],
)
def test_root_folder_is_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"{folder}/__init__.py makes an importable package of that name, which shadows or overwrites another project's"
    )


def test_tests_folder_does_not_claim_kernels() -> None:
    # pytest would import a package tests/kernels as `kernels`
    assert not (ROOT / "tests" / "kernels").exists(), "call it tests/ops"


@pytest.mark.parametrize("name", ["kernels", "generation"])
def test_root_does_not_shadow_an_installed_package(name: str) -> None:
    spec = PathFinder.find_spec(name, [str(path) for path in PACKAGE_ROOTS])
    assert spec is None or spec.origin is None, f"`import {name}` from the repository root would run {spec.origin}"


def test_generation_imports_no_transformers() -> None:
    result = import_every_module(
        "hybridspec_generation", {"hybridspec_generation", "hybridspec_kernels"}, {"transformers", "accelerate"}
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("triton", ["with triton", "without triton"])
def test_kernels_import_torch_and_nothing_of_ours(triton: str) -> None:
    blocked = {"transformers", "accelerate"} | ({"triton"} if triton == "without triton" else set())
    result = import_every_module("hybridspec_kernels", {"hybridspec_kernels"}, blocked)
    assert result.returncode == 0, result.stderr


def test_transformers_range_is_the_packaged_one() -> None:
    requirements = [Requirement(line) for line in read_pyproject()["project"]["dependencies"]]
    packaged = next(requirement for requirement in requirements if requirement.name == "transformers")
    assert packaged.specifier == SpecifierSet(f">={MIN_TRANSFORMERS},<{BELOW_TRANSFORMERS}")


def test_no_path_of_a_developer_machine() -> None:
    absolute = re.compile(rb"(?:^|[\s\"'`(=:])/(?:work|root|home|Users)/[\w.]")
    text_files = [path for path in tracked_files() if path.suffix not in {".safetensors", ".png"}]
    hits = [path.relative_to(ROOT) for path in text_files if absolute.search(path.read_bytes())]
    assert not hits, f"paths of one machine in {[str(path) for path in hits]}"


def test_wheel_holds_three_packages_and_the_assets(tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools", minversion="77")
    assert setuptools
    source = tmp_path / "source"
    copy_sources(source)
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    result = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"hybridspec_hf", "hybridspec_generation", "hybridspec_kernels"}
    assert not packages & FOREIGN_NAMES
    assert expected_package_files() <= names


def copy_sources(destination: Path) -> None:
    """What a build needs, away from the checkout, so that it leaves no build/ or egg-info there."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for folder in ("hybridspec_hf", "generation", "kernels"):
        shutil.copytree(ROOT / folder, destination / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, destination / name)


def expected_package_files() -> set[str]:
    """Every file of the three packages in the checkout, by its path inside a wheel."""
    found = set()
    for root in PACKAGE_ROOTS:
        for package in root.glob("hybridspec_*"):
            files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
            found |= {path.relative_to(root).as_posix() for path in files}
    return {name for name in found if ".egg-info/" not in name}
