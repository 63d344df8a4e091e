"""Structure of the code: vendor names, file lengths, imports and public names."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import ALL_SHEETS, ROOT, SOURCE
from tests.source_trees import parse

FILES = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
OUR_FOLDERS = (".ci", "benchmarks", "docs", "examples", "src", "tests", "tools", "training")
LONGEST_FILE = 450
LONGEST_FUNCTION = 60
CATCH_ALL_NAMES = {"utils", "util", "helpers", "common", "misc"}

VENDOR_NAMES = re.compile(
    r"\btorch\.(backends\.)?(cuda|hpu|mps|neuron|npu|mlu|xpu)\b"
    r"|from torch import (cuda|mps|xpu)"
    r"|\b(torch_neuronx|habana_frameworks|torch_npu|torch_mlu|torch_xla)\b"
)


def find_vendor_names(text: str) -> list[str]:
    return [match.group() for match in VENDOR_NAMES.finditer(text)]


def find_too_long(text: str) -> list[str]:
    """Return the file length and the functions that exceed the limits."""
    lines = len(text.splitlines())
    found = [f"{lines} lines"] if lines > LONGEST_FILE else []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{node.name} has {length} lines"] if length > LONGEST_FUNCTION else []
    return found


def test_vendor_names_are_only_in_backends_and_emulator() -> None:
    offenders = {
        name: found
        for name, path in FILES.items()
        if path.relative_to(SOURCE).parts[0] not in {"backends", "emulator"}
        and (found := find_vendor_names(path.read_text()))
    }
    assert offenders == {}


@pytest.mark.parametrize(
    "code", ["torch.cuda.empty_cache()", "torch.backends.mps", "from torch import xpu", "import torch_npu"]
)
def test_check_finds_vendor_names(code: str) -> None:
    assert find_vendor_names(code)


def test_files_and_functions_are_short() -> None:
    offenders = {name: found for name, path in FILES.items() if (found := find_too_long(path.read_text()))}
    assert offenders == {}


def test_check_finds_long_files_and_functions() -> None:
    function = "def long():\n" + "    pass\n" * LONGEST_FUNCTION
    assert find_too_long(function) == ["long has 61 lines"]
    assert find_too_long("x = 1\n" * 451) == ["451 lines"]
    assert find_too_long("x = 1\n" * LONGEST_FILE) == []


def test_no_module_has_a_catch_all_name() -> None:
    assert [name for name, path in FILES.items() if path.stem in CATCH_ALL_NAMES] == []


@pytest.mark.parametrize("statement", ["import anyaccel", "import anyaccel; anyaccel.sheet('mps')"])
def test_import_and_sheet_do_not_import_torch(statement: str) -> None:
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in process.stderr.splitlines()}
    assert "anyaccel" in loaded
    assert loaded & {"torch", "diffusers", "transformers", "accelerate", "numpy"} == set()


def test_one_module_per_accelerator() -> None:
    names = {sheet.torch_name for sheet in ALL_SHEETS}
    assert {path.stem for path in (SOURCE / "backends" / "devices").glob("[!_]*.py")} == names


def test_no_file_names_a_package_index() -> None:
    # The strings are split, because this check must not find its own file.
    index = re.compile("|".join([r"--(extra-)?index-" + "url", "py" + r"pi\.org", r"download\.py" + r"torch\.org/whl"]))
    offenders = []
    for path in [*ROOT.glob("[!.]*"), *(path for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*"))]:
        if path.is_file() and "__pycache__" not in path.parts:
            text = path.read_bytes().decode(errors="replace")
            offenders += [str(path.relative_to(ROOT))] if index.search(text) else []
    assert offenders == []


def test_public_names() -> None:
    import anyaccel

    assert sorted(anyaccel.__all__) == [
        "AnyaccelError",
        "AutoPipelineForImage2Image",
        "AutoPipelineForInpainting",
        "AutoPipelineForText2Image",
        "Backend",
        "Device",
        "DiffusionPipeline",
        "Driver",
        "Memory",
        "ModularPipeline",
        "Plan",
        "Report",
        "Result",
        "Sheet",
        "__version__",
        "adjust_dtype",
        "check",
        "device_count",
        "devices",
        "empty_cache",
        "explain",
        "generate",
        "is_available",
        "manual_seed",
        "max_memory",
        "memory",
        "open_device",
        "place",
        "randn",
        "reset_peak_memory",
        "sheet",
        "supports_training",
        "synchronize",
        "virtual",
    ]
    for name in anyaccel.__all__:
        assert getattr(anyaccel, name) is not None
    assert set(anyaccel.__all__) <= set(dir(anyaccel))


def test_unknown_public_name_raises() -> None:
    import anyaccel

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        anyaccel.nonsense  # noqa: B018
