"""Number types that a device lacks: wherever one would arise there, the type that stands in for it does."""

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
from tests.conftest import NEEDS_RECIPES
from tests.emulator.forked import DEVICES

Tensor = torch.Tensor


def plan_for(accelerator: VirtualAccelerator) -> Plan:
    sheet = open_device(accelerator.name).sheet
    return make_plan(sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name)


def replacements_of(plan: Plan) -> dict[torch.dtype, torch.dtype]:
    pairs = [(name, instead) for name, instead in plan.replacements.value if instead != "pairs"]
    return {getattr(torch, name): getattr(torch, instead) for name, instead in pairs}


count_to: Any = torch.arange
WIDE, WHOLE = torch.float64, torch.int64
PROGRAMS: dict[str, Any] = {
    # Factories, by what is asked for and by what they give by themselves.
    "zeros": lambda on, d: torch.zeros(2, 3, dtype=WIDE, device=d),
    "ones": lambda on, d: torch.ones((2, 3), dtype=WHOLE, device=str(d)),
    "full": lambda on, d: torch.full((2,), 3, dtype=WIDE, device=d),
    "full of whole numbers": lambda on, d: torch.full((2,), 3, device=d),
    "full of numbers": lambda on, d: torch.full((2,), 3.5, device=d),
    "full of truth": lambda on, d: torch.full((2,), True, device=d),
    "full of falsehood, by name": lambda on, d: torch.full((2,), fill_value=False, device=d),
    "arange": lambda on, d: torch.arange(5, device=d),
    "arange by name": lambda on, d: torch.arange(start=1, end=9, step=2, device=d),
    "arange of numbers": lambda on, d: torch.arange(0, 1, 0.25, device=d),
    "arange of a step": lambda on, d: torch.arange(0, 2, step=0.5, device=d),
    "arange in float64": lambda on, d: torch.arange(0, 8, 2, dtype=WIDE, device=d),
    "arange by a number of the host": lambda on, d: count_to(torch.tensor(4, device="cpu"), device=d),
    "linspace": lambda on, d: torch.linspace(0, 1, 5, dtype=WIDE, device=d),
    "logspace": lambda on, d: torch.logspace(0, 1, 5, dtype=WIDE, device=d),
    "eye": lambda on, d: torch.eye(3, dtype=WIDE, device=d),
    "indices": lambda on, d: torch.tril_indices(3, 3, device=d),
    "zeros_like": lambda on, d: torch.zeros_like(torch.ones(2, dtype=WIDE), device=d),
    "ones_like": lambda on, d: torch.ones_like(on, dtype=WIDE),
    "full_like": lambda on, d: torch.full_like(on, 2, dtype=WHOLE),
    "new_zeros": lambda on, d: on.new_zeros(2, dtype=WIDE),
    "new_ones": lambda on, d: on.new_ones((2,), dtype=WHOLE),
    "new_full": lambda on, d: on.new_full((2,), 1, dtype=WIDE),
    "a type that is there": lambda on, d: torch.zeros(2, dtype=torch.float16, device=d),
    "truth": lambda on, d: torch.zeros(2, dtype=torch.bool, device=d),
    # From data.
    "tensor": lambda on, d: torch.tensor([1, 2], device=d),
    "tensor of numbers": lambda on, d: torch.tensor([1.5, 2.0], device=d),
    "tensor from NumPy": lambda on, d: torch.tensor(numpy.array([1.5, 2.5]), device=d),
    "tensor by name": lambda on, d: torch.tensor(data=[1.5], dtype=WIDE, device=str(d)),
    "a number": lambda on, d: torch.tensor(7, device=d),
    "as_tensor from NumPy": lambda on, d: torch.as_tensor(numpy.arange(3), device=d),
    "as_tensor of a tensor": lambda on, d: torch.as_tensor(torch.ones(2, dtype=WIDE), device=d),
    "as_tensor there": lambda on, d: torch.as_tensor(on, dtype=WIDE),
    "asarray": lambda on, d: torch.asarray(numpy.ones(2), device=d),
    "new_tensor": lambda on, d: on.new_tensor([1, 2]),
    "new_tensor of another type": lambda on, d: on.new_tensor([1, 2], dtype=WIDE),
    "new_tensor from NumPy": lambda on, d: on.new_tensor(numpy.ones(2)),
    "from_numpy": lambda on, d: torch.from_numpy(numpy.ones(2)).to(d),
    # Casts and moves, in every spelling.
    "to, device and type": lambda on, d: torch.ones(2).to(d, WIDE),
    "to, by name": lambda on, d: torch.ones(2).to(dtype=WHOLE, device=str(d)),
    "to, like another": lambda on, d: torch.ones(2, dtype=WIDE).to(on),
    "to, type alone": lambda on, d: on.to(WIDE),
    "to, type and copy": lambda on, d: on.to(WIDE, copy=True),
    "to, as it is": lambda on, d: torch.ones(2, dtype=WIDE).to(d, non_blocking=True),
    "double": lambda on, d: on.double(),
    "long": lambda on, d: on.long(),
    "type": lambda on, d: on.type(WIDE),
    "type_as": lambda on, d: torch.ones(2, dtype=WIDE).type_as(on),
    # What goes on with the types that stand in.
    "embedding": lambda on, d: torch.nn.functional.embedding(torch.arange(2, device=d), on),
    "indexing": lambda on, d: on[torch.tensor([1, 0], device=d)],
    "gather": lambda on, d: on.gather(1, torch.zeros(2, 1, dtype=WHOLE, device=d)),
    "gather by name": lambda on, d: torch.gather(on, dim=1, index=torch.zeros(2, 1, dtype=WHOLE, device=d)),
    "scatter": lambda on, d: on.scatter(1, torch.zeros(2, 1, dtype=WHOLE, device=d), 5.0),
    "take_along_dim": lambda on, d: torch.take_along_dim(on, torch.zeros(2, 1, dtype=WHOLE, device=d), dim=1),
    "index_select": lambda on, d: on.index_select(0, torch.tensor([1], device=d)),
    "one_hot": lambda on, d: torch.nn.functional.one_hot(torch.arange(3, device=d), 4).float(),
    "where": lambda on, d: torch.where(torch.full((3,), True, device=d), on, 0.0),
    "a mask": lambda on, d: on[torch.full((2,), True, device=d)],
    "a mask of one truth": lambda on, d: on[torch.tensor(True)],
    "timestep embedding": lambda on, d: torch.exp(-torch.arange(4, dtype=WIDE, device=d) / 4).float(),
}
WITH_WHOLE_SOURCES: dict[str, Any] = {
    "scatter, by name": lambda on, d: on.to(torch.int32).scatter(
        1, index=torch.zeros(2, 1, dtype=WHOLE, device=d), src=torch.ones(2, 1, dtype=torch.int32, device=d)
    ),
    "scatter_reduce": lambda on, d: on.to(torch.int32).scatter_reduce(
        1, torch.zeros(2, 1, dtype=WHOLE, device=d), torch.ones(2, 1, dtype=torch.int32, device=d), "sum"
    ),
}
MEETINGS: dict[str, Any] = {
    "a number in float64 and whole numbers": lambda on, d: on.to(torch.int32) * torch.tensor(2.5, dtype=WIDE),
    "a number in float64": lambda on, d: on * torch.tensor(2.5, dtype=WIDE),
    "a number inside a table": lambda on, d: on * torch.linspace(0, 1, 5, dtype=WIDE)[3],
    "a row in float64": lambda on, d: on + torch.arange(3, dtype=WIDE),
    "a row that is first": lambda on, d: torch.arange(3, dtype=WIDE) * on,
    "a list": lambda on, d: torch.cat([on, torch.ones(1, 3, dtype=WIDE)]),
    "whole numbers": lambda on, d: on[torch.arange(2)],
}
"""Tensors of the host that meet the device's, which only the glue around the models has."""


