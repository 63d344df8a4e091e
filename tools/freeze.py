"""Write constraints.txt: the exact versions of the environment that the tests ran in.

    .venv/bin/python tools/freeze.py

The versions are for Python 3.11 and newer, which they were tried on; 3.10 cannot have them all, and takes the newest
set that goes together. torch is pinned for every Python, since a newer build may bring gigabytes of another vendor's.
"""

from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

TARGET = Path(__file__).parent.parent / "constraints.txt"
HEADER = (
    "# The exact versions that the tests ran on, written by tools/freeze.py; pyproject.toml has the users' ranges.\n"
)
NOT_OURS = {"anyaccel", "pip"}
EVERYWHERE = {"torch"}


def pin(name: str, version: str) -> str:
    """`numpy==2.4.6; python_version > "3.10"`; the local part of a version (`+cpu`) is left to the machine."""
    line = f"{name}=={Version(version).public}"
    return line if name in EVERYWHERE else f'{line}; python_version > "3.10"'


def main() -> None:
    """Freeze the environment that this runs in."""
    pins = {
        name: pin(name, found.version)
        for found in distributions()
        if (name := canonicalize_name(found.metadata["Name"])) not in NOT_OURS
    }
    TARGET.write_text(HEADER + "".join(f"{pins[name]}\n" for name in sorted(pins)))
    print(f"{len(pins)} versions in {TARGET.name}")


if __name__ == "__main__":
    main()
