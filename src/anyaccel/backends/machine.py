"""A description of a machine (system, versions, modules), used to determine device availability."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anyaccel.backends.requirement import ModuleFound
from anyaccel.backends.sheet import Sheet

__all__ = ["REPORTED_PACKAGES", "Machine", "read_machine"]

REPORTED_PACKAGES = (
    "anyaccel",
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "pillow",
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of a machine that a process can read without initializing a device."""

    system: str
    """The value of `platform.system()`: `Linux`, `Darwin`, `Windows`."""
    architecture: str
    """The architecture of the Python interpreter: `arm64`, `x86_64`, `aarch64`."""
    translated: bool = False
    """Whether Python runs under Rosetta, so the architecture of the machine differs."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions by name: `python`, `macos` (on macOS) and the installed packages."""
    torch_builds: Mapping[str, str] = field(default_factory=dict)
    """The platforms of the torch build with their versions: `{"cuda": "13.0"}`."""
    modules: frozenset[str] = frozenset()
    """The vendors' Python modules that are installed."""
    device_files: Mapping[str, int] = field(default_factory=dict)
    """The number of files that match each device file pattern: `{"/dev/neuron*": 16}`."""


def read_machine(sheets: Iterable[Sheet]) -> Machine:
    """Read the properties of this machine, without importing torch or initializing a device."""
    sheets = tuple(sheets)
    vendor_modules = {
        requirement.module
        for sheet in sheets
        for requirement in sheet.requirements
        if isinstance(requirement, ModuleFound)
    }
    patterns = {(pattern, sheet.pci_vendor) for sheet in sheets for pattern in sheet.device_files}
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        translated=_is_translated(),
        versions=_read_versions(),
        torch_builds=_read_torch_builds(),
        modules=frozenset(module for module in vendor_modules if _can_find(module)),
        device_files={pattern: _count_files(pattern, vendor) for pattern, vendor in sorted(patterns)},
    )


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    macos = platform.mac_ver()[0]
    if macos:
        versions["macos"] = macos
    # From package metadata: reading torch.__version__ would import torch.
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _read_torch_builds() -> dict[str, str]:
    """Return the platforms that torch was built for with their versions, such as `{"cuda": "13.0"}`."""
    # From version.py without importing torch, which takes seconds.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return {}
    builds = re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_file.read_text(), re.MULTILINE)
    return dict(builds)


def _count_files(pattern: str, vendor: str) -> int:
    """Return the number of device files that match a glob pattern.

    If `vendor` is set, count only devices with this PCI vendor ID.
    """
    names = [Path(path).name for path in glob.glob(pattern)]
    if not vendor:
        return len(names)
    # /dev/accel and /dev/dri are shared by several vendors.
    ids = [path for name in names for path in glob.glob(f"/sys/class/*/{name}/device/vendor")]
    return sum(Path(path).read_text().strip() == vendor for path in ids)


def _can_find(module: str) -> bool:
    """Return whether a module is installed, without importing it or its parent packages."""
    if module in sys.modules:
        return True
    # importlib.util.find_spec imports parent packages, and a vendor's package may raise or initialize a device.
    parts, search_path = module.split("."), None
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), search_path)
        if spec is None:
            return False
        search_path = spec.submodule_search_locations
    return True


def _is_translated() -> bool:
    """Return whether this Python is an x86_64 build that runs under Rosetta on Apple silicon.

    MPS is not available under Rosetta.
    """
    if platform.system() != "Darwin" or platform.machine() != "x86_64":
        return False
    process = subprocess.run(["sysctl", "-n", "sysctl.proc_translated"], capture_output=True, text=True, check=False)
    return process.stdout.strip() == "1"
