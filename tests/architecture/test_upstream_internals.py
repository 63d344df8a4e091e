"""Only `upstream/` uses private names of other libraries.

A private name has one leading underscore and is not defined in the same folder. Uses are attributes, `getattr`
and similar calls, lookups in `vars(…)`, and imports. Names with an entry in `upstream/` also count as strings.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from anyaccel.emulator.torch_patch_registry import PATCHES
from tests.conftest import SOURCE
from tests.source_trees import parse

ALLOWED = ("upstream/", "emulator/torch_patch_registry.py", "library_logging.py")
"""`library_logging.py` contains the texts of log messages that it drops; tests/upstream covers them."""
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}
PATCHED = {patch.name.removesuffix(".__init__") for patch in PATCHES}
PATH = re.compile(r"(torch|diffusers|transformers|accelerate)(\.\w+)*\._(?!_)\w+[\w.]*")
TEXTS = re.compile(
    r"\bcheck_inputs\b|\bf_locals\b|must be divisible by mesh size|should be kept in float32|experimental feature"
    r"|Graph break in user code|Loading pipeline components|It seems like some layers were not executed"
)
"""Private details without an underscore: a method, frame locals and message texts."""
DOCUMENTED = {"_exit", "_current_frames", "_getframe", "_fields"}
"""Documented names of the standard library: `os._exit`, `sys._getframe`, `_fields` of a named tuple, and others."""
OPERATORS = {"aten", "_ATEN", "torch.ops.aten"}
"""Attributes of these are ATen operators, which dispatch modes receive; `_to_copy` is an operator like `add`."""
EXCEPTIONS = {
    ("runtime/pipeline.py", "_execution_device"): "overrides a private method of diffusers",
    ("checking/pytest_plugin.py", "_pytest"): "pytest has no public name for its runner",
    ("backends/cuda_graphs.py", "_C"): "upstream/ imports backends/; tests/hardware covers it",
    ("backends/cuda_graphs.py", "_cuda_endAllocateToPool"): "upstream/ imports backends/; tests/hardware covers it",
    ("backends/cuda_graphs.py", "_cuda_releasePool"): "upstream/ imports backends/; tests/hardware covers it",
    ("backends/devices/mps.py", "_int_mm"): "the name of an ATen operator on a sheet",
    ("verification/probe_operations.py", "_int_mm"): "the name of an ATen operator on a sheet",
}
"""Allowed uses elsewhere, with the reason. An entry that is no longer needed is an error."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and re.match(r"_[^_]", name) is not None


@functools.cache
def list_trees() -> dict[str, ast.Module]:
    return {path.relative_to(SOURCE).as_posix(): parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def find_members(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes that the classes of a file define, in their bodies or by assigning to `self`."""
    for node in ast.walk(tree):
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                yield member.name
            elif isinstance(member, ast.Assign | ast.AnnAssign):
                targets = member.targets if isinstance(member, ast.Assign) else [member.target]
                yield from (item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@functools.cache
def list_members(folder: str) -> frozenset[str]:
    """Return the private attributes that the classes of a folder define."""
    names = {name for file, tree in list_trees().items() if get_folder(file) == folder for name in find_members(tree)}
    return frozenset(names - {name for _, name in EXCEPTIONS})


def get_folder(file: str) -> str:
    return file.rpartition("/")[0]


@functools.cache
def list_entries() -> frozenset[str]:
    """Return the private names of other libraries that `upstream/` uses."""
    trees = [tree for file, tree in list_trees().items() if file.startswith("upstream/")]
    own = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own |= {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names = {name for tree in trees for node in ast.walk(tree) for name in read_names(node)}
    return frozenset(names - own)


def read_names(node: ast.AST) -> Iterator[str]:
    """Yield the private names in a node, as an attribute or as a string."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        yield node.attr
    elif isinstance(node, ast.Constant) and is_private(node.value):
        yield str(node.value)


def find_private(tree: ast.AST, members: frozenset[str] = frozenset()) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that uses a private name of another library, and the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in members | DOCUMENTED and ast.unparse(node.value) not in OPERATORS:
                yield node, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node, name) for name in find_private_imports(node))
        elif isinstance(node, ast.Call | ast.Subscript):
            yield from ((node, name) for name in find_looked_up_names(node) if name not in members | DOCUMENTED)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_path = PATH.fullmatch(node.value) and node.value not in PATCHED
            if is_path or node.value in list_entries() or TEXTS.search(node.value):
                yield node, node.value
        elif isinstance(node, ast.Attribute) and TEXTS.fullmatch(node.attr):
            yield node, node.attr


def find_private_imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names] if not node.level else []
    for name in names:
        if not name.startswith(("anyaccel.", "__future__")):
            yield from (part for part in name.split(".") if is_private(part))


def find_looked_up_names(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """Yield the private names in `getattr(x, "_name")`, `vars(x)["_name"]`, `vars(x).get("_name")` and the like."""
    if isinstance(node, ast.Subscript):
        arguments, by_name = [node.slice], is_namespace(node.value)
    else:
        arguments, function = node.args, node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        by_name = called in BY_NAME or (isinstance(function, ast.Attribute) and is_namespace(function.value))
    for argument in arguments if by_name else ():
        if not isinstance(argument, ast.Constant) or not is_private(argument.value):
            continue
        if not str(argument.value).startswith("_anyaccel"):
            yield str(argument.value)


def is_namespace(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.startswith("vars(") or text.endswith(".__dict__")


def test_private_names_are_used_only_in_upstream() -> None:
    uses = {
        (file, name): f"{file}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:100]}"
        for file, tree in list_trees().items()
        if not file.startswith(ALLOWED)
        for node, name in find_private(tree, list_members(get_folder(file)))
    }
    offenders = [line for use, line in uses.items() if use not in EXCEPTIONS]
    unneeded = [f"{file}: the exception for {name} is no longer needed" for file, name in set(EXCEPTIONS) - set(uses)]
    assert offenders + unneeded == [], "add an entry to upstream/ with a test in tests/upstream"


@pytest.mark.parametrize(
    "line",
    [
        "inside = torch._C._nn.linear",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _get_current_function_mode_stack",
        "import torch._dynamo",
        'getattr(part, "_orig_mod", part)',
        'hasattr(pipe, "_anything_at_all")',
        'vars(pipe).pop("_anything_at_all", None)',
        'part.__dict__["_anything_at_all"]',
        'NAMES = ("_hf_hook", "forward")',
        'importlib.import_module("diffusers.models._modeling_parallel")',
        'return_text = "should be kept in float32" in text',
        "step = frame.f_locals['i']",
        "pipe.check_inputs(prompt)",
        "module._hf_hook.offload = True",
        "key = tensor.untyped_storage()._cdata",
        "count = self._version",
    ],
)
def test_check_finds_private_names(line: str) -> None:
    assert list(find_private(parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "models[name].compile_repeated_blocks(**options)",
        "kinds = read_repeated_blocks(module)",
        "torch.nn.Module.__init__(self)",
        'apply_patch("torch.nn.Module._apply", move, "emulator")',
        "values = torch.add_(1)",
        "self._ours = other._ours",
        "torch.ops.aten._to_copy.default",
        "sys._getframe()",
        "from anyaccel.checking.fresh_process import _work",
        'vars(pipe)["_anyaccel_room"]',
    ],
)
def test_check_ignores_other_code(line: str) -> None:
    assert not list(find_private(parse(line), frozenset({"_ours"})))
