"""The wheel and the sdist: their files and metadata, and an installed wheel that runs from an empty folder."""

import json
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT, SOURCE, inherit_environment

pytestmark = pytest.mark.long

VERSION = version("anyaccel")
DIST_INFO = f"anyaccel-{VERSION}.dist-info"
DATA_FILES = (
    "anyaccel/py.typed",
    "anyaccel/embedded/weights/model_index.json",
    "anyaccel/embedded/weights/unet/diffusion_pytorch_model.safetensors",
    "anyaccel/embedded/weights/vae/diffusion_pytorch_model.safetensors",
    "anyaccel/explanation/known_models/black-forest-labs/FLUX.1-schnell/model_index.json",
    "anyaccel/explanation/known_models/black-forest-labs/FLUX.1-schnell/weights.json",
    "anyaccel/server/http/page_files/index.html",
    "anyaccel/server/http/page_files/page.css",
    "anyaccel/server/http/page_files/page.js",
    "anyaccel/server/http/page_files/running.js",
)
NEEDED_BY_MAKE_CHECK = (
    ".ci/run", ".github/workflows/ci.yml", "AGENTS.md", "LICENSE", "Makefile", "README.md", "SECURITY.md",
    "benchmarks/__init__.py", "constraints.txt", "docs/index.md", "examples/quickstart.ipynb", "mkdocs.yml",
    "pyproject.toml", "tests/conftest.py", "tools/freeze.py", "training/__init__.py",
)  # fmt: skip

# Runs the command line and lists the anyaccel modules it loaded, to prove where they come from.
RUN_AND_LIST_MODULES = """
import atexit, json, runpy, sys
@atexit.register
def list_modules():
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "anyaccel"]
    print(json.dumps([module.__file__ for module in modules]), file=sys.stderr)
runpy.run_module("anyaccel", run_name="__main__", alter_sys=True)
"""


def build(project: Path, target: Path, *kinds: str) -> None:
    """Build with the installed backend: no network, no isolated environment."""
    flags = [flag for kind in kinds for flag in ("-t", kind)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *flags, "-d", str(target)],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"anyaccel-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    return dist / f"anyaccel-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into an empty folder."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return target


def run_installed(site: Path, cwd: Path, *arguments: str) -> tuple[str, list[str]]:
    """Return the output of the installed command, and the files of the anyaccel modules that it loaded."""
    environment = inherit_environment()
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST_MODULES, *arguments],
        env=environment | {"PYTHONPATH": str(site)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


def list_package_files() -> set[str]:
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(SOURCE.parent).as_posix() for path in files}


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{DIST_INFO}/METADATA").decode())


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if not name.startswith(f"{DIST_INFO}/")}
    assert package == list_package_files()
    assert set(DATA_FILES) <= package
    assert any(name.startswith("anyaccel/backends/verified/") and name.endswith(".json") for name in package)
    assert not [name for name in names if "tests" in Path(name).parts]
    assert f"{DIST_INFO}/licenses/LICENSE" in names


def test_the_wheels_metadata_is_complete(wheel: Path) -> None:
    metadata = read_metadata(wheel)
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (ROOT / "README.md").read_text().strip() in str(metadata.get_payload())
    assert {"serve", "ray", "test"} <= set(metadata.get_all("Provides-Extra", []))
    video = [name for name in metadata.get_all("Requires-Dist", []) if name.endswith("extra == 'video'")]
    assert any(name.startswith("ftfy") for name in video), "Wan's image-to-video pipelines fail without it"
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
    for section in ("[console_scripts]", "[pytest11]", "[torch.backends]"):
        assert section in entry_points


def test_the_sdist_has_what_the_check_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert set(NEEDED_BY_MAKE_CHECK) <= names
    assert {f"src/{name}" for name in list_package_files()} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_the_wheel_built_from_the_sdist_has_the_same_files(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / f"anyaccel-{VERSION}", tmp_path / "dist", "wheel")
    with zipfile.ZipFile(wheel) as direct, zipfile.ZipFile(tmp_path / "dist" / wheel.name) as rebuilt:
        assert {file.filename: file.CRC for file in rebuilt.infolist()} == {
            file.filename: file.CRC for file in direct.infolist()
        }


@pytest.mark.parametrize("arguments", [("--version",), ("devices", "--json")])
def test_the_installed_wheel_runs_from_its_own_files(site: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    printed, files = run_installed(site, tmp_path, *arguments)
    assert files
    assert [file for file in files if not Path(file).is_relative_to(site)] == []
    if arguments == ("--version",):
        assert printed.strip() == f"anyaccel {VERSION}"
    else:
        assert "cpu" in {row["name"] for row in json.loads(printed)}
