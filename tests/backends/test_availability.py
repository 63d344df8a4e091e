"""Availability of devices, on simulated machines."""

import importlib.machinery
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from anyaccel.backends import machine as machine_module
from anyaccel.backends.availability import Device, check_availability, make_broken_device
from anyaccel.backends.machine import Machine, read_machine
from anyaccel.backends.registry import Backend, BrokenPlugin, build_registry
from anyaccel.backends.sheet import Sheet
from tests.conftest import ALL_SHEETS

REGISTRY = build_registry([])

LINUX = Machine(system="Linux", architecture="x86_64", versions={"python": "3.12.4", "torch": "2.13.0"})
MAC = Machine(system="Darwin", architecture="arm64", versions={"python": "3.12.4", "torch": "2.13.0", "macos": "15.1"})


def on_mac(versions: dict[str, str]) -> Machine:
    return replace(MAC, versions={**MAC.versions, **versions})


def check(name: str, machine: Machine, seen: tuple[str, ...] | str = ()) -> Device:
    return check_availability(REGISTRY.backend(name).sheet_on(machine), machine, seen)


def test_mac_has_mps() -> None:
    device = check("mps", MAC, ("Apple M4",))
    assert device.available
    assert (device.reason, device.hint, device.count) == ("found: 1 × Apple M4", "", 1)


def test_old_macos_is_available_with_a_recommendation() -> None:
    device = check("mps", on_mac({"macos": "12.7"}), ("Apple M1",))
    assert device.available
    assert device.hint == "macos >=13.0 is recommended, not 12.7"


@pytest.mark.parametrize(
    ("machine", "reason", "hint"),
    [
        (LINUX, "requires macOS, not Linux", "Apple silicon"),
        (
            on_mac({"macos": "12.4"}),
            "requires macos >=12.6, not 12.4",
            "update macOS",
        ),
        (
            replace(MAC, architecture="x86_64"),
            "requires Python for arm64, not x86_64",
            "install an arm64 Python",
        ),
        (
            replace(MAC, architecture="x86_64", translated=True),
            "requires Python for arm64, not x86_64 under Rosetta",
            "install an arm64 Python",
        ),
        (
            on_mac({"torch": "1.12.1"}),
            "requires torch >=1.13, not 1.12.1",
            "pip install --upgrade torch",
        ),
        (MAC, "the required software is installed but finds no device", "https://docs.pytorch.org"),
    ],
)
def test_reason_why_mps_is_unavailable(machine: Machine, reason: str, hint: str) -> None:
    device = check("mps", machine)
    assert not device.available
    assert device.reason == reason
    assert hint in device.hint


def test_all_unmet_requirements_are_reported_together() -> None:
    device = check("neuron", replace(LINUX, versions={"python": "3.11.7", "torch": "2.13.0"}))
    assert "requires python >=3.12,<3.15, not 3.11.7; the module torch_neuronx is not installed" in (device.reason)
    assert "use Python 3.12" in device.hint
    assert "torch-neuronx" in device.hint


def test_missing_software_is_distinguished_from_missing_hardware() -> None:
    bare = check("hpu", LINUX)
    assert bare.reason.endswith("no hardware was detected (/dev/accel/accel[0-9]*)")
    card = check("hpu", replace(LINUX, device_files={"/dev/accel/accel[0-9]*": 8}))
    assert card.reason.endswith("; the hardware is present (/dev/accel/accel[0-9]*)")
    assert "habanalabs-installer.sh" in card.hint


def test_error_of_failing_software_is_quoted() -> None:
    machine = replace(LINUX, modules=frozenset({"torch_npu"}))
    device = check("npu", machine, "ImportError: libhccl.so: cannot open shared object file")
    assert device.reason == (
        "the required software is installed but raises an error: "
        "ImportError: libhccl.so: cannot open shared object file"
    )
    assert not device.available


def test_hint_names_the_variable_that_may_hide_devices() -> None:
    device = check("npu", replace(LINUX, modules=frozenset({"torch_npu"})))
    assert "ASCEND_RT_VISIBLE_DEVICES" in device.hint


