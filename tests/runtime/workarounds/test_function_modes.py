"""Function modes run each torch function once, also if a user has patched it."""

import pytest
import torch

from anyaccel.runtime.workarounds.function_modes import ModelFunctionMode, PipelineFunctionMode, find_unpatched
from anyaccel.runtime.workarounds.host_transfer import HostTransfer


@pytest.mark.parametrize(
    "mode",
    [ModelFunctionMode({}), PipelineFunctionMode({}, HostTransfer(torch.device("cpu"), {}))],
    ids=["model", "pipeline"],
)
def test_a_patched_function_runs_once(mode: torch.overrides.TorchFunctionMode, monkeypatch: pytest.MonkeyPatch) -> None:
    original, value = torch.nn.functional.silu, torch.linspace(-2, 2, 5)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda value, inplace=False: original(value) * 0.5)
    with mode:
        output = torch.nn.SiLU()(value)
    assert torch.equal(output, original(value) * 0.5)


def test_a_handler_of_a_patched_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    original, value = torch.nn.functional.silu, torch.ones(2)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda value, inplace=False: original(value) * 0.5)
    with ModelFunctionMode({original: lambda func, args, kwargs: args[0] + 1}):
        assert torch.equal(torch.nn.functional.silu(value), torch.ones(2))


def test_other_functions_stay_as_they_are() -> None:
    def function_of_a_user() -> None:
        pass

    for function in (torch.nn.functional.silu, torch.conv2d, torch.Tensor.norm, function_of_a_user):
        assert find_unpatched(function) is function
