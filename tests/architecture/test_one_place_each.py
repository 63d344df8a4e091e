"""Functions, limits and patches that only one module may define."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.source_trees import parse

SOURCE = Path(__file__).parents[2] / "src" / "anyaccel"
SILENCED = ("accelerate", "diffusers", "huggingface_hub", "ray", "transformers")
OWNERS = {
    "check_side": "call_limits.py",
    "check_steps": "call_limits.py",
    "first_line": "errors.py",
    "is_out_of_memory": "backends/out_of_memory.py",
    "parse_image_size": "call_limits.py",
    "read_seed": "call_limits.py",
    "read_seeds": "call_limits.py",
}
"""Functions that once had several copies, and the modules that own them."""


@functools.cache
def list_nodes() -> list[tuple[str, ast.AST]]:
    """Return all AST nodes of the source with their modules."""
    return [
        (path.relative_to(SOURCE).as_posix(), node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(parse(path.read_text()))
    ]


def find_offenders(owner: str, offends: Callable[[ast.AST], bool]) -> list[str]:
    """Return code outside the owner module that only the owner may contain."""
    return [
        f"{module}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}"
        for module, node in list_nodes()
        if module != owner and offends(node)
    ]


def is_limit(node: ast.AST) -> bool:
    """Return whether a node defines the largest seed (2**64 - 1) or the longest side, under any name."""
    power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node) == "2 ** 64"
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    named_side = isinstance(target, ast.Name) and "SIDE" in target.id
    return power or (named_side and "16384" in ast.unparse(node))


def is_silencing(node: ast.AST) -> bool:
    """Return whether a node silences another library: its logger, verbosity, warnings or progress bars."""
    if isinstance(node, ast.Constant):
        return str(node.value).endswith("S_VERBOSITY")
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        called = function.rsplit(".", 1)[-1]
        for_all = function == "logging.disable" or (
            called == "simplefilter" and ast.unparse(node) == "warnings.simplefilter('ignore')"
        )
        first = node.args[0] if node.args else None
        named = isinstance(first, ast.Constant) and str(first.value).startswith(SILENCED)
        switches = called.startswith("set_verbosity") or called in ("disable_progress_bar", "addFilter")
        return for_all or switches or (called == "getLogger" and named)
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(
        isinstance(target, ast.Attribute) and ast.unparse(target).endswith("tqdm.__init__") for target in targets
    )


def find_targets(node: ast.AST) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else ():
        yield from target.elts if isinstance(target, ast.Tuple) else (target,)


def is_step_override(node: ast.AST) -> bool:
    """Return whether a node replaces `scheduler.step`; `self.step` is a different attribute."""
    return any(
        (isinstance(target, ast.Attribute) and target.attr == "step" and ast.unparse(target.value) != "self")
        or (
            isinstance(target, ast.Subscript)
            and ast.unparse(target).endswith(("vars(scheduler)['step']", ".__dict__['step']"))
        )
        for target in find_targets(node)
    )


def test_call_limits_are_defined_once() -> None:
    assert find_offenders("call_limits.py", is_limit) == []


def test_libraries_are_silenced_in_one_module() -> None:
    assert find_offenders("library_logging.py", is_silencing) == []


def test_schedulers_are_overridden_in_one_module() -> None:
    assert find_offenders("runtime/workarounds/method_override.py", is_step_override) == []


def test_functions_have_no_second_copy() -> None:
    functions = [(module, node.name) for module, node in list_nodes() if isinstance(node, ast.FunctionDef)]
    copies = [(module, name) for module, name in functions if module != OWNERS.get(name.lstrip("_"), module)]
    assert copies == []
    assert {(owner, name) for name, owner in OWNERS.items()} <= set(functions)


def test_progress_listeners_share_one_base_class() -> None:
    def lacks_base_class(node: ast.AST) -> bool:
        if not isinstance(node, ast.ClassDef):
            return False
        methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        return "on_component" in methods and "ProgressListener" not in map(ast.unparse, node.bases)

    assert find_offenders("progress.py", lacks_base_class) == []


def test_rules_find_offending_code() -> None:
    for rule, code in (
        (is_limit, "LARGEST = 2**64 - 1"),
        (is_limit, "_LONGEST_SIDE = 16_384"),
        (is_silencing, "logging.getLogger('diffusers.models').addFilter(f)"),
        (is_silencing, "of_diffusers.set_verbosity_error()"),
        (is_silencing, "std.tqdm.__init__ = quiet"),
        (is_silencing, "os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')"),
        (is_silencing, "logging.disable(logging.WARNING)"),
        (is_silencing, "warnings.simplefilter('ignore')"),
        (is_silencing, "logging.getLogger(module).addFilter(keep)"),
        (is_silencing, "transformers_logging.disable_progress_bar()"),
        (is_step_override, "scheduler.step = own"),
        (is_step_override, "vars(scheduler)['step'] = own"),
        (is_step_override, "del scheduler.step"),
    ):
        assert any(rule(node) for node in ast.walk(parse(code))), code
