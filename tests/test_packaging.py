"""Tests that the wheel is pure Python and contains the .gin files and the embedded books."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import brt

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the sources.

    Files that earlier builds left in the repository cannot get into the wheel, and the build
    leaves no files there.
    """
    directory = tmp_path_factory.mktemp("wheel")
    for name in ("brt", "configs"):
        shutil.copytree(ROOT / name, directory / name)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir=dist"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, "."], cwd=directory, check=True)
    (file,) = (directory / "dist").iterdir()
    return file


@pytest.mark.slow  # Runs commands as processes; quick tests cover what the commands call.
def test_the_wheel_is_pure_python_of_this_version(wheel: Path) -> None:
    assert wheel.name == f"brt-{brt.__version__}-py3-none-any.whl"


def test_the_wheel_has_every_module_config_and_document(wheel: Path) -> None:
    expected = {
        str(file.relative_to(ROOT))
        for pattern in ("brt/**/*.py", "brt/data/corpora/**/*.*")
        for file in ROOT.glob(pattern)
    } | {f"brt/{file.relative_to(ROOT)}" for file in ROOT.glob("configs/**/*.gin")}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected - names == set()
    assert {name for name in names - expected if ".dist-info/" not in name} == set()


def test_configs_are_found_in_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "from brt.config_io import find_gin_file;"
        "print(find_gin_file('configs/base/paper.gin', asked=''))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(tmp_path / "site/brt/configs/base/paper.gin")


def test_every_dependency_is_bounded_on_both_sides(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"brt-{brt.__version__}.dist-info/METADATA").decode()
    requirements = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    assert len(requirements) > 15
    for requirement in requirements:
        assert ">=" in requirement and re.search("<[0-9]", requirement), requirement
