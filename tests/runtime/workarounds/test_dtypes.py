"""Replacement of unsupported dtypes in every function that creates a tensor on the device."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy
import pytest
import torch

import anyaccel
from anyaccel.backends.device import open_device
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import UsageError
from anyaccel.forward_overrides import Slot, set_override
from anyaccel.planning import PipelineFacts, PlacementOptions, Plan, make_plan
from anyaccel.recipes import recipes, run
from anyaccel.runtime.introspection import read_facts
from anyaccel.runtime.workarounds.dtypes import make_handlers, parse_to_arguments
from anyaccel.runtime.workarounds.function_modes import (
    ModelFunctionMode,
    make_model_function_mode,
    make_pipeline_function_mode,
)
from anyaccel.runtime.workarounds.host_transfer import HostTransfer
from tests.conftest import NEEDS_RECIPES
from tests.emulator.forked import DEVICES

Tensor = torch.Tensor


def plan_for(accelerator: VirtualAccelerator) -> Plan:
    sheet = open_device(accelerator.name).sheet
    return make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)


def replacements_of(plan: Plan) -> dict[torch.dtype, torch.dtype]:
    pairs = [(name, instead) for name, instead in plan.replacements.value if instead != "pairs"]
    return {getattr(torch, name): getattr(torch, instead) for name, instead in pairs}


def write_first(target: Tensor, values: Tensor) -> Tensor:
    """Write the first value, selected by a mask."""
    mask = torch.tensor([True, False], device=target.device)
    target[mask] = values[mask]
    return target


count_to: Any = torch.arange
FLOAT64, INT64 = torch.float64, torch.int64
PROGRAMS: dict[str, Any] = {
    # Factories, with and without `dtype=`.
    "zeros": lambda on, d: torch.zeros(2, 3, dtype=FLOAT64, device=d),
    "ones": lambda on, d: torch.ones((2, 3), dtype=INT64, device=str(d)),
    "full": lambda on, d: torch.full((2,), 3, dtype=FLOAT64, device=d),
    "full of integers": lambda on, d: torch.full((2,), 3, device=d),
    "full of floats": lambda on, d: torch.full((2,), 3.5, device=d),
    "full of truth": lambda on, d: torch.full((2,), True, device=d),
    "full of falsehood, by name": lambda on, d: torch.full((2,), fill_value=False, device=d),
    "arange": lambda on, d: torch.arange(5, device=d),
    "arange by name": lambda on, d: torch.arange(start=1, end=9, step=2, device=d),
    "arange of floats": lambda on, d: torch.arange(0, 1, 0.25, device=d),
    "arange of a step": lambda on, d: torch.arange(0, 2, step=0.5, device=d),
    "arange in float64": lambda on, d: torch.arange(0, 8, 2, dtype=FLOAT64, device=d),
    "arange by a CPU scalar": lambda on, d: count_to(torch.tensor(4, device="cpu"), device=d),
    "linspace": lambda on, d: torch.linspace(0, 1, 5, dtype=FLOAT64, device=d),
    "logspace": lambda on, d: torch.logspace(0, 1, 5, dtype=FLOAT64, device=d),
    "eye": lambda on, d: torch.eye(3, dtype=FLOAT64, device=d),
    "indices": lambda on, d: torch.tril_indices(3, 3, device=d),
    "zeros_like": lambda on, d: torch.zeros_like(torch.ones(2, dtype=FLOAT64), device=d),
    "ones_like": lambda on, d: torch.ones_like(on, dtype=FLOAT64),
    "full_like": lambda on, d: torch.full_like(on, 2, dtype=INT64),
    "new_zeros": lambda on, d: on.new_zeros(2, dtype=FLOAT64),
    "new_ones": lambda on, d: on.new_ones((2,), dtype=INT64),
    "new_full": lambda on, d: on.new_full((2,), 1, dtype=FLOAT64),
    "a supported dtype": lambda on, d: torch.zeros(2, dtype=torch.float16, device=d),
    "bool": lambda on, d: torch.zeros(2, dtype=torch.bool, device=d),
    # Constructors from data.
    "tensor": lambda on, d: torch.tensor([1, 2], device=d),
    "tensor of floats": lambda on, d: torch.tensor([1.5, 2.0], device=d),
    "tensor from NumPy": lambda on, d: torch.tensor(numpy.array([1.5, 2.5]), device=d),
    "tensor by name": lambda on, d: torch.tensor(data=[1.5], dtype=FLOAT64, device=str(d)),
    "a scalar": lambda on, d: torch.tensor(7, device=d),
    "as_tensor from NumPy": lambda on, d: torch.as_tensor(numpy.arange(3), device=d),
    "as_tensor of a tensor": lambda on, d: torch.as_tensor(torch.ones(2, dtype=FLOAT64), device=d),
    "as_tensor on the device": lambda on, d: torch.as_tensor(on, dtype=FLOAT64),
    "asarray": lambda on, d: torch.asarray(numpy.ones(2), device=d),
    "new_tensor": lambda on, d: on.new_tensor([1, 2]),
    "new_tensor of another dtype": lambda on, d: on.new_tensor([1, 2], dtype=FLOAT64),
    "new_tensor from NumPy": lambda on, d: on.new_tensor(numpy.ones(2)),
    "from_numpy": lambda on, d: torch.from_numpy(numpy.ones(2)).to(d),
    # Casts and moves, in every signature.
    "to, device and dtype": lambda on, d: torch.ones(2).to(d, FLOAT64),
    "to, by name": lambda on, d: torch.ones(2).to(dtype=INT64, device=str(d)),
    "to, like another": lambda on, d: torch.ones(2, dtype=FLOAT64).to(on),
    "to, dtype only": lambda on, d: on.to(FLOAT64),
    "to, dtype and copy": lambda on, d: on.to(FLOAT64, copy=True),
    "to, device only": lambda on, d: torch.ones(2, dtype=FLOAT64).to(d, non_blocking=True),
    "double": lambda on, d: on.double(),
    "long": lambda on, d: on.long(),
    "type": lambda on, d: on.type(FLOAT64),
    "type_as": lambda on, d: torch.ones(2, dtype=FLOAT64).type_as(on),
    # Functions that get the replacement dtypes.
    "embedding": lambda on, d: torch.nn.functional.embedding(torch.arange(2, device=d), on),
    "indexing": lambda on, d: on[torch.tensor([1, 0], device=d)],
    "gather": lambda on, d: on.gather(1, torch.zeros(2, 1, dtype=INT64, device=d)),
    "gather by name": lambda on, d: torch.gather(on, dim=1, index=torch.zeros(2, 1, dtype=INT64, device=d)),
    "scatter": lambda on, d: on.scatter(1, torch.zeros(2, 1, dtype=INT64, device=d), 5.0),
    "take_along_dim": lambda on, d: torch.take_along_dim(on, torch.zeros(2, 1, dtype=INT64, device=d), dim=1),
    "index_copy": lambda on, d: on.index_copy(0, torch.tensor([1], device=d), torch.ones(1, 3, device=d)),
    "put": lambda on, d: torch.put(on, torch.tensor([1], device=d), torch.ones(1, device=d)),
    "scatter_reduce_": lambda on, d: on.clone().scatter_reduce_(
        dim=1, index=torch.zeros(2, 1, dtype=INT64, device=d), src=torch.ones(2, 1, device=d), reduce="sum"
    ),
    "nll_loss": lambda on, d: torch.nn.functional.nll_loss(on, torch.tensor([1, 0], device=d)),
    "multi_margin_loss": lambda on, d: torch.nn.functional.multi_margin_loss(on, target=torch.tensor([1, 0], device=d)),
    "max_unpool1d": lambda on, d: torch.nn.functional.max_unpool1d(on, torch.tensor([[0, 2, 4]] * 2, device=d), (2,)),
    "index_select": lambda on, d: on.index_select(0, torch.tensor([1], device=d)),
    "one_hot": lambda on, d: torch.nn.functional.one_hot(torch.arange(3, device=d), 4).float(),
    "where": lambda on, d: torch.where(torch.full((3,), True, device=d), on, 0.0),
    "a mask": lambda on, d: on[torch.full((2,), True, device=d)],
    "writing by a mask": lambda on, d: write_first(torch.full((2,), 7, device=d), on.argmax(1)).float(),
    "writing into a result by a mask": lambda on, d: write_first(on.argmax(1), torch.full((2,), 7, device=d)).float(),
    "a 0-dim mask": lambda on, d: on[torch.tensor(True)],
    "timestep embedding": lambda on, d: torch.exp(-torch.arange(4, dtype=FLOAT64, device=d) / 4).float(),
}
INTEGER_SOURCES: dict[str, Any] = {
    "scatter, by name": lambda on, d: on.to(torch.int32).scatter(
        1, index=torch.zeros(2, 1, dtype=INT64, device=d), src=torch.ones(2, 1, dtype=torch.int32, device=d)
    ),
    "scatter_reduce": lambda on, d: on.to(torch.int32).scatter_reduce(
        1, torch.zeros(2, 1, dtype=INT64, device=d), torch.ones(2, 1, dtype=torch.int32, device=d), "sum"
    ),
}
MIXED_DEVICES: dict[str, Any] = {
    "a float64 scalar and integers": lambda on, d: on.to(torch.int32) * torch.tensor(2.5, dtype=FLOAT64),
    "a float64 scalar": lambda on, d: on * torch.tensor(2.5, dtype=FLOAT64),
    "a scalar inside a table": lambda on, d: on * torch.linspace(0, 1, 5, dtype=FLOAT64)[3],
    "a float64 row": lambda on, d: on + torch.arange(3, dtype=FLOAT64),
    "a row as first argument": lambda on, d: torch.arange(3, dtype=FLOAT64) * on,
    "a list": lambda on, d: torch.cat([on, torch.ones(1, 3, dtype=FLOAT64)]),
    "integers": lambda on, d: on[torch.arange(2)],
}
"""CPU tensors used with device tensors; supported in the pipeline's own code only."""


