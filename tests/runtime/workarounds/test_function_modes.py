"""Function modes run each torch function once, also if a user has patched it, and keep its gradient."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.planning import PipelineFacts, PlacementOptions, make_plan
from anyaccel.runtime.workarounds import dynamic_shapes
from anyaccel.runtime.workarounds.function_modes import (
    ModelFunctionMode,
    PipelineFunctionMode,
    find_unpatched,
    make_pipeline_function_mode,
)
from anyaccel.runtime.workarounds.host_transfer import HostTransfer, copy_or_fill


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


PATCHED_BEFORE_IMPORT = """
import functools
import torch
functional, calls = torch.nn.functional, []

def patch(owner, name, decorate):
    original = getattr(owner, name)
    def wrapper(*args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)
    setattr(owner, name, decorate(wrapper, original))

plain, wraps = lambda wrapper, original: wrapper, lambda wrapper, original: functools.wraps(original)(wrapper)
patch(functional, "silu", plain)
patch(functional, "group_norm", wraps)
patch(functional, "softmax", lambda wrapper, original: functools.partial(wrapper))
patch(functional, "cross_entropy", plain)
patch(torch.Tensor, "norm", plain)
patch(torch.functional, "einsum", plain)
from anyaccel.runtime.workarounds.function_modes import ModelFunctionMode, PipelineFunctionMode
from anyaccel.runtime.workarounds.host_transfer import HostTransfer
values = torch.ones(2, 4, 3)
for mode in ModelFunctionMode({}), PipelineFunctionMode({}, HostTransfer(torch.device("cpu"), {})):
    with mode:
        torch.nn.GroupNorm(2, 4)(values)
        functional.silu(values, inplace=True)
        torch.nn.Softmax(dim=0)(values)
        values.norm()
        torch.functional.einsum("abc->a", values)
    print(*calls)
    calls.clear()
with ModelFunctionMode({functional.cross_entropy: lambda func, args, kwargs: func(args[0] * 0, *args[1:], **kwargs)}):
    print(functional.cross_entropy(values[0], torch.zeros(4, dtype=torch.long), reduction="sum").exp().round(), *calls)
"""


def test_functions_patched_before_the_import_run_once() -> None:
    process = subprocess.run([sys.executable, "-c", PATCHED_BEFORE_IMPORT], capture_output=True, text=True, check=True)
    calls = "group_norm silu softmax norm einsum"
    assert process.stdout.splitlines() == [calls, calls, "tensor(81.) cross_entropy"]


BY_KEYWORD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda values: torch.nonzero(input=values > 2),
    "masked_select": lambda values: torch.masked_select(input=values, mask=values > 2),
    "where": lambda values: torch.where(condition=values > 2)[1],
    "where with values": lambda values: torch.where(condition=values > 2, input=values, other=values * 2),
    "repeat_interleave": lambda values: torch.repeat_interleave(
        input=values, repeats=torch.tensor([2, 1]).to(values.device), dim=0
    ),
    "repeated indices": lambda values: torch.repeat_interleave(repeats=torch.tensor([2, 1]).to(values.device)),
    "bincount": lambda values: torch.bincount(input=values.to(torch.int32).flatten()),
}


def test_data_dependent_shapes_with_keyword_arguments() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [5.0, 1.0, 4.0]])

    def use(accelerator: VirtualAccelerator) -> None:
        for name, run in BY_KEYWORD.items():
            with ModelFunctionMode(dynamic_shapes.make_handlers(accelerator.device(), {})):
                actual = run(values.to(accelerator.device())).cpu()
            assert torch.equal(actual, run(values)), name

    run_forked("neuron", use, strict=True)


def test_gradients_of_small_cpu_tensors() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        device = accelerator.device()
        for values in torch.ones(1), torch.zeros(4), torch.tensor(2.0):
            weight = values.clone().requires_grad_()
            with PipelineFunctionMode({}, HostTransfer(device, {})):
                product = torch.full((4,), 3.0).to(device) * weight
                stacked = torch.stack([weight, torch.ones_like(weight).to(device)])
            torch.autograd.backward([product.sum(), stacked.sum()])
            assert weight.grad is not None
            assert weight.grad.tolist() == torch.full_like(values, 12 / values.numel() + 1).tolist()
            assert copy_or_fill(weight, device).requires_grad
            with torch.no_grad():
                assert not copy_or_fill(weight, device).requires_grad

    run_forked("hpu", use)


def test_a_tensor_on_the_device_is_converted_to_an_array() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        sheet = anyaccel.sheet(accelerator.name)
        plan = make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)
        value = torch.arange(3.0).to(accelerator.device())
        with make_pipeline_function_mode(plan, accelerator.device()):
            assert value.numpy().tolist() == [0, 1, 2]
        with pytest.raises(TypeError, match="numpy"):
            value.numpy()

    for device in ("mps", "neuron"):
        run_forked(device, use)


def test_a_module_is_copied_to_the_device_once() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        sheet = anyaccel.sheet(accelerator.name)
        plan = make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)
        layer = torch.nn.Linear(256, 256, bias=False)
        with torch.no_grad(), make_pipeline_function_mode(plan, accelerator.device()):
            layer.to(accelerator.device())
        assert layer.weight.device.type == accelerator.device().type
        assert anyaccel.max_memory(accelerator.name) == layer.weight.nbytes

    for device in ("mps", "hpu"):
        run_forked(device, use)
