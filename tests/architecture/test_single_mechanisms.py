"""One mechanism per job: functions that only one module or package may call."""

import ast
from pathlib import Path

from tests.conftest import SOURCE
from tests.source_trees import parse

GC_MODULE = Path("processes/gc_control.py")
STORAGE = Path("storage")
WRITES = {
    "os.link",
    "os.rename",
    "os.renames",
    "os.replace",
    "shutil.move",
    "tempfile.NamedTemporaryFile",
    "tempfile.mkstemp",
    "tempfile.mktemp",
}
ONE_ARGUMENT_RENAMES = {"rename", "replace"}
"""Methods of `Path`. `str.replace` takes two positional arguments, `date.replace` takes none."""


def find_calls(source: str) -> list[str]:
    """List calls as `module.function`, resolved through imports. A path that is renamed is listed as `Path.rename`."""
    tree = parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            imported.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            calls.append(imported.get(node.func.id, node.func.id))
        elif isinstance(node.func, ast.Attribute):
            owner = node.func.value
            module = imported.get(owner.id) if isinstance(owner, ast.Name) else None
            if module is not None:
                calls.append(f"{module}.{node.func.attr}")
            elif node.func.attr in ONE_ARGUMENT_RENAMES and len(node.args) == 1 and not node.keywords:
                calls.append(f"Path.{node.func.attr}")
    return calls


def is_write(call: str) -> bool:
    return call in WRITES or call.startswith("Path.")


def list_offenders() -> dict[str, list[str]]:
    """Return garbage collector calls and renames by file, except in the modules that own them."""
    offenders = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE)
        calls = find_calls(path.read_text())
        owned = [call for call in calls if call.startswith("gc.") and file != GC_MODULE]
        owned += [call for call in calls if is_write(call) and STORAGE not in file.parents]
        if owned:
            offenders[str(file)] = owned
    return offenders


def test_only_gc_control_calls_the_collector_and_only_storage_renames_files() -> None:
    assert list_offenders() == {}, "use processes/gc_control.py, or storage/atomic_write.py"


def test_commands_write_files_atomically() -> None:
    """An interrupted command must not leave a partial file."""
    offenders = [
        path.name
        for path in sorted((SOURCE / "cli").rglob("*.py"))
        for node in ast.walk(parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("write_text", "write_bytes")
    ]
    assert offenders == [], "use storage/atomic_write.py"


def test_check_finds_the_calls_of_the_owners() -> None:
    collector = find_calls((SOURCE / GC_MODULE).read_text())
    assert {"gc.disable", "gc.enable", "gc.freeze", "gc.collect"} <= set(collector)
    writes = find_calls((SOURCE / STORAGE / "atomic_write.py").read_text())
    assert {"os.replace", "os.link"} <= set(filter(is_write, writes))


def test_check_finds_every_form_of_a_call() -> None:
    source = """
import gc, gc as g, os
from gc import collect
from os import replace as swap
from tempfile import NamedTemporaryFile
from dataclasses import replace
gc.collect()
g.freeze()
collect()
swap(a, b)
os.rename(a, b)
NamedTemporaryFile(delete=False)
draft.replace(path)
Path("x").rename(path)
replace(plan, dtype=1)
"text".replace("a", "b")
date.replace(year=1)
"""
    calls = [call for call in find_calls(source) if call.startswith("gc.") or is_write(call)]
    assert sorted(calls) == [
        "Path.rename",
        "Path.replace",
        "gc.collect",
        "gc.collect",
        "gc.freeze",
        "os.rename",
        "os.replace",
        "tempfile.NamedTemporaryFile",
    ]
