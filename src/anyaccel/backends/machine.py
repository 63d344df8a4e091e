"""The machine as plain data: what every "is it there, and if not why" is decided from."""

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
    """What a process can learn of its machine without touching a device."""

    system: str
    """As `platform.system()` says it: `Linux`, `Darwin`, `Windows`."""
    architecture: str
    """What Python itself runs as: `arm64`, `x86_64`, `aarch64`."""
    translated: bool = False
    """Whether Python runs under Rosetta, and the machine's own architecture is another."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions by name: `python`, `macos` (where it is one) and the installed packages."""
    torch_builds: Mapping[str, str] = field(default_factory=dict)
    """What torch was built for, with the version: `{"cuda": "13.0"}`."""
    modules: frozenset[str] = frozenset()
    """The vendors' modules that can be found."""
    device_files: Mapping[str, int] = field(default_factory=dict)
    """How many files match each of the sheets' patterns: `{"/dev/neuron*": 16}`."""


def read_machine(sheets: Iterable[Sheet]) -> Machine:
    """Look at this machine; imports no torch and touches no device."""
    sheets = tuple(sheets)
    vendor_modules = {need.module for sheet in sheets for need in sheet.requirements if isinstance(need, ModuleFound)}
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
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _read_torch_builds() -> dict[str, str]:
    """What torch was built for, from its version file alone: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return {}
    built_for = re.findall(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", version_file.read_text(), re.MULTILINE)
    return dict(built_for)


def _count_files(pattern: str, vendor: str) -> int:
    """How many files of a pattern there are; of one vendor, where the kernel uses the name for several."""
    names = [Path(path).name for path in glob.glob(pattern)]
    if not vendor:
        return len(names)
    ids = [path for name in names for path in glob.glob(f"/sys/class/*/{name}/device/vendor")]
    return sum(Path(path).read_text().strip() == vendor for path in ids)


def _can_find(module: str) -> bool:
    """Whether a module is installed, without importing anything of it: a parent package may do what it likes."""
    if module in sys.modules:
        return True
    parts, places = module.split("."), None
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), places)
        if spec is None:
            return False
        places = spec.submodule_search_locations
    return True


def _is_translated() -> bool:
    """Whether this is an Intel Python on Apple silicon, where Metal cannot be used."""
    if platform.system() != "Darwin" or platform.machine() != "x86_64":
        return False
    answer = subprocess.run(["sysctl", "-n", "sysctl.proc_translated"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() == "1"
