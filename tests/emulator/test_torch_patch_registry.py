"""The table of patches: every entry applies to the installed torch, and its removal restores the original."""

from __future__ import annotations

import pickle
import pkgutil
import types
from typing import Any

import pytest
import torch

from anyaccel.emulator import torch_patch_registry
from anyaccel.emulator.torch_patch_registry import PATCHES, Patch, apply_patch, patched, remove_patches, replace_class
from anyaccel.errors import UpstreamError
from tests.conftest import run_in_fork

NAMES = [name for patch in PATCHES for name in (patch.name, *patch.aliases) if "*" not in name]
ENTRIES = [patch for patch in PATCHES if "*" not in patch.name]
WITH_DEVICE = {
    "torch.mps.*": "torch.mps.empty_cache",
    "torch.xpu.*": "torch.xpu.empty_cache",
    "torch.distributed.distributed_c10d.is_*_available": "torch.distributed.distributed_c10d.is_xccl_available",
    "torch.distributed.distributed_c10d.ProcessGroup*": "torch.distributed.distributed_c10d.ProcessGroupXCCL",
}
"""An example attribute for each entry with a wildcard."""
ABSENT = object()


def read(name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(pkgutil.resolve_name(owner), attribute, ABSENT)


def read_own(name: str) -> Any:
    """Return the value in the owner's own namespace, without inherited attributes."""
    owner, _, attribute = name.rpartition(".")
    return vars(pkgutil.resolve_name(owner)).get(attribute, ABSENT)


def make_replacement(original: Any) -> Any:
    return type("Replacement", (original,), {}) if original is types.ModuleType else object()


@pytest.mark.parametrize("name", NAMES)
def test_installed_torch_has_the_attribute(name: str) -> None:
    assert read(name) is not ABSENT, f"torch {torch.__version__} has no {name}: see its entry in PATCHES"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_applies_and_its_removal_restores_the_original(patch: Patch) -> None:
    name = WITH_DEVICE.get(patch.name, patch.name)
    names = [name, *patch.aliases]
    before = {name: (read(name), read_own(name)) for name in names}
    try:
        apply_patch(name, make_replacement, "test")
        after = {name: read(name) for name in names}
    finally:
        remove_patches("test")
    assert all(after[name] is not before[name][0] for name in names)
    assert len({id(value) for value in after.values()}) == 1
    for name in names:
        assert read(name) is before[name][0]
        assert read_own(name) is before[name][1]


def test_every_entry_has_a_reason_and_a_tested_release() -> None:
    release = ".".join(torch.__version__.split(".")[:2])
    for patch in PATCHES:
        assert patch.why.endswith("."), patch.name
        assert not patch.link or patch.link.startswith("https://"), patch.name
        assert release in patch.known_good, f"{patch.name}: add torch {release} after testing it"
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


def test_missing_attribute_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Patch("torch.removed_attribute", "A reason.")
    monkeypatch.setattr(torch_patch_registry, "PATCHES", (gone,))
    with pytest.raises(UpstreamError, match=r"cannot patch torch.removed_attribute.*A reason"):
        apply_patch(gone.name, make_replacement, "test")
    assert not hasattr(torch, "removed_attribute")


def test_attribute_outside_the_table_is_rejected() -> None:
    before = torch.zeros
    with pytest.raises(UpstreamError, match=r"torch.zeros has no entry in PATCHES"):
        apply_patch("torch.zeros", make_replacement, "test")
    assert torch.zeros is before


def test_two_users_share_one_replacement() -> None:
    def add(mark: str) -> Any:
        return lambda original: lambda *sizes: f"{mark}({original(*sizes) if callable(original) else original})"

    before = torch.randn
    with patched("torch.randn", lambda _: lambda *sizes: "drawn", "inner"):
        apply_patch("torch.randn", add("outer"), "outer")
        assert torch.randn(1) == "outer(drawn)"
        apply_patch("torch.randn", add("again"), "outer")
        assert torch.randn(1) == "again(drawn)"
    try:
        assert torch.randn is not before, "removing the inner patch must keep the outer one"
    finally:
        remove_patches("outer")
    assert torch.randn is before


def test_replaced_class_equals_the_original() -> None:
    def replace(original: Any) -> Any:
        return replace_class(original, lambda *args: original("meta"))

    original = torch.device
    with patched("torch.device", replace, "test"):
        device = torch.device("cpu")
        assert device.type == "meta"
        assert isinstance(device, torch.device)
        assert issubclass(original, torch.device)
        assert torch.device == original
        assert hash(torch.device) == hash(original)
        saved = pickle.dumps(original("cpu"))
    assert pickle.loads(saved) == original("cpu"), "a pickle written while the class is patched must load afterwards"


ROUND_TRIP = """
import sys
from anyaccel.emulator.torch_patch_registry import remove_patches
from tests.emulator.test_torch_patch_registry import ENTRIES, read, read_own

import torch, torch._dynamo, torch.distributed, safetensors.torch
before = {patch.name: (read(patch.name), read_own(patch.name)) for patch in ENTRIES}
from anyaccel.cuda_scripts.run_script import start_migration
start_migration(sys.argv[1])
# Patched only by the benchmark, and only during calls of pipelines (tests/runtime/workarounds/test_flex_attention.py).
elsewhere = ("torch.randn", "torch.nn.attention.flex_attention.flex_attention")
names = [name for name in before if name not in elsewhere]
unused = [name for name in names if read(name) is before[name][0]]
assert not unused, f"never applied: {unused}"
assert torch.zeros(2, device="cuda").device.type == sys.argv[1].partition(":")[2]
for user in sys.argv[2:]:
    remove_patches(user)
left = [name for name in before if (read(name), read_own(name)) != before[name]]
assert not left, f"still patched: {left}"
assert torch.Tensor([1.0, 2.0]).data.tolist() == [1.0, 2.0]
print("restored")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("device", "users"),
    [("virtual:neuron", ("scripts", "emulator")), ("virtual:xpu", ("emulator", "scripts"))],
)
def test_virtual_device_and_script_apply_and_remove_all_patches(device: str, users: tuple[str, str]) -> None:
    def work() -> None:
        exec(compile(ROUND_TRIP, "<string>", "exec"), {"__name__": "__main__"})

    done = run_in_fork(work, ["-c", device, *users], {})
    assert done.stdout.endswith("restored\n"), done.stderr
