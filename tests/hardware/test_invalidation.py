"""Changes after graphs were captured or models were compiled, each compared with a stock pipeline.

`python -m tests.hardware.run_shards` runs these tests in parallel processes.
"""

from collections.abc import Iterator

import pytest
import torch

import anyaccel
from tests.conftest import NEEDS_RECIPES
from tests.hardware.invalidation_checks import (
    CASES,
    check_change,
    check_change_before_capture,
    check_denoiser_on_the_cpu,
    check_direct_calls,
    check_option_changes,
    check_shared_denoiser,
)

pytestmark = [pytest.mark.hardware, NEEDS_RECIPES]

DURING_CAPTURE = ["function_mode", "dispatch_mode", "autocast", "hook_on_a_layer", "torch_function_patched"]
# Warnings of torch about experimental and deprecated settings, which some changes use.
IGNORED = ["ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"]


@pytest.fixture
def device() -> Iterator[str]:
    """Return a device that captures graphs; its float32 products are not rounded to TF32."""
    present = [name for name in ("cuda",) if anyaccel.is_available(name)]
    if not present:
        pytest.skip("no device with graph capture available; `anyaccel devices` shows the reason")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield present[0]
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compile])
def test_change_of_a_compiled_model(name: str, device: str) -> None:
    check_change(name, device, compile=True)


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("name", CASES)
def test_change_of_a_captured_model(name: str, device: str) -> None:
    check_change(name, device, compile=False)


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize(
    "name", ["function_mode", "dispatch_mode", "autocast", "hook_on_a_layer", "torch_function_patched"]
)
def test_change_during_the_capture(name: str, device: str) -> None:
    check_change_before_capture(name, device)


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize(
    "check", [check_option_changes, check_shared_denoiser, check_direct_calls, check_denoiser_on_the_cpu]
)
def test_calls_of_a_captured_model(check: object, device: str) -> None:
    assert callable(check)
    check(device)
