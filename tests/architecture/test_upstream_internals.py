"""Private details of diffusers, transformers, accelerate and torch are used in `upstream/` only."""

import re

import pytest

from anyaccel.emulator.torch_patches import PATCHES
from tests.conftest import SOURCE

ALLOWED = ("upstream/", "emulator/torch_patches.py", "library_logging.py")
"""The last one is the one place for log messages that are dropped; tests/upstream covers its texts."""

PRIVATE = re.compile(
    r"\btorch\._(?!_)\w|\btorch\.[a-z_.]+\._(?!_)\w|\bfrom torch[\w.]*\._\w|\bfrom torch[\w.]* import .*\b_[a-z]"
    r"|\b(diffusers|transformers|accelerate)\.[\w.]*\._(?!_)\w|\bfrom (diffusers|transformers|accelerate)[\w.]*\._\w"
    r"|(?<!\w)(_hf_hook|_old_forward|_diffusers_hook|_all_hooks|_orig_mod|_compiled_call_impl|_keep_in_fp32\w*"
    r"|_repeated_blocks|_cp_plan|_tp_plan|_parallel_config|_execution_device|_is_hf_initialized|_get_signature_keys"
    r"|_resolve_dtype|_SUPPORTED_TP_DEVICES|_modeling_parallel|_output_capturing_hooks_installed)\b"
    r"|\bcheck_inputs\b|\bf_locals\b"
    r"|must be divisible by mesh size|should be kept in float32|experimental feature|Graph break in user code"
)

EXCEPTIONS = {
    "runtime/pipeline.py": "an override of _execution_device has to be a method of the class",
}
"""Files that may, each with the reason. The list shrinks: a file that no longer needs it is an error."""


def find_private(text: str) -> list[str]:
    for patch in PATCHES:
        text = text.replace(patch.name.removesuffix(".__init__"), "")
    return [line.strip() for line in text.splitlines() if PRIVATE.search(line)]


def test_private_details_are_in_one_place() -> None:
    found = {
        name: lines
        for path in sorted(SOURCE.rglob("*.py"))
        if not (name := str(path.relative_to(SOURCE))).startswith(ALLOWED)
        if (lines := find_private(path.read_text()))
    }
    offenders = [f"{name}: {line}" for name, lines in found.items() if name not in EXCEPTIONS for line in lines]
    assert not offenders, "add an entry to upstream/, with a test in tests/upstream"
    assert not set(EXCEPTIONS) - set(found), "they use none any more: drop the exceptions"


@pytest.mark.parametrize(
    "line",
    [
        "inside = torch._C._nn.linear",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _get_current_function_mode_stack",
        'getattr(part, "_orig_mod", part)',
        'importlib.import_module("diffusers.models._modeling_parallel")',
        'return "should be kept in float32" in text',
        "step = frame.f_locals['i']",
        "module._hf_hook.offload = True",
    ],
)
def test_the_check_finds_a_private_detail(line: str) -> None:
    assert find_private(line)


@pytest.mark.parametrize(
    "line",
    [
        "models[name].compile_repeated_blocks(**options)",
        "kinds = read_repeated_blocks(module)",
        "torch.nn.Module.__init__(self)",
        'apply_patch("torch.nn.Module._apply", move, "emulator")',
        "values = torch.add_(1)",
    ],
)
def test_the_check_leaves_other_code_alone(line: str) -> None:
    assert not find_private(line)