def check(name: str, program: Any, seam: Any, device: torch.device, replaced: dict[torch.dtype, torch.dtype]) -> None:
    """The program gives there what it gives on the host, in the types that stand in."""
    values = torch.arange(6.0).reshape(2, 3)
    expected = program(values, torch.device("cpu"))
    with torch.no_grad(), seam:
        found = program(values.to(device), device)
    expected = expected.to(replaced.get(expected.dtype, expected.dtype))
    assert found.device == device, name
    if name not in MEETINGS:
        assert found.dtype is expected.dtype, name
    assert found.dtype not in replaced, name
    assert found.shape == expected.shape, name
    torch.testing.assert_close(found.cpu(), expected.to(found.dtype), msg=lambda words: f"{name}: {words}")


@pytest.mark.parametrize("device", DEVICES)
def test_no_lacking_type_arises_on_the_device(device: str) -> None:
    """Around the models and inside them, from factories, data, casts and moves."""

    def use(accelerator: VirtualAccelerator) -> None:
        plan, place = plan_for(accelerator), accelerator.device()
        replaced = replacements_of(plan)
        seams = [make_pipeline_function_mode(plan, place), make_model_function_mode(plan, place)]
        for seam in [seam for seam in seams if seam is not None]:
            for name, program in (PROGRAMS | WITH_WHOLE_SOURCES).items():
                check(name, program, seam, place, replaced)
        for name, program in MEETINGS.items():
            check(name, program, seams[0], place, replaced)
        assert [row for row in accelerator.ledger.rows() if row.effect in ("error", "wrong")] == []

    run_forked(device, use, strict=True)


