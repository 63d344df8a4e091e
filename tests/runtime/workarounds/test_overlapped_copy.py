"""The ferry: where calls share a device, what goes there and comes back waits for nothing that others asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from anyaccel.backends.device import OpenDevice
from anyaccel.backends.driver import Driver
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import NotFiniteError
from anyaccel.recipes import recipes
from anyaccel.runtime.pipeline import place
from anyaccel.runtime.placement_state import find_placement, keep_placement
from anyaccel.runtime.workarounds.overlapped_copy import OverlappedCopy
from anyaccel.server.batching.shared_pipeline import light_copy

DEVICE, RECIPE, SIDE = "hpu", "stable-diffusion", 8
pytestmark = pytest.mark.usefixtures("pipelines_imported")


class Noting(Driver):
    """The driver of a virtual device, as one whose work is marked; what it is asked for is written down."""

    marks = True

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


def make_pipe() -> tuple[Any, Noting]:
    pipe = place(recipes()[RECIPE].make(), DEVICE, dtype="float32")
    placement = find_placement(pipe)
    assert placement is not None
    driver = Noting(placement.opened.driver)
    keep_placement(pipe, replace(placement, opened=replace(placement.opened, driver=driver)))
    return pipe, driver


def call(pipe: Any) -> Any:
    given = {name: value for name, value in recipes()[RECIPE].call().items() if name != "generator"}
    return pipe(**{**given, "seed": 7, "output_type": "np"})


def test_a_call_among_others_sends_its_noise_and_fetches_its_picture_by_the_ferry() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe, driver = make_pipe()
        alone = call(pipe).images
        before = list(driver.seen)
        shared = call(light_copy(pipe)).images
        return alone, before, shared, driver.seen

    alone, before, shared, seen = run_forked(DEVICE, use)
    assert numpy.array_equal(alone, shared)
    assert before == [], "a call that has the device for itself goes the plain way"
    sent = [one for one in seen if one[0] == "send"]
    assert any(shape[0] == 1 and len(shape) == 4 for _, shape in sent), f"the noise was not sent: {sent}"
    told = " ".join(one for one in seen if one[0] != "send")
    assert "record_event wait side_stream back" in told, "the picture is waited for, and fetched aside"
    assert told.endswith("wait side_stream back"), "at last, whether all is finite"
    assert told.count("wait side_stream back") == told.count("wait") == told.count("side_stream"), (
        "nothing else was waited for"
    )


def test_a_picture_that_is_not_finite_is_found_beside_the_others() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe, driver = make_pipe()
        with torch.no_grad():
            pipe.unet.conv_out.bias.fill_(float("nan"))
        try:
            call(light_copy(pipe))
        except NotFiniteError as error:
            return str(error), driver.seen
        return "", driver.seen

    said, seen = run_forked(DEVICE, use)
    assert "unet" in said
    assert seen[-3:] == ["wait", "side_stream", "back"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_keep_their_values_and_types_in_every_spelling(dtype: torch.dtype | None) -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        placement = find_placement(make_pipe()[0])
        assert placement is not None
        ferry = OverlappedCopy(placement.opened)
        handlers = ferry.make_handlers({})
        values, device = torch.randn(SIDE, SIDE), placement.device
        more = () if dtype is None else (dtype,)
        expected = values.to(*more) if more else values
        move, alike, home = handlers[torch.Tensor.to], handlers[torch.Tensor.type_as], handlers[torch.Tensor.cpu]
        there = move(torch.Tensor.to, (values, device, *more), {})
        back = [
            home(torch.Tensor.cpu, (there,), {}),
            move(torch.Tensor.to, (there, "cpu"), {}),
            move(torch.Tensor.to, (there,), {"device": torch.device("cpu"), "copy": True}),
            alike(torch.Tensor.type_as, (there, expected), {}),
            move(torch.Tensor.to, (alike(torch.Tensor.type_as, (values, there), {}), "cpu"), {}),
        ]
        kept = move(torch.Tensor.to, (values, torch.float64), {})
        return there.device.type, there.dtype, [one.equal(expected) for one in back], kept.dtype

    kind, type_, same, kept = run_forked(DEVICE, use)
    assert kind == DEVICE
    assert type_ == (dtype or torch.float32)
    assert all(same), same
    assert kept == torch.float64, "what stays where it is is none of the ferry's"


def test_without_marks_a_driver_goes_the_plain_way() -> None:
    def use(accelerator: VirtualAccelerator) -> Any:
        pipe = place(recipes()[RECIPE].make(), DEVICE, dtype="float32")
        placement = find_placement(pipe)
        assert placement is not None
        opened: OpenDevice = placement.opened
        sent = opened.driver.send(torch.ones(SIDE), opened.torch_device)
        with opened.driver.side_stream(opened.index):
            return opened.driver.marks, sent.device.type, sent.cpu().sum().item()

    assert run_forked(DEVICE, use) == (False, DEVICE, SIDE)
