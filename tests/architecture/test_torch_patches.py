"""Only `emulator/torch_patch_registry.py` replaces attributes of torch, each with an entry in PATCHES."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import SOURCE
from tests.source_trees import parse

PATCH_MODULE = "emulator/torch_patch_registry.py"
SETTINGS = ("torch.backends.", "torch._inductor.config.", "torch._dynamo.config.")
"""Documented settings that are meant to be assigned."""


def find_aliases(tree: ast.AST) -> dict[str, str]:
    """Return local names of torch members: `Tensor = torch.Tensor`, `from torch import nn`, `import torch as t`."""
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
            dotted = get_dotted_name(node.value, names)
            names |= {target.id: dotted for target in node.targets if isinstance(target, ast.Name) if dotted}
    return names


def get_dotted_name(node: ast.AST, names: dict[str, str]) -> str:
    """Return the dotted name of a torch member; an empty string for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = get_dotted_name(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars" and node.args:
        return get_dotted_name(node.args[0], names)
    return ""


def find_replacements(tree: ast.AST) -> Iterator[str]:
    """Yield all assignments to attributes of torch, in any form."""
    names = find_aliases(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [item for target in node.targets for item in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            owner = get_dotted_name(target.value, names) if isinstance(target, ast.Attribute | ast.Subscript) else ""
            if owner and not f"{owner}.".startswith(SETTINGS):
                yield ast.unparse(node)
        if isinstance(node, ast.Call):
            updates = isinstance(node.func, ast.Attribute) and node.func.attr == "update"
            sets = getattr(node.func, "id", "") in ("setattr", "delattr")
            subject = getattr(node.func, "value", None) if updates else node.args[0] if sets else None
            if subject is not None and get_dotted_name(subject, names):
                yield ast.unparse(node)


def test_only_one_module_patches_torch() -> None:
    offenders = {
        f"{path.relative_to(SOURCE)}: {code}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) != PATCH_MODULE
        for code in find_replacements(parse(path.read_text()))
    }
    assert not offenders, "add an entry to PATCHES and use apply_patch"


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
def test_check_finds_replacements(code: str) -> None:
    assert list(find_replacements(parse(code)))


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
def test_check_ignores_other_code(code: str) -> None:
    assert not list(find_replacements(parse(code)))
