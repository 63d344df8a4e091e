"""Nothing outside `backends/` decides by a device's name: code asks a sheet for a capability.

`cpu` is free: it is the host.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ALL_SHEETS, SOURCE

NAMES = {name for sheet in ALL_SHEETS for name in (sheet.name, sheet.torch_name)} - {"cpu"}

# The files that may, each with the reason.
EXCEPTIONS: dict[str, str] = {}


def names_in(node: ast.AST | None) -> Iterator[ast.Constant]:
    """The device names that stand as strings in an expression, inside tuples, lists and sets too."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in NAMES:
        yield node
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for element in node.elts:
            yield from names_in(element)
    elif isinstance(node, ast.Call):  # frozenset({"mps"})
        for argument in node.args:
            yield from names_in(argument)


def operands(node: ast.AST) -> list[ast.expr | None]:
    """What a node decides by: comparisons, `match`, dictionary keys, look-ups, prefixes, sets to look in."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Dict | ast.MatchMapping):
        return [*node.keys]
    if isinstance(node, ast.Set):
        return [node]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    looks_up = {"startswith", "endswith", "get", "fullmatch", "match"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in looks_up:
        return [*node.args]
    return []


def decisions(tree: ast.AST) -> Iterator[ast.Constant]:
    """The places where a device's name decides."""
    for node in ast.walk(tree):
        for operand in operands(node):
            yield from names_in(operand)


def files() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] != "backends"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_decides_by_a_name(path: Path) -> None:
    found = [(node.lineno, node.value) for node in decisions(ast.parse(path.read_text()))]
    if str(path.relative_to(SOURCE)) not in EXCEPTIONS:
        assert found == [], "ask the sheet for a capability instead"


def test_every_exception_is_still_needed() -> None:
    for name in EXCEPTIONS:
        assert list(decisions(ast.parse((SOURCE / name).read_text()))), f"{name} decides by no name any more"


@pytest.mark.parametrize(
    "code",
    [
        'x = device.type == "mps"',
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
    ],
)
def test_the_check_itself_finds_decisions(code: str) -> None:
    assert list(decisions(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        'x = device.type == "cpu"',
        'virtual("neuron")',
        "x = sheet.rng_on_device",
        'place(pipe, "hpu")',
        'x = {"a": "mps"}',
    ],
)
def test_the_check_leaves_other_code_alone(code: str) -> None:
    assert not list(decisions(ast.parse(code)))
