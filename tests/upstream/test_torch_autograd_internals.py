"""Checks every entry of torch_autograd_internals.py against the installed torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyaccel.emulator.activation import virtual
from anyaccel.errors import VirtualDeviceError
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.upstream import torch_autograd_internals as internals
from anyaccel.upstream.torch_internals import make_wrapper_subclass


def find_accelerator() -> str:
    return str(torch._C._accelerator_getAccelerator())


@pytest.mark.parametrize("name", ["mps", "hpu", "xpu"])
def test_reported_accelerator(name: str) -> None:
    def use() -> list[str]:
        report, found = internals.ReportedAccelerator(name), [find_accelerator()]
        with report:
            with report:
                found.append(find_accelerator())
            found.append(find_accelerator())
        return [*found, find_accelerator()]

    before = find_accelerator()
    assert call_in_fork(use) == [before, name, name, before]


def test_reported_accelerator_replaces_one_that_torch_supports() -> None:
    def use() -> str:
        # The first one acts as the accelerator that torch was built for.
        with internals.ReportedAccelerator("xpu"), internals.ReportedAccelerator("mps"):
            return find_accelerator()

    assert call_in_fork(use) == "mps"


def test_reported_accelerator_rejects_unknown_hooks() -> None:
    with pytest.raises(VirtualDeviceError, match="cannot compute gradients on a virtual neuron device"):
        internals.ReportedAccelerator("neuron")


def test_backward_raises_without_a_reported_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "_IS_BUILT", 3)  # another layout

    def use() -> None:
        with virtual("mps"):
            torch.autograd.backward(torch.ones(2, device="mps", requires_grad=True).sum())

    with pytest.raises(VirtualDeviceError, match="another layout"):
        call_in_fork(use)


def test_skip_autograd() -> None:
    tensor = torch.ones(2, requires_grad=True)
    with internals.skip_autograd():
        assert not (tensor * 2).requires_grad
    assert (tensor * 2).requires_grad


def test_resume_autograd_records_the_parts_of_a_wrapper() -> None:
    class Wrapper(torch.Tensor):
        part: torch.Tensor

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            with internals.resume_autograd():
                return func(args[0].part)

    def use() -> list[float]:
        part = torch.ones(2, requires_grad=True)
        wrapper = make_wrapper_subclass(Wrapper, part.shape)
        wrapper.part = part
        with internals.record_below_wrapper():
            view = torch.ops.aten.t(wrapper)
        torch.autograd.backward(view.exp().log().sum())
        assert part.grad is not None
        values: list[float] = part.grad.tolist()
        return values

    assert call_in_fork(use) == [1, 1]


def test_ignore_stream_changes() -> None:
    """An exception in a backward pass would abort the process."""

    def use() -> None:
        with virtual("hpu"):  # calls `ignore_stream_changes`
            product = torch.ones(2, device="hpu", requires_grad=True) * 2
            product.register_hook(lambda gradient: gradient.no_such_method())  # type: ignore[no-untyped-call]
            torch.autograd.backward(product.sum())

    with pytest.raises(AttributeError, match="no_such_method"):
        call_in_fork(use)


def test_attention_in_parts() -> None:
    query = torch.randn(1, 1, 3, 4)
    output = internals.attention_in_parts(query, query, query, None, 0.0, False, scale=0.5)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, scale=0.5)
    assert torch.allclose(output, expected, atol=1e-6)


def test_swap_referenced_tensors() -> None:
    def use() -> tuple[list[float], list[float]]:
        first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
        graph = first * first
        internals.swap_referenced_tensors(first, second)
        with pytest.raises(RuntimeError, match="call backward"):
            torch.autograd.backward(graph.sum())
        return first.tolist(), second.tolist()

    assert call_in_fork(use) == ([0, 0], [1, 1])
