"""Write constraints.txt: the exact versions of the environment that the tests ran in.

    .venv/bin/python tools/freeze.py

A version that Python 3.10 cannot have is pinned for newer Pythons alone, so that 3.10 takes the newest that it can.
"""

from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

TARGET = Path(__file__).parent.parent / "constraints.txt"
HEADER = (
    "# The exact versions that the tests ran on, written by tools/freeze.py; pyproject.toml has the users' ranges.\n"
)
NOT_OURS = {"anyaccel", "pip"}
OLDEST = "3.10"


def pin(name: str, version: str, needs_python: str) -> str:
    """`numpy==2.4.6 ; python_version >= "3.11"`; the local part of a version (`+cpu`) is left to the machine."""
    line = f"{name}=={Version(version).public}"
    if SpecifierSet(needs_python).contains(f"{OLDEST}.99"):
        return line
    return str(Requirement(f'{line} ; python_version > "{OLDEST}"'))


def main() -> None:
    """Freeze the environment that this runs in."""
    pins = {
        name: pin(name, found.version, str(found.metadata.json.get("requires_python", "")))
        for found in distributions()
        if (name := canonicalize_name(found.metadata["Name"])) not in NOT_OURS
    }
    TARGET.write_text(HEADER + "".join(f"{pins[name]}\n" for name in sorted(pins)))
    print(f"{len(pins)} versions in {TARGET.name}")


if __name__ == "__main__":
    main()
