"""What must be true of a machine before a device can be there, and the words for what is not.

A requirement is checked against a `Machine`, which is plain data: so machines that nobody here has can be tested.
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

_SYSTEM_NAMES = {"Darwin": "macOS"}
_BUILD_NAMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


@dataclass(frozen=True, kw_only=True)
class Requirement(Claim, ABC):
    """One thing that a device needs of its machine."""

    hint: str
    """How to meet it, with the command where there is one."""

    @property
    @abstractmethod
    def requires(self) -> str:
        """The requirement in a few words: `torch>=2.6`."""

    @abstractmethod
    def unmet(self, machine: Machine) -> str | None:
        """Why the machine does not meet it: `it needs macOS, and this is Linux`; None if it does."""

    def advice(self, machine: Machine) -> str | None:
        """What the machine has that works but is not recommended; None if all is well."""
        return None


@dataclass(frozen=True, kw_only=True)
class SystemIs(Requirement):
    """The operating system."""

    systems: tuple[str, ...]
    """As `platform.system()` says it: `("Linux", "Windows")`."""

    @property
    def requires(self) -> str:
        return " or ".join(_SYSTEM_NAMES.get(system, system) for system in self.systems)

    def unmet(self, machine: Machine) -> str | None:
        if machine.system in self.systems:
            return None
        return f"it needs {self.wants}, and this is {_SYSTEM_NAMES.get(machine.system, machine.system)}"


@dataclass(frozen=True, kw_only=True)
class ArchitectureIs(Requirement):
    """The architecture that Python itself runs as, which under translation is not the machine's."""

    architectures: tuple[str, ...]

    @property
    def requires(self) -> str:
        return f"a Python for {' or '.join(self.architectures)}"

    def unmet(self, machine: Machine) -> str | None:
        if machine.architecture in self.architectures:
            return None
        translated = " and runs translated (Rosetta)" if machine.translated else ""
        return f"it needs {self.wants}, and this one is for {machine.architecture}{translated}"


@dataclass(frozen=True, kw_only=True)
class VersionIs(Requirement):
    """The version of a package, of Python or of the system."""

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
            return f"it needs {self.wants}, and none is installed"
        version = read_version(text)
        if version is not None and SpecifierSet(self.wanted).contains(version, prereleases=True):
            return None
        return f"it needs {self.wants}, and this is {text}"

    def advice(self, machine: Machine) -> str | None:
        version = read_version(machine.versions.get(self.subject))
        if not self.recommended or version is None or SpecifierSet(self.recommended).contains(version):
            return None
        return f"{self.subject} {self.recommended} is recommended, and this is {version}"


@dataclass(frozen=True, kw_only=True)
class ModuleFound(Requirement):
    """A Python module of the vendor's that can be found."""

    module: str

    @property
    def requires(self) -> str:
        return f"the module {self.module}"

    def unmet(self, machine: Machine) -> str | None:
        if self.module in machine.modules:
            return None
        return f"{self.wants} is not installed"


@dataclass(frozen=True, kw_only=True)
class BuiltFor(Requirement):
    """A torch that was built for the device."""

    builds: tuple[str, ...]
    """Keys of `torch.version`, one of which must be set: `("cuda", "hip")`."""

    @property
    def requires(self) -> str:
        return f"a torch built for {' or '.join(_BUILD_NAMES.get(build, build) for build in self.builds)}"

    def unmet(self, machine: Machine) -> str | None:
        if any(machine.torch_builds.get(build) for build in self.builds):
            return None
        torch = machine.versions.get("torch")
        return f"it needs {self.wants}, and {f'this is {torch}' if torch else 'none is installed'}"