def check(name: str, program: Any, mode: Any, device: torch.device, replaced: dict[torch.dtype, torch.dtype]) -> None:
    """Check that a program returns the CPU result in the replacement dtypes."""
    values = torch.arange(6.0).reshape(2, 3)
    expected = program(values, torch.device("cpu"))
    with torch.no_grad(), mode:
        actual = program(values.to(device), device)
    expected = expected.to(replaced.get(expected.dtype, expected.dtype))
    assert actual.device == device, name
    if name not in MIXED_DEVICES:
        assert actual.dtype is expected.dtype, name
    assert actual.dtype not in replaced, name
    assert actual.shape == expected.shape, name
    torch.testing.assert_close(actual.cpu(), expected.to(actual.dtype), msg=lambda message: f"{name}: {message}")


@pytest.mark.parametrize("device", DEVICES)
def test_no_unsupported_dtype_on_the_device(device: str) -> None:
    """In the pipeline's code and inside models."""

    def use(accelerator: VirtualAccelerator) -> None:
        plan, target = plan_for(accelerator), accelerator.device()
        replaced = replacements_of(plan)
        modes = [make_pipeline_function_mode(plan, target), make_model_function_mode(plan, target)]
        for mode in [mode for mode in modes if mode is not None]:
            for name, program in (PROGRAMS | INTEGER_SOURCES).items():
                check(name, program, mode, target, replaced)
        for name, program in MIXED_DEVICES.items():
            check(name, program, modes[0], target, replaced)
        assert [row for row in accelerator.ledger.rows() if row.effect in ("error", "wrong")] == []

    run_forked(device, use, strict=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_histogram_of_integers(device: str) -> None:
    """The experts of transformers count their tokens with integers on devices, but with floats on the CPU."""

    def use(accelerator: VirtualAccelerator) -> None:
        plan, target = plan_for(accelerator), accelerator.device()
        values = torch.tensor([0, 2, 2, 3], dtype=torch.int32).to(target)
        for mode in (make_pipeline_function_mode(plan, target), make_model_function_mode(plan, target)):
            with mode or torch.no_grad():
                counts = torch.histc(values, bins=4, min=0, max=3)
            assert (counts.device, counts.dtype) == (target, torch.int32)
            assert counts.cpu().tolist() == [1, 0, 2, 1]

    run_forked(device, use, strict=True)


def test_plans_replace_the_dtypes_of_the_sheets() -> None:
    """The test above would be meaningless if plans replaced no dtypes."""
    for device, lacking in (("neuron", 2), ("mps", 3), ("npu", 2), ("hpu", 1), ("mlu", 1), ("xpu", 0)):
        plan = make_plan(anyaccel.sheet(device), PipelineFacts(pipeline="Test"), PlacementOptions(), device=device)
        assert len(replacements_of(plan)) == lacking, device


@pytest.mark.parametrize("default", [False, True])
def test_dtypes_are_replaced_without_the_emulator(default: bool) -> None:
    """The emulator also creates tensors on the CPU; on the meta device, only the handlers change dtypes."""
    meta, replaced = torch.device("meta"), {FLOAT64: torch.float32, INT64: torch.int32}
    mode = ModelFunctionMode(make_handlers(meta, replaced, {}))
    on = torch.ones(2, 3, device=meta)
    torch.set_default_device(meta if default else None)
    try:
        with mode:
            for name, program in (PROGRAMS | INTEGER_SOURCES).items():
                if "NumPy" not in name and "mask" not in name and name != "as_tensor of a tensor":
                    actual = program(on, meta)
                    assert actual.device == meta, name
                    assert actual.dtype not in replaced, name
            if default:
                assert torch.tensor([1, 2]).dtype is torch.int32
                assert torch.arange(3).dtype is torch.int32
                assert torch.zeros(2, dtype=FLOAT64).dtype is torch.float32
            assert torch.tensor([1, 2], device="cpu").dtype is INT64
            assert torch.zeros(2, dtype=FLOAT64, device="cpu").dtype is FLOAT64
            assert on.new_tensor([1, 2], device="cpu").dtype is torch.float32
            assert on.new_tensor([1, 2], dtype=None).dtype is torch.float32
            assert torch.as_tensor(on, dtype=FLOAT64).dtype is torch.float32
    finally:
        torch.set_default_device(None)


def test_integers_that_do_not_fit_are_rejected() -> None:
    """`aminmax` and not a wrapped value: 2**40 would become 0."""
    meta = torch.device("meta")
    mode = ModelFunctionMode(make_handlers(meta, {INT64: torch.int32}, {}))
    large = torch.tensor([2**40])
    programs: tuple[Any, ...] = (
        lambda: torch.tensor([0, 2**40], device=meta), lambda: large.to(meta), lambda: (-large).to("meta", INT64),
        lambda: torch.as_tensor(large, device=meta), lambda: HostTransfer(meta, {INT64: torch.int32}).to_device(large),
    )  # fmt: skip
    for program in programs:
        with mode, pytest.raises(UsageError, match="does not fit in int32"):
            program()
    with mode:
        assert torch.tensor([2**31 - 1, -(2**31)], device=meta).dtype == torch.int32
        assert torch.zeros(0, dtype=INT64).to(meta).dtype == torch.int32


def test_parse_to_arguments_accepts_every_signature() -> None:
    tensor, other = torch.ones(2), torch.ones(1, dtype=torch.float16, device="meta")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    for args, kwargs, expected in (
        ((), {}, (cpu, torch.float32)),
        (("meta",), {}, (meta, torch.float32)),
        ((meta, FLOAT64), {}, (meta, FLOAT64)),
        ((FLOAT64,), {}, (cpu, FLOAT64)),
        ((FLOAT64, True), {}, (cpu, FLOAT64)),
        ((other,), {}, (meta, torch.float16)),
        ((), {"other": other}, (meta, torch.float16)),
        ((), {"device": "meta", "dtype": FLOAT64}, (meta, FLOAT64)),
        ((None, FLOAT64), {}, (cpu, FLOAT64)),
        ((meta, None, False), {"copy": True}, (meta, torch.float32)),
    ):
        assert parse_to_arguments(tensor, args, kwargs) == expected, (args, kwargs)


def test_empty_returns_zeros_on_mps() -> None:
    """Covers every factory; CPU tensors are not changed."""

    def use(accelerator: VirtualAccelerator) -> None:
        plan, target = plan_for(accelerator), accelerator.device()
        for mode in (make_pipeline_function_mode(plan, target), make_model_function_mode(plan, target)):
            assert mode is not None
            with torch.no_grad(), mode:
                on = torch.ones(2, 3, 4, 4).to(target)
                tensors = [
                    torch.empty(2, 3, device=target),
                    torch.empty(size=(2, 3), device=target),
                    torch.empty(2, 3, 4, 4, device=target, memory_format=torch.channels_last),
                    torch.empty_like(on),
                    torch.empty_like(on, dtype=torch.float64),
                    torch.empty_like(torch.ones(2), device=target),
                    torch.empty_strided((2, 3), (3, 1), device=target),
                    on.new_empty(4),
                    on.new_empty((4,), dtype=torch.float64),
                ]
                assert torch.empty(size=(2,)).device.type == "cpu"
                assert torch.empty(2, device="cpu").shape == (2,)
            for index, tensor in enumerate(tensors):
                assert tensor.device == target, index
                assert tensor.dtype is torch.float32, index
                assert tensor.cpu().abs().max() == 0, index
            assert tensors[2].is_contiguous(memory_format=torch.channels_last)

    run_forked("mps", use, strict=True)


def test_baddbmm_with_beta_zero_ignores_its_input() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        plan, target = plan_for(accelerator), accelerator.device()
        mode = make_model_function_mode(plan, target)
        assert mode is not None
        left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
        spoiled = torch.full((2, 3, 5), float("nan")).to(target)
        with torch.no_grad(), mode:
            on_device = left.to(target), right.to(target)
            for actual, expected in (
                (torch.baddbmm(spoiled, *on_device, beta=0), left @ right),
                (
                    torch.baddbmm(spoiled, batch1=on_device[0], batch2=on_device[1], beta=0, alpha=0.5),
                    left @ right * 0.5,
                ),
                (spoiled.baddbmm(*on_device, beta=0), left @ right),
                (torch.addmm(spoiled[0], on_device[0][0], on_device[1][0], beta=0), left[0] @ right[0]),
                (torch.baddbmm(torch.ones_like(spoiled), *on_device, beta=2, alpha=3), 2 + 3 * (left @ right)),
            ):
                torch.testing.assert_close(actual.cpu(), expected)
        assert accelerator.ledger.rows("wrong") == []

    run_forked("mps", use, strict=True)


# Inputs of the denoisers

DENOISERS = (
    "stable-diffusion", "stable-diffusion-xl", "flux", "stable-diffusion-3", "pixart-alpha", "flux-2-klein", "sana",
    "dit", "kandinsky-2-2", "ddpm", "wan", "stable-audio", "qwen-image",
)  # fmt: skip
"""One pipeline for each kind of denoiser, because running all of them is slow."""


def record_inputs(pipe: Any) -> dict[str, list[tuple[str, torch.dtype, str]]]:
    """Record the name, dtype and device of every tensor that reaches a denoiser, after input adaptation."""
    seen: dict[str, list[tuple[str, torch.dtype, str]]] = {}
    for name in read_facts(pipe).denoisers:
        model = getattr(pipe, name)
        names = list(inspect.signature(model.forward).parameters)
        records = seen[name] = []

        def record(
            forward: Any,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            names: list[str] = names,
            records: list[tuple[str, torch.dtype, str]] = records,
        ) -> Any:
            for key, value in [*zip(names, args, strict=False), *kwargs.items()]:
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor):
                        records.append((key, tensor.dtype, tensor.device.type))
                    elif key in ("timestep", "timesteps"):
                        records.append((key, torch.int64, type(tensor).__name__))
            return forward(*args, **kwargs)

        set_override(model, Slot.COMPILE, record)
    return seen


