"""The rules of the house: where vendors' names may stand, how long a file may be, what an import loads."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ALL_SHEETS, ROOT, SOURCE

FILES = sorted(SOURCE.rglob("*.py"))
IDS = [str(path.relative_to(SOURCE)) for path in FILES]
LONGEST_FILE = 450
LONGEST_FUNCTION = 60

VENDOR_NAMES = re.compile(
    r"\btorch\.(backends\.)?(cuda|hpu|mps|neuron|npu|mlu|xpu)\b"
    r"|from torch import (cuda|mps|xpu)"
    r"|\b(torch_neuronx|habana_frameworks|torch_npu|torch_mlu|torch_xla)\b"
)
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def is_sheet(path: Path) -> bool:
    """A file that is one accelerator: mostly data."""
    return path.parent.name == "backends" and path.stem in {sheet.torch_name for sheet in ALL_SHEETS}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_vendors_stay_in_their_folders(path: Path) -> None:
    if path.relative_to(SOURCE).parts[0] not in {"backends", "emulator"}:
        assert VENDOR_NAMES.findall(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_files_and_functions_fit_the_reader(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_no_module_is_a_drawer(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}


@pytest.mark.parametrize("statement", ["import anyaccel", "import anyaccel; anyaccel.sheet('mps')"])
def test_a_bare_import_and_a_sheet_load_no_torch(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "anyaccel" in loaded
    assert loaded & {"torch", "diffusers", "transformers", "accelerate", "numpy"} == set()


def test_each_accelerator_is_one_file() -> None:
    names = {sheet.torch_name for sheet in ALL_SHEETS}
    assert {path.stem for path in FILES if is_sheet(path)} == names


def test_no_file_names_a_package_index() -> None:
    assert TRACKED, "this runs in a clone"
    # Put together here, so that the check does not find itself.
    index = re.compile("|".join([r"--(extra-)?index-" + "url", "py" + r"pi\.org", r"download\.py" + r"torch\.org/whl"]))
    for name in TRACKED:
        path = ROOT / name
        if path.suffix in {".png", ".ico", ".safetensors", ".webp"} or not path.is_file():
            continue
        assert index.search(path.read_text()) is None, f"{name} names a package index"


def test_the_public_names_are_these() -> None:
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


def test_a_name_that_is_not_public() -> None:
    import anyaccel

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        anyaccel.nonsense  # noqa: B018