def test_the_devices_lack_what_their_sheets_say() -> None:
    """So that the test above does not pass because nothing is replaced."""
    for device, lacking in (("neuron", 2), ("mps", 3), ("npu", 2), ("hpu", 1), ("mlu", 1), ("xpu", 0)):
        plan = make_plan(anyaccel.sheet(device), PipelineFacts(pipeline="Test"), PlacementOptions(), device=device)
        assert len(replacements_of(plan)) == lacking, device


@pytest.mark.parametrize("default", [False, True])
def test_from_data_without_the_help_of_the_emulator(default: bool) -> None:
    """A virtual device builds tensors on the host itself: on the meta device the seam is alone."""
    meta, replaced = torch.device("meta"), {WIDE: torch.float32, WHOLE: torch.int32}
    seam = ModelFunctionMode(make_handlers(meta, replaced, {}))
    on = torch.ones(2, 3, device=meta)
    torch.set_default_device(meta if default else None)
    try:
        with seam:
            for name, program in (PROGRAMS | WITH_WHOLE_SOURCES).items():
                if "NumPy" not in name and "mask" not in name and name != "as_tensor of a tensor":
                    found = program(on, meta)
                    assert found.device == meta, name
                    assert found.dtype not in replaced, name
            if default:
                assert torch.tensor([1, 2]).dtype is torch.int32
                assert torch.arange(3).dtype is torch.int32
                assert torch.zeros(2, dtype=WIDE).dtype is torch.float32
            assert torch.tensor([1, 2], device="cpu").dtype is WHOLE
            assert torch.zeros(2, dtype=WIDE, device="cpu").dtype is WIDE
            assert on.new_tensor([1, 2], device="cpu").dtype is torch.float32
            assert on.new_tensor([1, 2], dtype=None).dtype is torch.float32
            assert torch.as_tensor(on, dtype=WIDE).dtype is torch.float32
    finally:
        torch.set_default_device(None)


def test_the_target_of_a_move_is_read_in_every_spelling() -> None:
    tensor, other = torch.ones(2), torch.ones(1, dtype=torch.float16, device="meta")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    for args, kwargs, expected in (
        ((), {}, (cpu, torch.float32)),
        (("meta",), {}, (meta, torch.float32)),
        ((meta, WIDE), {}, (meta, WIDE)),
        ((WIDE,), {}, (cpu, WIDE)),
        ((WIDE, True), {}, (cpu, WIDE)),
        ((other,), {}, (meta, torch.float16)),
        ((), {"other": other}, (meta, torch.float16)),
        ((), {"device": "meta", "dtype": WIDE}, (meta, WIDE)),
        ((None, WIDE), {}, (cpu, WIDE)),
        ((meta, None, False), {"copy": True}, (meta, torch.float32)),
    ):
        assert parse_to_arguments(tensor, args, kwargs) == expected, (args, kwargs)


def test_memory_that_is_read_before_it_is_written_holds_zeros_on_mps() -> None:
    """However it was asked for, and the host's is left alone."""

    def use(accelerator: VirtualAccelerator) -> None:
        plan, place = plan_for(accelerator), accelerator.device()
        for seam in (make_pipeline_function_mode(plan, place), make_model_function_mode(plan, place)):
            assert seam is not None
            with torch.no_grad(), seam:
                on = torch.ones(2, 3, 4, 4).to(place)
                made = [
                    torch.empty(2, 3, device=place),
                    torch.empty(size=(2, 3), device=place),
                    torch.empty(2, 3, 4, 4, device=place, memory_format=torch.channels_last),
                    torch.empty_like(on),
                    torch.empty_like(on, dtype=torch.float64),
                    torch.empty_like(torch.ones(2), device=place),
                    torch.empty_strided((2, 3), (3, 1), device=place),
                    on.new_empty(4),
                    on.new_empty((4,), dtype=torch.float64),
                ]
                assert torch.empty(size=(2,)).device.type == "cpu"
                assert torch.empty(2, device="cpu").shape == (2,)
            for place_of, tensor in enumerate(made):
                assert tensor.device == place, place_of
                assert tensor.dtype is torch.float32, place_of
                assert tensor.cpu().abs().max() == 0, place_of
            assert made[2].is_contiguous(memory_format=torch.channels_last)

    run_forked("mps", use, strict=True)