def test_server_with_eight_devices() -> None:
    device = check("hpu", replace(LINUX, modules=frozenset({"habana_frameworks.torch"})), ("GAUDI2",) * 8)
    assert device.available
    assert device.reason == "found: 8 × GAUDI2"
    assert device.count == 8


@pytest.mark.parametrize(("build", "name"), [("cuda", "cuda"), ("hip", "rocm")])
def test_rocm_is_selected_by_the_torch_build(build: str, name: str) -> None:
    machine = replace(LINUX, torch_builds={build: "7.0"})
    sheet = REGISTRY.backend("cuda").sheet_on(machine)
    assert sheet.name == name
    assert check_availability(sheet, machine, ("a card",)).available
    assert sheet.torch_name == "cuda"


def test_rocm_on_a_cuda_build_of_torch() -> None:
    machine = replace(LINUX, torch_builds={"cuda": "13.0"})
    (rocm,) = REGISTRY.backend("rocm").variants
    assert check_availability(rocm, machine, ()).reason.startswith("requires a torch build for ROCm, not 2.13.0")


def test_machine_without_torch() -> None:
    machine = Machine(system="Linux", architecture="x86_64", versions={"python": "3.12.4"})
    assert check("cpu", machine).reason == "requires torch >=2.6, which is not installed"
    assert "torch is not installed" in check("cuda", machine).reason


@pytest.mark.parametrize("sheet", ALL_SHEETS, ids=lambda sheet: sheet.name)
@pytest.mark.parametrize("machine", [LINUX, MAC, Machine(system="Windows", architecture="AMD64")])
def test_unavailable_device_has_a_reason_and_a_hint(machine: Machine, sheet: Sheet) -> None:
    device = check_availability(sheet, machine, ())
    assert not device.available
    assert device.reason
    assert device.hint


def test_broken_plugin_is_listed_with_its_error() -> None:
    device = make_broken_device(BrokenPlugin("quantum", "quantum-accel", "ImportError: no qubits"))
    assert not device.available
    assert "ImportError: no qubits" in device.reason
    assert "quantum-accel" in device.hint


def test_read_this_machine() -> None:
    machine = read_machine(ALL_SHEETS)
    assert machine.system in {"Linux", "Darwin", "Windows"}
    assert machine.versions["torch"]
    assert set(machine.device_files) == {pattern for sheet in ALL_SHEETS for pattern in sheet.device_files}


def test_first_sheet_is_the_default_without_a_matching_torch_build() -> None:
    backend = REGISTRY.backend("cuda")
    assert isinstance(backend, Backend)
    assert backend.sheet_on(LINUX) is backend.sheet


def test_finding_a_module_does_not_import_its_parent_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "habana_frameworks"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('broken')")
    (package / "torch" / "__init__.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "habana_frameworks.torch" in read_machine(ALL_SHEETS).modules


def test_device_files_are_counted_per_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/accel/accel0 may also be the NPU of a laptop."""

    def find(pattern: str) -> list[str]:
        if pattern.startswith("/sys/class/"):
            return [str(tmp_path / pattern.split("/")[-3])]
        return ["/dev/accel/accel0", "/dev/accel/accel1"]

    (tmp_path / "accel0").write_text("0x8086\n")
    (tmp_path / "accel1").write_text("0x1da3\n")
    monkeypatch.setattr("glob.glob", find)
    assert machine_module._count_files("/dev/accel/accel*", "0x1da3") == 1
    assert machine_module._count_files("/dev/accel/accel*", "") == 2


@pytest.mark.parametrize(
    ("system", "architecture", "answer", "translated"),
    [
        ("Darwin", "x86_64", "1", True),
        ("Darwin", "x86_64", "0", False),
        ("Darwin", "arm64", "1", False),
        ("Linux", "x86_64", "1", False),
    ],
)
def test_rosetta_is_distinguished_from_an_intel_mac(
    system: str, architecture: str, answer: str, translated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: architecture)
    completed = subprocess.CompletedProcess([], 0, stdout=f"{answer}\n")
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: completed)
    assert machine_module._is_translated() is translated


def test_torch_builds_are_read_without_running_version_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\nraise SystemExit(0)\ncuda_x = (\n"
    (tmp_path / "version.py").write_text(text)
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert machine_module._read_torch_builds() == {"cuda": "13.0"}
