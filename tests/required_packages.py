"""An environment with the required dependencies of anyaccel only, as after `pip install anyaccel` without extras."""

from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["list_required", "write_customization"]

# Part of every environment that venv creates, or of no distribution of its own.
_ALWAYS = {"pip", "setuptools"}
# Python imports `sitecustomize` when it starts, in child processes as well. Other distributions are then not found, as
# if they were not installed: neither their modules nor their metadata.
_CUSTOMIZATION = """
import importlib.machinery
import re
import sys

REQUIRED = frozenset({required!r})
HIDDEN = frozenset({hidden!r})


class RequiredFinder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        for distribution in super().find_distributions(*args, **kwargs):
            if re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower() in REQUIRED:
                yield distribution


sys.meta_path[:] = [
    RequiredFinder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path
]
"""


def list_required(distribution: str) -> set[str]:
    """Return the canonical names of a distribution and of all distributions that it requires without extras."""
    found: set[str] = set()
    waiting: list[tuple[str, frozenset[str]]] = [(distribution, frozenset())]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        found.add(canonicalize_name(name))
        for text in requires(name) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            item = (requirement.name, frozenset(requirement.extras))
            if item not in seen:
                seen.add(item)
                waiting.append(item)
    return found


def write_customization(folder: Path) -> None:
    """Write a `sitecustomize.py` that hides everything that is not required. Put the folder on PYTHONPATH."""
    required = list_required("anyaccel") | _ALWAYS
    # Some modules, such as namespace packages, belong to several distributions.
    hidden = [
        module
        for module, owners in packages_distributions().items()
        if required.isdisjoint(canonicalize_name(owner) for owner in owners)
    ]
    (folder / "sitecustomize.py").write_text(_CUSTOMIZATION.format(required=sorted(required), hidden=sorted(hidden)))