def test_an_argument_that_a_factor_of_nothing_silences_is_not_read() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        plan, place = plan_for(accelerator), accelerator.device()
        seam = make_model_function_mode(plan, place)
        assert seam is not None
        left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
        spoiled = torch.full((2, 3, 5), float("nan")).to(place)
        with torch.no_grad(), seam:
            there = left.to(place), right.to(place)
            for found, expected in (
                (torch.baddbmm(spoiled, *there, beta=0), left @ right),
                (torch.baddbmm(spoiled, batch1=there[0], batch2=there[1], beta=0, alpha=0.5), left @ right * 0.5),
                (spoiled.baddbmm(*there, beta=0), left @ right),
                (torch.addmm(spoiled[0], there[0][0], there[1][0], beta=0), left[0] @ right[0]),
                (torch.baddbmm(torch.ones_like(spoiled), *there, beta=2, alpha=3), 2 + 3 * (left @ right)),
            ):
                torch.testing.assert_close(found.cpu(), expected)
        assert accelerator.ledger.rows("wrong") == []

    run_forked("mps", use, strict=True)


# What goes into the denoisers.

DENOISERS = (
    "stable-diffusion", "stable-diffusion-xl", "flux", "stable-diffusion-3", "pixart-alpha", "flux-2-klein", "sana",
    "dit", "kandinsky-2-2", "ddpm", "wan", "stable-audio", "qwen-image",
)  # fmt: skip
"""Of each kind of denoiser one: the cross product is slow."""


def watch_inputs(pipe: Any) -> dict[str, list[tuple[str, torch.dtype, str]]]:
    """Every tensor that goes into a denoiser: its name, its type and its device; behind what was put on it before."""
    seen: dict[str, list[tuple[str, torch.dtype, str]]] = {}
    for name in read_facts(pipe).denoisers:
        model = getattr(pipe, name)
        names = list(inspect.signature(model.forward).parameters)
        notes = seen[name] = []

        def note(
            forward: Any,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            names: list[str] = names,
            notes: list[tuple[str, torch.dtype, str]] = notes,
        ) -> Any:
            for key, value in [*zip(names, args, strict=False), *kwargs.items()]:
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor):
                        notes.append((key, tensor.dtype, tensor.device.type))
                    elif key in ("timestep", "timesteps"):
                        notes.append((key, torch.int64, type(tensor).__name__))
            return forward(*args, **kwargs)

        set_override(model, Slot.COMPILE, note)
    return seen


def check_denoisers(device: str, names: list[str]) -> None:
    def use(accelerator: VirtualAccelerator) -> dict[str, list[str]]:
        warnings.simplefilter("ignore")
        wrong: dict[str, list[str]] = {}
        for name in names:
            pipe: Any = anyaccel.place(recipes()[name].make(), device, dtype=torch.float32)
            seen = watch_inputs(pipe)
            run(recipes()[name], pipe)
            for model, notes in seen.items():
                kinds = {f"{model}.{key} {dtype} on {place}" for key, dtype, place in notes
                         if dtype in (WIDE, WHOLE) or place != device}  # fmt: skip
                if kinds:
                    wrong[name] = sorted(kinds)
            if seen and not any(seen.values()):
                wrong[name] = ["no denoiser ran"]
        return wrong

    assert run_forked(device, use, timeout_s=3000) == {}


def known(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in recipes()]


@pytest.mark.long
@NEEDS_RECIPES
def test_no_wide_number_goes_into_a_denoiser() -> None:
    names = known(DENOISERS)
    assert len(names) >= 12
    check_denoisers("neuron", names)


@NEEDS_RECIPES
@pytest.mark.parametrize(
    ("name", "denoiser"),
    [("z-image", "transformer"), ("wuerstchen", "decoder"), ("amused", "transformer"), ("flux", "transformer")],
)
def test_the_denoiser_is_known_whatever_it_calls_its_timestep(name: str, denoiser: str) -> None:
    """`t` in Z-Image, `r` in Wuerstchen, none in aMUSEd."""
    assert denoiser in read_facts(recipes()[name].make()).denoisers


@NEEDS_RECIPES
@pytest.mark.slow
@pytest.mark.parametrize("device", ["neuron", "mps", "npu"])
def test_no_wide_number_goes_into_any_denoiser(device: str) -> None:
    denoise = [name for name in recipes() if name not in ("easy-animate-inpaint", "attend-and-excite")]
    check_denoisers(device, denoise)
