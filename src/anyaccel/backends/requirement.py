"""Requirements that a machine must meet to use a device, with messages for unmet requirements.

They are checked against a `Machine` description, so tests can cover any machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from anyaccel.backends.claim import Claim, read_version

if TYPE_CHECKING:
    from anyaccel.backends.machine import Machine

__all__ = ["ArchitectureIs", "BuiltFor", "ModuleFound", "Requirement", "SystemIs", "VersionIs"]

# platform.system() returns the kernel name of macOS.
_SYSTEM_NAMES = {"Darwin": "macOS"}
# torch.version uses the toolkit name: `hip` for ROCm.
_BUILD_NAMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


@dataclass(frozen=True, kw_only=True)
class Requirement(Claim, ABC):
    """One requirement that a machine must meet to use a device."""

    hint: str
    """How to meet it, with a command if possible."""

    @property
    @abstractmethod
    def requires(self) -> str:
        """The requirement as text: `torch >=2.6`."""

    @abstractmethod
    def unmet(self, machine: Machine) -> str | None:
        """Return why a machine does not meet the requirement, or None if it does.

        An example is `requires macOS, not Linux`.
        """

    def advice(self, machine: Machine) -> str | None:
        """Return advice for a machine that meets the requirement, such as a newer version, or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class SystemIs(Requirement):
    """A requirement that the machine runs one of the given operating systems."""

    systems: tuple[str, ...]
    """Values of `platform.system()`: `("Linux", "Windows")`."""

    @property
    def requires(self) -> str:
        return " or ".join(_SYSTEM_NAMES.get(system, system) for system in self.systems)

    def unmet(self, machine: Machine) -> str | None:
        if machine.system in self.systems:
            return None
        return f"requires {self.requires}, not {_SYSTEM_NAMES.get(machine.system, machine.system)}"


@dataclass(frozen=True, kw_only=True)
class ArchitectureIs(Requirement):
    """A requirement on the architecture of the Python interpreter.

    Under Rosetta, it differs from the architecture of the machine.
    """

    architectures: tuple[str, ...]

    @property
    def requires(self) -> str:
        return f"Python for {' or '.join(self.architectures)}"

    def unmet(self, machine: Machine) -> str | None:
        if machine.architecture in self.architectures:
            return None
        # Under Rosetta, the Mac itself would support MPS, which is worth mentioning.
        translated = " under Rosetta" if machine.translated else ""
        return f"requires {self.requires}, not {machine.architecture}{translated}"


@dataclass(frozen=True, kw_only=True)
class VersionIs(Requirement):
    """A requirement on the version of Python, macOS or a package."""

    subject: str
    """A key of `Machine.versions`: `torch`, `macos`, `python`."""
    wanted: str
    """`>=12.6`."""
    recommended: str = ""
    """`>=13.0`."""

    @property
    def requires(self) -> str:
        return f"{self.subject} {self.wanted}"

    def unmet(self, machine: Machine) -> str | None:
        text = machine.versions.get(self.subject)
        if text is None:
            return f"requires {self.requires}, which is not installed"
        # A pre-release of the required version is accepted: nightlies have its features.
        version = read_version(text)
        if version is not None and SpecifierSet(self.wanted).contains(version, prereleases=True):
            return None
        return f"requires {self.requires}, not {text}"

    def advice(self, machine: Machine) -> str | None:
        version = read_version(machine.versions.get(self.subject))
        if not self.recommended or version is None or SpecifierSet(self.recommended).contains(version):
            return None
        return f"{self.subject} {self.recommended} is recommended, not {version}"


@dataclass(frozen=True, kw_only=True)
class ModuleFound(Requirement):
    """A requirement that the vendor's Python module is installed."""

    module: str

    @property
    def requires(self) -> str:
        return f"the module {self.module}"

    def unmet(self, machine: Machine) -> str | None:
        if self.module in machine.modules:
            return None
        return f"{self.requires} is not installed"


@dataclass(frozen=True, kw_only=True)
class BuiltFor(Requirement):
    """A requirement that torch is built for a certain platform, such as CUDA or ROCm."""

    builds: tuple[str, ...]
    """Attributes of `torch.version`, one of which must be set: `("cuda", "hip")`."""

    @property
    def requires(self) -> str:
        return f"a torch build for {' or '.join(_BUILD_NAMES.get(build, build) for build in self.builds)}"

    def unmet(self, machine: Machine) -> str | None:
        # ROCm builds set torch.version.hip, not torch.version.cuda, although the device type is cuda.
        if any(machine.torch_builds.get(build) for build in self.builds):
            return None
        torch = machine.versions.get("torch")
        return f"requires {self.requires}, {f'not {torch}' if torch else 'but torch is not installed'}"
