"""The example plugin, installed with pip: a new accelerator needs no change to anyaccel."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, inherit_environment


def install(folder: Path, target: Path) -> None:
    """Run `pip install FOLDER` into a separate directory, without network access."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(folder)],
        check=True,
        capture_output=True,
        timeout=300,
    )


def devices(site: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = inherit_environment()
    return subprocess.run(
        [sys.executable, "-m", "anyaccel", "devices", *arguments],
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the example, because building it writes files next to it."""
    folder = tmp_path_factory.mktemp("source") / "backend_plugin"
    shutil.copytree(ROOT / "examples" / "backend_plugin", folder)
    return folder


@pytest.fixture(scope="module")
def site(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    install(plugin, target)
    return target


def test_installed_plugin_is_listed_as_a_device(site: Path) -> None:
    rows = {row["name"]: row for row in json.loads(devices(site, "--json").stdout)}
    assert len(rows) == 9
    assert rows["abacus"] == {
        "name": "abacus",
        "title": "Abacus 9000",
        "available": False,
        "reason": "the module torch_abacus is not installed",
        "hint": "pip install torch-abacus, once somebody has written it",
        "count": 0,
        "names": [],
        "origin": "anyaccel-abacus",
        "virtual": False,
    }


def test_sheet_of_a_plugin_is_shown(site: Path) -> None:
    done = devices(site, "abacus")
    assert done.returncode == 0, done.stderr
    assert "Beads hold 32 bits." in done.stdout
    assert "https://example.com/abacus/manual" in done.stdout


def test_broken_plugin_is_listed_and_affects_no_other_device(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "anyaccel_abacus" / "__init__.py").write_text("raise RuntimeError('the beads are stuck')")
    done = devices(broken, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert "RuntimeError: the beads are stuck" in rows["abacus"]["reason"]
    assert rows["cpu"]["available"]
    named = devices(broken, "abacus")
    assert named.returncode == 3
    assert "the beads are stuck" in named.stderr
    assert "Traceback" not in named.stderr


def test_two_plugins_with_the_same_name_raise(site: Path, plugin: Path, tmp_path: Path) -> None:
    rival = tmp_path / "rival"
    shutil.copytree(plugin, rival)
    project = rival / "pyproject.toml"
    project.write_text(project.read_text().replace('name = "anyaccel-abacus"', 'name = "rival-abacus"'))
    both = tmp_path / "site"
    shutil.copytree(site, both)
    install(rival, both)
    done = devices(both)
    assert done.returncode == 3
    assert "2 plugins provide the device 'abacus'" in done.stderr
    assert "anyaccel-abacus" in done.stderr
    assert "rival-abacus" in done.stderr
    assert "pip uninstall" in done.stderr
    assert devices(both, "cpu").returncode == 0, "other names are not affected"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("BACKEND = 7", "anyaccel_abacus:BACKEND is a int, not an anyaccel.backends.Backend"),
        (
            "from dataclasses import replace\nfrom anyaccel.backends.devices.cpu import BACKEND as CPU\n"
            "BACKEND = replace(CPU, sheet=replace(CPU.sheet, name='My Device'))",
            "'My Device' is not a valid device name",
        ),
        (
            "from dataclasses import replace\nfrom anyaccel.backends.devices.cpu import BACKEND as CPU, CpuDriver\n"
            "class Many(CpuDriver):\n    def count(self): return -3\n"
            "BACKEND = replace(CPU, sheet=replace(CPU.sheet, name='abacus'), driver=Many)",
            "it reports -3 devices",
        ),
        (
            "from dataclasses import replace\nfrom anyaccel.backends.devices.cpu import BACKEND as CPU, CpuDriver\n"
            "class Loud(CpuDriver):\n    def count(self): print('hello'); raise OSError('no driver')\n"
            "BACKEND = replace(CPU, sheet=replace(CPU.sheet, name='abacus'), driver=Loud)",
            "OSError: no driver",
        ),
    ],
)
def test_misbehaving_plugin_affects_no_other_device(site: Path, tmp_path: Path, code: str, reason: str) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "anyaccel_abacus" / "__init__.py").write_text(code)
    done = devices(broken, "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert reason in rows["abacus"]["reason"]
    assert rows["cpu"]["available"]


def test_plugin_with_the_device_type_of_another_backend_keeps_its_own_sheet(site: Path, tmp_path: Path) -> None:
    other = tmp_path / "site"
    shutil.copytree(site, other)
    (other / "anyaccel_abacus" / "__init__.py").write_text(
        "from dataclasses import replace\nfrom anyaccel.backends.devices.cpu import BACKEND as CPU\n"
        "SHEET = replace(CPU.sheet, name='abacus', title='Abacus', device_type='cpu', preference=99)\n"
        "BACKEND = replace(CPU, sheet=SHEET)"
    )
    code = "import anyaccel; print(anyaccel.open_device('auto').sheet.title, [d.name for d in anyaccel.devices()][0])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(other), "ANYACCEL_DEVICE": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "Abacus abacus\n", done.stderr
