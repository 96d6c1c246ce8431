"""What a user installs: one import name, every file once, nothing large, the sdist complete."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ROOMS = ("medusa_heads", "training", "inference")  # the folders that hold installed modules
MAX_FILE_BYTES = 200_000


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # Else pip finds what lies on that path installed already.
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, env=elsewhere, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing behind in the repository."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "tests/test_files.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for room in ROOMS:
        shutil.copytree(
            ROOT / room,
            folder / room,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel that `python -m build` makes from the sdist it made before."""
    run(sys.executable, "-m", "build", "--no-isolation", source)
    (path,) = (source / "dist").glob("*.whl")
    return path


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def expected_modules() -> list[str]:
    """Wheel paths of all modules in the repository, each from the one folder it lives in."""
    modules = []
    for room in ROOMS:
        prefix = "" if room == "medusa_heads" else "medusa_heads/"
        for path in (ROOT / room).rglob("*.py"):
            relative = path.relative_to(ROOT)
            if relative.parts[:2] not in (
                ("medusa_heads", "training"),
                ("medusa_heads", "inference"),
            ):
                modules.append(prefix + relative.as_posix())
    return sorted(modules)


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    modules = [name for name in names(wheel) if name.endswith(".py")]
    assert modules == expected_modules()
    assert "medusa_heads/training/__init__.py" in modules
    assert "medusa_heads/inference/drafters/__init__.py" in modules


def test_wheel_is_typed_licensed_and_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert "medusa_heads/py.typed" in sizes
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in sizes)
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES} == {}


def test_sdist_holds_no_part_of_the_tests(wheel: Path) -> None:
    """setuptools adds `tests/test*.py`, without the folders and the conftest.py that they need."""
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if name.count("/") > 1}
    assert folders == {*ROOMS, "medusa_heads.egg-info"}


@pytest.mark.slow
def test_wheel_from_the_tree_equals_wheel_from_the_sdist(source: Path, wheel: Path) -> None:
    folder = source / "direct"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, source)
    (direct,) = folder.glob("*.whl")
    assert names(direct) == names(wheel)


@pytest.mark.slow
def test_installed_wheel_adds_one_import_name(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    before = {path.name for path in site_packages.iterdir()}
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    # Uncompiled: but for a few, no module is imported there.
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    added = {path.name for path in site_packages.iterdir()} - before
    (metadata,) = (name for name in added if name.endswith(".dist-info"))
    assert added == {"medusa_heads", metadata}
    assert (site_packages / metadata / "top_level.txt").read_text().split() == ["medusa_heads"]

    record = (site_packages / metadata / "RECORD").read_text().splitlines()
    files = [line.split(",")[0] for line in record]
    assert len(files) == len(set(files))
    assert {name.split("/")[0] for name in files} == {"..", "medusa_heads", metadata}
    scripts = {name for name in files if name.startswith("..")}
    assert scripts == {
        f"../../../bin/{name}" for name in ("medusa-heads", "train-draft", "train-heads")
    }

    statement = (
        "import medusa_heads.training, medusa_heads.inference.drafters as d; print(d.__file__)"
    )
    where = run(python, "-I", "-c", statement, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(site_packages)


def test_the_lowest_allowed_versions_are_those_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = project.partition("\ndependencies = [")[2].partition("\n]")[0]
    floors = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', needed))
    lowest = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", lowest, re.MULTILINE))
    assert len(floors) > 10
    for name, floor in floors.items():
        # 2.9 and 2.9.0 are one version.
        assert Version(pinned[name]) == Version(floor), name


@pytest.mark.parametrize("constraints", ["constraints.txt", "constraints-lowest.txt"])
def test_what_make_installs_can_be_had_with_the_lowest_python(constraints: str) -> None:
    """A pin of a version that has left that Python behind is for later ones alone."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (lowest,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    lines = (ROOT / constraints).read_text(encoding="utf-8").splitlines()
    pins = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    there = [
        pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": lowest})
    ]
    wanted = {}
    for pin in there:
        with suppress(PackageNotFoundError):
            about = metadata(pin.name)
            if about["Version"] in pin.specifier:
                wanted[pin.name] = SpecifierSet(about["Requires-Python"] or "")
    assert len(wanted) > 5
    assert [name for name, pythons in wanted.items() if lowest not in pythons] == []
