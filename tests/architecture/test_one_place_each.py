"""One place each: what one module does, no other module does by itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "anyaccel"
SILENCED = ("accelerate", "diffusers", "huggingface_hub", "ray", "transformers")
HOMES = {
    "check_side": "call_limits.py",
    "check_steps": "call_limits.py",
    "first_line": "errors.py",
    "is_out_of_memory": "backends/out_of_memory.py",
    "parse_image_size": "call_limits.py",
    "read_seed": "call_limits.py",
    "read_seeds": "call_limits.py",
}
"""Functions that had several copies, and the module that has the one."""


@functools.cache
def list_nodes() -> list[tuple[str, ast.AST]]:
    """Every node of the source, with its module."""
    return [
        (path.relative_to(SOURCE).as_posix(), node)
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def find_offenders(home: str, offends: Callable[[ast.AST], bool]) -> list[str]:
    """The places outside a module where the source does what only that module may do."""
    return [
        f"{module}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}"
        for module, node in list_nodes()
        if module != home and offends(node)
    ]


def is_limit(node: ast.AST) -> bool:
    """The largest seed, 2**64 - 1, or the longest side under any name."""
    power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and ast.unparse(node) == "2 ** 64"
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return power or (target is not None and "SIDE" in ast.unparse(target) and "16384" in ast.unparse(node))


def is_silencing(node: ast.AST) -> bool:
    """`getLogger("diffusers…")` and its like, `set_verbosity…`, its variable, a switch for all, or a patch of tqdm."""
    if isinstance(node, ast.Constant):
        return str(node.value).endswith("S_VERBOSITY")
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        called = function.rsplit(".", 1)[-1]
        for_all = ast.unparse(node) == "warnings.simplefilter('ignore')" or function == "logging.disable"
        first = node.args[0] if node.args else None
        named = isinstance(first, ast.Constant) and str(first.value).startswith(SILENCED)
        switches = called.startswith("set_verbosity") or called in ("disable_progress_bar", "addFilter")
        return for_all or switches or (called == "getLogger" and named)
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(ast.unparse(target).endswith("tqdm.__init__") for target in targets)


def find_targets(node: ast.AST) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else ():
        yield from target.elts if isinstance(target, ast.Tuple) else (target,)


def is_step_override(node: ast.AST) -> bool:
    """`scheduler.step = …` or `vars(scheduler)["step"] = …`; a class may have an attribute of that name."""
    return any(
        (isinstance(target, ast.Attribute) and target.attr == "step" and ast.unparse(target.value) != "self")
        or ast.unparse(target).endswith(("vars(scheduler)['step']", ".__dict__['step']"))
        for target in find_targets(node)
    )


def test_limits_of_calls_are_defined_once() -> None:
    assert find_offenders("call_limits.py", is_limit) == []


def test_libraries_are_silenced_in_one_module() -> None:
    assert find_offenders("library_logging.py", is_silencing) == []


def test_schedulers_are_overridden_in_one_module() -> None:
    assert find_offenders("runtime/workarounds/method_override.py", is_step_override) == []


def test_functions_have_no_second_copy() -> None:
    functions = [(module, node.name) for module, node in list_nodes() if isinstance(node, ast.FunctionDef)]
    copies = [(module, name) for module, name in functions if module != HOMES.get(name.lstrip("_"), module)]
    assert copies == []
    assert {(home, name) for name, home in HOMES.items()} <= set(functions)


def test_listeners_share_one_protocol() -> None:
    def listens_alone(node: ast.AST) -> bool:
        if not isinstance(node, ast.ClassDef):
            return False
        methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        return "on_component" in methods and "ProgressListener" not in map(ast.unparse, node.bases)

    assert find_offenders("progress.py", listens_alone) == []


def test_the_rules_see_what_they_are_about() -> None:
    """Each rule finds the offence that it is written for."""
    for rule, code in (
        (is_limit, "LARGEST = 2**64 - 1"),
        (is_limit, "_LONGEST_SIDE = 16_384"),
        (is_silencing, "logging.getLogger('diffusers.models').addFilter(f)"),
        (is_silencing, "of_diffusers.set_verbosity_error()"),
        (is_silencing, "std.tqdm.__init__ = quiet"),
        (is_silencing, "os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')"),
        (is_silencing, "logging.disable(logging.WARNING)"),
        (is_silencing, "warnings.simplefilter('ignore')"),
        (is_silencing, "logging.getLogger(module).addFilter(is_kept)"),
        (is_silencing, "transformers_logging.disable_progress_bar()"),
        (is_step_override, "scheduler.step = own"),
        (is_step_override, "vars(scheduler)['step'] = own"),
        (is_step_override, "del scheduler.step"),
    ):
        assert any(rule(node) for node in ast.walk(ast.parse(code))), code
