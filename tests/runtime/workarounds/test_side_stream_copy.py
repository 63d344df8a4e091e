"""Overlapped copies: calls that share a device do not wait for each other's work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from anyaccel.backends.device import OpenDevice, open_device
from anyaccel.backends.driver import Driver
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import NotFiniteError
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement_state import find_placement, set_placement
from anyaccel.runtime.workarounds.side_stream_copy import SideStreamCopy
from anyaccel.server.batching.pipeline_copy import light_copy

DEVICE, RECIPE, SIDE = "hpu", "stable-diffusion", 8
pytestmark = pytest.mark.usefixtures("pipelines_imported")


class RecordingDriver(Driver):
    """A virtual device's driver with events, which records its calls."""

    has_events = True

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.sheet)
        self.seen: list[Any] = []

    def record_event(self, index: int) -> Callable[[], None]:
        self.seen.append("record_event")
        return lambda: self.seen.append("wait")

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.seen.append(("send", tuple(tensor.shape)))
        return tensor.to(device)

    @contextmanager
    def side_stream(self, index: int) -> Iterator[None]:
        self.seen.append("side_stream")
        yield
        self.seen.append("back")


def make_pipe() -> tuple[Any, RecordingDriver]:
    pipe = place(recipes()[RECIPE].make(), DEVICE, dtype="float32")
    placement = find_placement(pipe)
    assert placement is not None
    driver = RecordingDriver(placement.opened.driver)
    set_placement(pipe, replace(placement, opened=replace(placement.opened, driver=driver)))
    return pipe, driver


def call(pipe: Any, **changes: Any) -> Any:
    arguments = {name: value for name, value in recipes()[RECIPE].call().items() if name != "generator"}
    return pipe(**{**arguments, "seed": 7, "output_type": "np", **changes})


def test_shared_calls_copy_noise_and_image_on_the_side_stream() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe, driver = make_pipe()
        single = call(pipe).images
        before = list(driver.seen)
        shared = call(light_copy(pipe)).images
        return single, before, shared, driver.seen

    single, before, shared, seen = run_forked(DEVICE, use)
    assert numpy.array_equal(single, shared)
    assert before == [], "a call that does not share the device copies directly"
    copied = [event for event in seen if event[0] == "send"]
    assert any(shape[0] == 1 and len(shape) == 4 for _, shape in copied), f"the noise was not copied: {copied}"
    events = " ".join(event for event in seen if event[0] != "send")
    assert "record_event wait side_stream back" in events, "the image is read on the side stream after an event"
    assert events.endswith("wait side_stream back"), "the last read is the NaN check"
    assert events.count("wait side_stream back") == events.count("wait") == events.count("side_stream"), (
        "nothing else may wait"
    )


def test_coefficients_of_a_scheduler_are_copied_without_waiting() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe, driver = make_pipe()
        pipe.scheduler = UniPCMultistepScheduler(solver_order=3)  # type: ignore[no-untyped-call]
        call(pipe, num_inference_steps=5)
        return driver.seen

    seen = run_forked(DEVICE, use)
    assert ("send", (2,)) in seen, "the weights of two earlier steps"
    assert {event[0] for event in seen} == {"send"}


def test_only_plain_dense_tensors_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor.clone()

    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    driver = type("DriverWithEvents", (Driver,), {"has_events": True})(open_device("cpu").sheet)
    dense, expanded = torch.randn(2, 3), torch.randn(2, 1).expand(2, 3)
    for tensor in (dense, expanded, dense.to_sparse()):
        assert torch.equal(driver.send(tensor, torch.device("cpu")).to_dense(), tensor.to_dense())
    assert [tensor is dense for tensor in pinned] == [True]


def test_nan_in_a_shared_call_is_detected() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe, driver = make_pipe()
        with torch.no_grad():
            pipe.unet.conv_out.bias.fill_(float("nan"))
        try:
            call(light_copy(pipe))
        except NotFiniteError as error:
            return str(error), driver.seen
        return "", driver.seen

    message, seen = run_forked(DEVICE, use)
    assert "unet" in message
    assert seen[-3:] == ["wait", "side_stream", "back"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_copies_keep_values_and_dtypes(dtype: torch.dtype | None) -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        placement = find_placement(make_pipe()[0])
        assert placement is not None
        copier = SideStreamCopy(placement.opened)
        handlers = copier.make_handlers({})
        values, device = torch.randn(SIDE, SIDE), placement.device
        dtype_args = () if dtype is None else (dtype,)
        expected = values.to(*dtype_args) if dtype_args else values
        to, type_as, to_cpu = handlers[torch.Tensor.to], handlers[torch.Tensor.type_as], handlers[torch.Tensor.cpu]
        on_device = to(torch.Tensor.to, (values, device, *dtype_args), {})
        copies = [
            to_cpu(torch.Tensor.cpu, (on_device,), {}),
            to(torch.Tensor.to, (on_device, "cpu"), {}),
            to(torch.Tensor.to, (on_device,), {"device": torch.device("cpu"), "copy": True}),
            type_as(torch.Tensor.type_as, (on_device, expected), {}),
            to(torch.Tensor.to, (type_as(torch.Tensor.type_as, (values, on_device), {}), "cpu"), {}),
        ]
        cast = to(torch.Tensor.to, (values, torch.float64), {})
        return on_device.device.type, on_device.dtype, [copy.equal(expected) for copy in copies], cast.dtype

    device_type, device_dtype, is_equal, cast_dtype = run_forked(DEVICE, use)
    assert device_type == DEVICE
    assert device_dtype == (dtype or torch.float32)
    assert all(is_equal), is_equal
    assert cast_dtype == torch.float64, "a cast without a copy is left to torch"


def test_drivers_without_events_copy_directly() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe = place(recipes()[RECIPE].make(), DEVICE, dtype="float32")
        placement = find_placement(pipe)
        assert placement is not None
        opened: OpenDevice = placement.opened
        copied = opened.driver.send(torch.ones(SIDE), opened.torch_device)
        with opened.driver.side_stream(opened.index):
            return opened.driver.has_events, copied.device.type, copied.cpu().sum().item()

    assert run_forked(DEVICE, use) == (False, DEVICE, SIDE)
