"""Attributes of torch are replaced in one module: `emulator/torch_patches.py`, with an entry for each."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import SOURCE

PLACE = "emulator/torch_patches.py"
SETTINGS = ("torch.backends.", "torch._inductor.config.", "torch._dynamo.config.")
"""Documented switches that are made to be assigned."""


def find_aliases(tree: ast.AST) -> dict[str, str]:
    """Names that mean torch or a part of it: `Tensor = torch.Tensor`, `from torch import nn`, `import torch as t`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            dotted = spell(node.value, names)
            names |= {target.id: dotted for target in node.targets if isinstance(target, ast.Name) if dotted}
    return names


def spell(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted name of a part of torch; empty for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = spell(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars" and node.args:
        return spell(node.args[0], names)
    return ""


def find_replacements(tree: ast.AST) -> Iterator[str]:
    """Every assignment to an attribute of torch, in whatever way it is written."""
    names = find_aliases(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            owner = spell(target.value, names) if isinstance(target, ast.Attribute | ast.Subscript) else ""
            if owner and not f"{owner}.".startswith(SETTINGS):
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            updates = isinstance(node.func, ast.Attribute) and node.func.attr == "update"
            sets = getattr(node.func, "id", "") in ("setattr", "delattr")
            subject = getattr(node.func, "value", None) if updates else node.args[0] if sets else None
            if subject is not None and spell(subject, names):
                yield ast.unparse(node)


def test_torch_is_patched_in_one_module() -> None:
    offenders = {
        f"{path.relative_to(SOURCE)}: {code}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) != PLACE
        for code in find_replacements(ast.parse(path.read_text()))
    }
    assert not offenders, "add an entry to PATCHES, and use apply_patch"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load = mine",
        "import torch\ntorch.load = torch.serialization.load = mine",
        "import torch\nTensor = torch.Tensor\nTensor.record_stream = mine",
        "import torch\nvars(torch)['compile'] = mine",
        "import torch\nvars(torch.random).update(manual_seed=mine)",
        "import torch\nsetattr(torch.accelerator, name, answer)",
        "from torch import nn\nnn.Module._apply = mine",
        "from torch.utils._device import DeviceContext\nDeviceContext.__init__ = mine",
        "import torch as t\nt.randn, t.rand = one, two",
        "import torch\nmodule = torch.distributed.distributed_c10d\nvars(module)['is_nccl_available'] = mine",
    ],
)
def test_the_check_finds_a_replacement(code: str) -> None:
    assert list(find_replacements(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nload = torch.load",
        "import torch\ntorch.backends.cudnn.benchmark = True",
        "import torch\nmodule.forward = torch.compile(module)",
        "import torch\nkind: torch.dtype = torch.float32",
        "import torch\nknown[torch.float32] = 4",
    ],
)
def test_the_check_leaves_other_code_alone(code: str) -> None:
    assert not list(find_replacements(ast.parse(code)))