def check_denoisers(device: str, names: list[str]) -> None:
    def use(accelerator: VirtualAccelerator) -> dict[str, list[str]]:
        warnings.simplefilter("ignore")
        wrong: dict[str, list[str]] = {}
        for name in names:
            pipe: Any = anyaccel.place(recipes()[name].make(), device, dtype=torch.float32)
            seen = record_inputs(pipe)
            run(recipes()[name], pipe)
            for model, records in seen.items():
                problems = {f"{model}.{key} {dtype} on {target}" for key, dtype, target in records
                         if dtype in (FLOAT64, INT64) or target != device}  # fmt: skip
                if problems:
                    wrong[name] = sorted(problems)
            if seen and not any(seen.values()):
                wrong[name] = ["no denoiser ran"]
        return wrong

    assert run_forked(device, use, timeout_s=3000) == {}


def available(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in recipes()]


@pytest.mark.long
@NEEDS_RECIPES
def test_denoisers_get_no_64_bit_inputs() -> None:
    names = available(DENOISERS)
    assert len(names) >= 12
    check_denoisers("neuron", names)


@NEEDS_RECIPES
@pytest.mark.parametrize(
    ("name", "denoiser"),
    [("z-image", "transformer"), ("wuerstchen", "decoder"), ("amused", "transformer"), ("flux", "transformer")],
)
def test_denoisers_are_found_by_any_timestep_name(name: str, denoiser: str) -> None:
    """The argument is `t` in Z-Image and `r` in Wuerstchen; aMUSEd has none."""
    assert denoiser in read_facts(recipes()[name].make()).denoisers


@NEEDS_RECIPES
@pytest.mark.slow
@pytest.mark.parametrize("device", ["neuron", "mps", "npu"])
def test_no_denoiser_gets_64_bit_inputs(device: str) -> None:
    denoise = [name for name in recipes() if name not in ("easy-animate-inpaint", "attend-and-excite")]
    check_denoisers(device, denoise)
