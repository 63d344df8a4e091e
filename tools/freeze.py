"""Write constraints.txt with the exact versions of the current environment, in which the tests ran.

    .venv/bin/python tools/freeze.py

The pins apply to Python 3.11 and newer. Python 3.10 does not have all of these versions and gets the newest compatible
set. torch is pinned for every Python, because a newer build may depend on gigabytes of vendor libraries.
"""

from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

TARGET = Path(__file__).parent.parent / "constraints.txt"
HEADER = (
    "# The exact versions that the tests ran on, written by tools/freeze.py; pyproject.toml has the users' ranges.\n"
)
EXCLUDED = {"anyaccel", "pip"}
ALL_PYTHONS = {"torch"}


def pin(name: str, version: str) -> str:
    """Return a pin such as `numpy==2.4.6; python_version > "3.10"`, without the local version (`+cpu`)."""
    line = f"{name}=={Version(version).public}"
    return line if name in ALL_PYTHONS else f'{line}; python_version > "3.10"'


def main() -> None:
    """Write the pins of the environment that runs this script."""
    pins = {
        name: pin(name, distribution.version)
        for distribution in distributions()
        if (name := canonicalize_name(distribution.metadata["Name"])) not in EXCLUDED
    }
    TARGET.write_text(HEADER + "".join(f"{pins[name]}\n" for name in sorted(pins)))
    print(f"wrote {len(pins)} versions to {TARGET.name}")


if __name__ == "__main__":
    main()
