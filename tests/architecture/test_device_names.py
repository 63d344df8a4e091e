"""Nothing outside `backends/` decides by a device's name: code asks a sheet for a capability."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ALL_SHEETS, SOURCE

NAMES = {name for sheet in ALL_SHEETS for name in (sheet.name, sheet.torch_name)}

# The files that may write `cpu`, and no other name, as more than an argument, each with the reason.
EXCEPTIONS: dict[str, str] = {
    "cluster/ray_cluster.py": "CPU is the name of a resource of Ray's",
    "emulator/collectives.py": "gloo is registered for tensors of the CPU too",
    "emulator/device_patches.py": "safetensors reads to the CPU, by a string, for a virtual device",
    "runtime/distributed/parallel.py": "torch.distributed has one string for the backends of CPU and device",
}


ASKING = {"hasattr", "getattr", "dict", "frozenset", "set", "tuple", "list"}
"""Functions whose argument is looked at: a device's name in one of them decides something."""
LOOKING_UP = {"startswith", "endswith", "get", "fullmatch", "match", "search", "count", "index", "pop"}
TELLING = {f"is_{name}" for name in NAMES} | {"hip"}
"""Attributes of torch's that tell one device from the others."""


def is_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return any(part.split(":")[0].lower() in NAMES for part in node.value.split("|"))


def is_harmless(parent: ast.AST | None, node: ast.AST) -> bool:
    """Whether a name is only handed on: `virtual("neuron")`, a default, or the value of a pair."""
    if isinstance(parent, ast.Call):
        called = parent.func.attr if isinstance(parent.func, ast.Attribute) else getattr(parent.func, "id", "")
        return called not in ASKING | LOOKING_UP
    if isinstance(parent, ast.keyword | ast.arguments):
        return True
    return isinstance(parent, ast.Dict) and node in parent.values


def decisions(tree: ast.AST) -> Iterator[ast.AST]:
    """The places where a device's name, or a question that only one device answers, decides."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if (is_name(node) and not is_harmless(parents.get(node), node)) or (
            isinstance(node, ast.Attribute) and node.attr in TELLING
        ):
            yield node
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict":
            yield from (word for word in node.keywords if word.arg in NAMES)


def files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "backends"]


def test_no_file_decides_by_a_name() -> None:
    found = {
        str(path.relative_to(SOURCE)): [ast.unparse(node) for node in decisions(ast.parse(path.read_text()))]
        for path in files()
    }
    assert [name for name in EXCEPTIONS if not found[name]] == [], "they decide by no name any more: drop the exception"
    offenders = {name: rest for name, codes in found.items() if (rest := leave_out_allowed(name, codes))}
    assert offenders == {}, "ask the sheet for a capability instead"


def leave_out_allowed(name: str, codes: list[str]) -> list[str]:
    """The decisions of a file that no exception allows."""
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
def test_the_check_itself_finds_decisions(code: str) -> None:
    assert list(decisions(ast.parse(code)))


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
def test_the_check_leaves_other_code_alone(code: str) -> None:
    assert not list(decisions(ast.parse(code)))
