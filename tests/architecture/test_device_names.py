"""Code outside `backends/` checks capabilities of a sheet, never device names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ALL_SHEETS, SOURCE
from tests.source_trees import parse

NAMES = {name for sheet in ALL_SHEETS for name in (sheet.name, sheet.torch_name)}

# Files that may compare with `cpu`, but with no other device name, and the reason.
EXCEPTIONS: dict[str, str] = {
    "cluster/ray_cluster.py": "CPU is the name of a Ray resource",
    "emulator/collectives.py": "gloo is also registered for CPU tensors",
    "emulator/predispatch_patches.py": "safetensors accepts a string, and loads to the CPU for a virtual device",
    "planning/options.py": "cpu is a value of the `scheduler` option",
    "runtime/call/run.py": "cpu is a value of the `scheduler` option",
    "runtime/distributed/parallel.py": "torch.distributed selects the CPU and device backends with one string",
}


INSPECTING = {"hasattr", "getattr", "dict", "frozenset", "set", "tuple", "list"}
"""Functions that inspect their argument: a device name as an argument is a decision."""
LOOKUPS = {"startswith", "endswith", "get", "fullmatch", "match", "search", "count", "index", "pop"}
DEVICE_ATTRIBUTES = {f"is_{name}" for name in NAMES} | {"hip"}
"""torch attributes that are specific to one device."""


def is_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return any(part.split(":")[0].lower() in NAMES for part in node.value.split("|"))


def is_harmless(parent: ast.AST | None, node: ast.AST) -> bool:
    """Return whether a name is only passed on: `virtual("neuron")`, a default, or a dict value."""
    if isinstance(parent, ast.Call):
        called = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
        return called not in INSPECTING | LOOKUPS
    if isinstance(parent, ast.keyword | ast.arguments):
        return True
    return isinstance(parent, ast.Dict) and node in parent.values


def find_decisions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes where a device name or a device-specific attribute decides something."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if (is_name(node) and not is_harmless(parents.get(node), node)) or (
            isinstance(node, ast.Attribute) and node.attr in DEVICE_ATTRIBUTES
        ):
            yield node
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            yield from (keyword for keyword in node.keywords if keyword.arg in NAMES)


def list_files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "backends"]


def test_no_code_decides_by_device_name() -> None:
    decisions = {
        str(path.relative_to(SOURCE)): [ast.unparse(node) for node in find_decisions(parse(path.read_text()))]
        for path in list_files()
    }
    assert [name for name in EXCEPTIONS if not decisions[name]] == [], "remove exceptions that are no longer needed"
    offenders = {name: left for name, codes in decisions.items() if (left := drop_allowed(name, codes))}
    assert offenders == {}, "check a capability of the sheet instead"


def drop_allowed(name: str, codes: list[str]) -> list[str]:
    """Return the decisions of a file that no exception allows."""
    return [code for code in codes if name not in EXCEPTIONS or not code.lower().startswith(("'cpu'", "'cpu:"))]


@pytest.mark.parametrize(
    "code",
    [
        'x = device.type == "mps"',
        'x = device.type == "cpu"',
        'x = "neuron" != device.type',
        'x = device.type in ("cpu", "hpu")',
        'x = kind not in {"npu"}',
        'x = str(device) == "cuda:0"',
        'match kind:\n    case "xpu":\n        pass',
        'match kind:\n    case "cpu" | "mlu":\n        pass',
        'table = {"mps": 1}',
        'x = table["hpu"]',
        'x = table.get("hpu")',
        'x = name.startswith("neuron")',
        'WITHOUT_FLOAT64 = frozenset({"mps", "npu"})',
        'x = kind in frozenset(["rocm"])',
        'OLD = ("mps", "npu")',
        'MPS = "mps"',
        "x = dict(mps=1)",
        'x = kind.upper() == "MPS"',
        'x = re.search("mps|npu", kind)',
        'x = hasattr(torch, "hpu")',
        "x = tensor.is_cuda",
        "x = torch.version.hip",
    ],
)
def test_check_finds_decisions(code: str) -> None:
    assert list(find_decisions(parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        'x = torch.device("cpu")',
        'def draw(device="cpu"): pass',
        'virtual("neuron")',
        "x = sheet.rng_on_device",
        'place(pipe, "hpu")',
        'x = {"a": "mps"}',
    ],
)
def test_check_ignores_other_code(code: str) -> None:
    assert not list(find_decisions(parse(code)))
