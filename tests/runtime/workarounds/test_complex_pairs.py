"""Complex pairs: on devices without complex dtypes, the results match complex64 on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from anyaccel.backends.device import open_device
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import LimitError
from anyaccel.planning import PipelineFacts, PlacementOptions, make_plan
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.runtime.workarounds.complex_factories import make_handlers
from anyaccel.runtime.workarounds.complex_pairs import ComplexPair, make_complex_pair
from anyaccel.runtime.workarounds.function_modes import ModelFunctionMode, make_model_function_mode

Tensor = torch.Tensor
EXAMPLES = 150


def make_mode(accelerator: VirtualAccelerator) -> ModelFunctionMode:
    plan = make_plan(
        open_device(accelerator.name).sheet, PipelineFacts(pipeline="Test"), PlacementOptions(), device=accelerator.name
    )
    assert "complex_pairs" in plan.workarounds.value
    mode = make_model_function_mode(plan, accelerator.device())
    assert mode is not None
    return mode


# Random programs: a pool of complex tensors of one shape, and instructions that add to it.


def _other(pool: list[Tensor], value: int) -> Tensor:
    return pool[value % len(pool)]


REAL = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
ROW = torch.tensor([2.0, -1.0, 0.5])
MASK = torch.tensor([[True, False, True], [False, True, False]])
SCALARS = (2, -0.5, 1 + 2j, -1j)

OPERATIONS: dict[str, Any] = {
    "add": lambda a, b, n, real: a + b,
    "subtract": lambda a, b, n, real: a - b,
    "multiply": lambda a, b, n, real: a * b,
    "divide": lambda a, b, n, real: a / (b.abs() + 1),
    "divide by a pair": lambda a, b, n, real: a / (b * b.conj() + 1),
    "add a multiple": lambda a, b, n, real: torch.add(a, b, alpha=2),
    "a scalar times": lambda a, b, n, real: SCALARS[n % 4] * a,
    "divided by a scalar": lambda a, b, n, real: a / SCALARS[n % 4],
    "plus a scalar": lambda a, b, n, real: a + SCALARS[n % 4],
    "minus a scalar": lambda a, b, n, real: a - SCALARS[n % 4],
    "plus a real tensor": lambda a, b, n, real: a + real(REAL),
    "a real tensor minus": lambda a, b, n, real: real(REAL) - a,
    "times a real row": lambda a, b, n, real: a * real(ROW),
    "a row of it plus a real tensor": lambda a, b, n, real: a[0] + real(REAL),
    "a real tensor minus a row of it": lambda a, b, n, real: real(REAL) - a[1],
    "conjugate": lambda a, b, n, real: a.conj(),
    "negate": lambda a, b, n, real: -a,
    "flip": lambda a, b, n, real: a.flip(0),
    "roll": lambda a, b, n, real: a.roll(n % 3, 1),
    "transpose twice": lambda a, b, n, real: a.transpose(0, 1).contiguous().reshape(3, 2).t(),
    "transpose and reshape": lambda a, b, n, real: a.t().reshape(2, 3),
    "a longer view": lambda a, b, n, real: a.flatten().unsqueeze(0).expand(2, 6)[:, :3],
    "concatenate": lambda a, b, n, real: torch.cat([a[:1], b[1:]]),
    "concatenate with a real row": lambda a, b, n, real: torch.cat([a[:1], real(REAL)[1:].to(a.dtype)]),
    "stack": lambda a, b, n, real: torch.stack([a[0], b[n % 2]]),
    "where": lambda a, b, n, real: torch.where(real(MASK), a, b),
    "where with a scalar": lambda a, b, n, real: torch.where(real(MASK), a, 1.0),
    "pad": lambda a, b, n, real: torch.nn.functional.pad(a[:, 1:], (1, 0), value=float(n)),
    "sum": lambda a, b, n, real: a.sum(dim=n % 2, keepdim=True).expand(2, 3).clone() * 0.25,
    "mean": lambda a, b, n, real: a.mean(dim=-1, keepdim=True) + b,
    "cumsum": lambda a, b, n, real: a.cumsum(0),
    "split": lambda a, b, n, real: torch.cat(a.split([1, 2], dim=1)[::-1], dim=1),
    "unbind": lambda a, b, n, real: torch.stack(a.unbind(0)[::-1]),
    "gather rows": lambda a, b, n, real: a[real(torch.tensor([1, 0]))],
    "real and back": lambda a, b, n, real: torch.view_as_complex(torch.view_as_real(a.resolve_conj()) * 0.5),
    "parts and back": lambda a, b, n, real: torch.complex(a.imag, b.real),
    "one part broadcast": lambda a, b, n, real: torch.complex(a.real, b.imag[:1]),
    "polar": lambda a, b, n, real: torch.polar(a.abs() + 1, b.angle()),
    "write": lambda a, b, n, real: _write(a, b),
    "write by a list": lambda a, b, n, real: _put(a, (slice(None), [0, 2]), b[:, 1:]),
    "write by a mask": lambda a, b, n, real: _put(a, real(MASK), SCALARS[n % 4]),
    "write by tensors": lambda a, b, n, real: _put(a, (torch.tensor(0), torch.tensor([n % 3, 1])), b[1, :2]),
    "columns by a list": lambda a, b, n, real: a[:, [2, 0, n % 3]] + a[:, (0, 1, 2)],
    "a real tensor times": lambda a, b, n, real: real(ROW) * a,
    "assign data": lambda a, b, n, real: _assign_data(a, b),
    "out": lambda a, b, n, real: torch.mul(a, 2 - n, out=b.clone()),
    "out of a real tensor": lambda a, b, n, real: torch.add(real(REAL), a, out=b.clone()),
    "abs with out": lambda a, b, n, real: torch.abs(a, out=b.real.clone()) * b,
    "cumsum with out": lambda a, b, n, real: torch.cumsum(a, 0, out=b.clone()),
    "copy": lambda a, b, n, real: a.clone(),
    "zeros": lambda a, b, n, real: torch.zeros_like(a) + b,
    "ones": lambda a, b, n, real: torch.ones_like(a) * b,
    "cast to complex": lambda a, b, n, real: real(REAL).to(torch.complex64) * b,
    "ones_like of a real tensor": lambda a, b, n, real: torch.ones_like(real(REAL), dtype=torch.complex64) - b,
    "transform": lambda a, b, n, real: torch.fft.ifft(torch.fft.fft(a) * b),
}


WITHOUT_GRADIENT = ("abs with out", "assign data", "cumsum with out", "out", "out of a real tensor")


def _write(a: Tensor, b: Tensor) -> Tensor:
    target = a.clone()
    target[0] = b[1]
    return target


def _assign_data(a: Tensor, b: Tensor) -> Tensor:
    target = a.clone()
    target.data = target.data * b.data
    return target


def _put(a: Tensor, index: Any, value: Any) -> Tensor:
    target = a.clone()
    target[index] = value
    return target


def run_program(program: list[tuple[str, int, int, int]], pool: list[Tensor], real: Any) -> list[Tensor]:
    pool = list(pool)
    for name, first, second, value in program:
        result = OPERATIONS[name](_other(pool, first), _other(pool, second), value, real)
        pool.append(result * 0.1 if name in ("multiply", "cumsum", "transform", "add a multiple") else result)
    return pool


INDEX = st.integers(0, 11)
CPU_TENSORS = [torch.randn(2, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def programs(names: list[str]) -> st.SearchStrategy[list[tuple[str, int, int, int]]]:
    return st.lists(st.tuples(st.sampled_from(names), INDEX, INDEX, INDEX), min_size=2, max_size=12)


def search(names: list[str], mode: ModelFunctionMode, device: torch.device) -> int:
    """Run random programs on pairs and on complex tensors; a failure shows the shortest program."""
    examples = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(programs(names))
    def check(program: list[tuple[str, int, int, int]]) -> None:
        nonlocal examples
        examples += 1
        expected = run_program(program, CPU_TENSORS, lambda tensor: tensor)
        with mode:
            actual = run_program(
                program, [make_complex_pair(tensor, device) for tensor in CPU_TENSORS], lambda tensor: tensor.to(device)
            )
        for position, (pair, value) in enumerate(zip(actual, expected, strict=True)):
            assert isinstance(pair, ComplexPair), position
            assert pair.shape == value.shape, position
            assert pair.dtype is torch.complex64, position
            assert pair.device == device, position
            torch.testing.assert_close(read(pair), value.resolve_conj(), rtol=1e-3, atol=1e-4)

    with torch.no_grad():
        check()
    return examples


def read(pair: ComplexPair) -> Tensor:
    return torch.complex(pair.real_part.cpu(), pair.imaginary_part.cpu())


@pytest.mark.parametrize("device", ["hpu", "neuron"])
def test_random_programs_agree_with_complex64(device: str) -> None:
    def use(accelerator: VirtualAccelerator) -> int:
        names = sorted(OPERATIONS)
        examples = search(names, make_mode(accelerator), accelerator.device())
        assert [row for row in accelerator.ledger.rows() if row.effect in ("error", "wrong")] == []
        return examples

    assert run_forked(device, use, strict=True) >= EXAMPLES


def test_random_programs_agree_on_pairs_of_plain_tensors() -> None:
    """All operations, as on a real device; here the parts are CPU tensors."""
    mode = ModelFunctionMode(make_handlers(torch.device("cpu"), {}))
    names = sorted(set(OPERATIONS) - {"transform"})  # always runs on the CPU
    assert search(names, mode, torch.device("cpu")) >= EXAMPLES


def test_every_operation_agrees_with_complex64() -> None:
    # Random programs may not cover every operation.
    def use(accelerator: VirtualAccelerator) -> list[str]:
        mode, device = make_mode(accelerator), accelerator.device()
        wrong = []
        for name in sorted(OPERATIONS):
            for value in range(4):
                expected = OPERATIONS[name](CPU_TENSORS[0], CPU_TENSORS[1], value, lambda tensor: tensor)
                with torch.no_grad(), mode:
                    on_device = [tensor.to(device) for tensor in CPU_TENSORS]
                    actual = OPERATIONS[name](on_device[0], on_device[1], value, lambda tensor: tensor.to(device))
                same = actual.shape == expected.shape and torch.allclose(
                    actual.cpu(), expected.resolve_conj(), rtol=1e-4, atol=1e-5
                )
                if not same or not isinstance(actual, ComplexPair):
                    wrong.append(f"{name} {value}")
        return wrong

    assert run_forked("hpu", use, strict=True) == []


def differentiate(name: str, device: torch.device | str) -> list[Tensor]:
    """Return the gradients of an operation for the real and imaginary parts of its two inputs."""
    inputs = [torch.view_as_real(tensor).to(device).requires_grad_() for tensor in CPU_TENSORS]
    first, second = (torch.view_as_complex(tensor) for tensor in inputs)
    result = OPERATIONS[name](first, second, 1, lambda tensor: tensor.to(device))
    torch.autograd.backward((torch.view_as_real(result.resolve_conj()) * 2 + result.real[..., None]).square().sum())
    return [tensor.new_zeros(()) if tensor.grad is None else tensor.grad.cpu() for tensor in inputs]


def test_every_gradient_agrees_with_complex64() -> None:
    def use() -> None:
        mode = ModelFunctionMode(make_handlers(torch.device("cpu"), {}))
        for name in sorted(set(OPERATIONS) - {"transform", *WITHOUT_GRADIENT}):
            expected = differentiate(name, "cpu")
            with mode:
                torch.testing.assert_close(differentiate(name, "cpu"), expected, msg=name)

    call_in_fork(use)


def test_gradients_on_a_device() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        for name in ("multiply", "conjugate", "concatenate", "transform"):
            expected = differentiate(name, "cpu")
            with make_mode(accelerator):
                actual = [gradient.cpu() for gradient in differentiate(name, accelerator.device())]
            torch.testing.assert_close(actual, expected, msg=name)

    run_forked("hpu", use, strict=True)


def test_composite_operations_in_inference_mode() -> None:
    pair = ComplexPair(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0]))
    with torch.inference_mode():
        assert pair.real.tolist() == [1.0, 3.0]
        assert pair.imag.tolist() == [2.0, 4.0]
        assert pair.chunk(2)[1].real.tolist() == [3.0]
        assert pair.to(torch.complex64).imag.tolist() == [2.0, 4.0]


def test_real_virtual_tensor_minus_pair() -> None:
    def use(accelerator: VirtualAccelerator) -> bool:
        with torch.no_grad(), make_mode(accelerator):
            real = torch.ones(2, device=accelerator.device())
            return isinstance(real - torch.tensor([1j, 2j]).to(accelerator.device()), ComplexPair)

    assert run_forked("hpu", use, strict=True)


MAKERS: dict[str, Any] = {
    "zeros": lambda device: torch.zeros(2, dtype=torch.complex64, device=device),
    "ones": lambda device: torch.ones((2,), dtype=torch.complex128, device=device),
    "full": lambda device: torch.full((2,), 1 + 2j, device=device),
    "full by name": lambda device: torch.full((2,), fill_value=3j, device=device),
    "tensor": lambda device: torch.tensor([1 + 2j, 3j], device=device),
    "as_tensor": lambda device: torch.as_tensor(torch.tensor([1 + 2j]).numpy(), device=device),
    "new_tensor": lambda device: torch.ones(2, device=device).new_tensor([1j], dtype=torch.complex64),
    "moved": lambda device: torch.tensor([1 + 2j], dtype=torch.complex128).to(device),
    "moved like": lambda device: torch.tensor([1 + 2j]).to(torch.zeros(1, dtype=torch.complex64, device=device)),
    "cast": lambda device: torch.ones(2, device=device).to(torch.complex64),
    "cast and moved": lambda device: torch.ones(2).to(device, torch.complex64),
    "alike": lambda device: torch.zeros_like(torch.ones(2, device=device), dtype=torch.complex64),
    "polar": lambda device: torch.polar(torch.ones(2, device=device), torch.ones(2, device=device)),
    "from parts": lambda device: torch.complex(torch.ones(2, device=device), imag=torch.ones(2, device=device)),
    "transform": lambda device: torch.fft.rfft(torch.ones(4, device=device)),
}


def test_complex_factories_return_pairs() -> None:
    def use(accelerator: VirtualAccelerator) -> None:
        with torch.no_grad(), make_mode(accelerator):
            for name, make in MAKERS.items():
                pair = make(accelerator.device())
                expected = make("cpu").to(torch.complex64)
                assert isinstance(pair, ComplexPair), name
                torch.testing.assert_close(pair.cpu(), expected, msg=name)
            assert torch.fft.irfft(torch.fft.rfft(torch.ones(4, device=accelerator.device()))).dtype is torch.float32

    run_forked("hpu", use, strict=True)


def test_complex_factories_return_pairs_without_the_emulator() -> None:
    """The emulator builds tensors on the CPU itself; on the meta device only the handlers do."""
    with ModelFunctionMode(make_handlers(torch.device("meta"), {})):
        for name, make in MAKERS.items():
            if name != "transform":
                assert isinstance(make("meta"), ComplexPair), name
        assert not isinstance(torch.tensor([1.0], device="meta"), ComplexPair)
        assert not isinstance(torch.tensor([1j]), ComplexPair)
        assert not isinstance(torch.ones(2, device="meta").to(torch.float16), ComplexPair)


def test_pairs_convert_to_cpu_real_dtypes_and_python() -> None:
    pair = make_complex_pair(torch.tensor([1 + 2j]), "meta")
    assert "Pair" in repr(pair)
    assert pair.to(torch.float16).dtype is torch.float16
    pair = ComplexPair(torch.tensor([1.0]), torch.tensor([2.0]))
    assert pair.item() == 1 + 2j
    target = torch.zeros(1, dtype=torch.complex64)
    target.copy_(pair)
    assert target.tolist() == [1 + 2j]
    assert torch.view_as_real(pair).tolist() == [[1.0, 2.0]]
    assert torch.equal(pair.as_strided((2, 1), (0, 1)).real, torch.tensor([[1.0], [1.0]]))


def test_as_strided_with_non_contiguous_parts() -> None:
    values = torch.arange(12.0).reshape(2, 3, 2)
    pair, expected = ComplexPair(values[..., 0], values[..., 1]), torch.view_as_complex(values)
    assert torch.equal(pair.as_strided((3, 2), (1, 3)).real, expected.as_strided((3, 2), (1, 3)).real)


def test_unsupported_operations_raise() -> None:
    pair = ComplexPair(torch.ones(2, 2), torch.ones(2, 2))
    for operation in (torch.linalg.inv, torch.exp, torch.sin, lambda a: a @ a):
        with pytest.raises(LimitError, match="has no real-valued replacement") as caught:
            operation(pair)
        assert caught.value.hint


@pytest.mark.xfail(strict=True, raises=LimitError, reason="a real device tensor times a complex scalar is not handled")
def test_real_device_tensor_times_complex_scalar() -> None:
    def use(accelerator: VirtualAccelerator) -> bool:
        with torch.no_grad(), make_mode(accelerator):
            return isinstance(torch.ones(2, device=accelerator.device()) * 1j, ComplexPair)

    assert run_forked("hpu", use, strict=True)


def _assign_parts(z: Tensor) -> None:
    z.real = z.real * 0.5
    z.imag = 2.0 * torch.ones_like(z.imag)


# In-place changes of a tensor, also through its views.
EDITS: dict[str, Any] = {
    "real": lambda z: z.real.mul_(0.5),
    "imag": lambda z: torch.imag(z).add_(0.1),
    "both": lambda z: (torch.real(z).zero_(), z.imag.neg_()),
    "parts of a view": lambda z: z[0].real.mul_(3),
    "an element": lambda z: z.real.__setitem__((0, 1), 5.0),
    "assigned parts": _assign_parts,
    "view_as_real": lambda z: torch.view_as_real(z)[..., 0].mul_(0.5),
    "view_as_real twice": lambda z: (torch.view_as_real(z).mul_(0.5), torch.view_as_real(z).add_(1), z.real.neg_()),
}
# Complex tensors that are made from a real tensor, which is returned too: it must change in the same cases.
SOURCES: dict[str, Any] = {
    "transform": lambda x: torch.fft.fft(x),
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(2, 2, 2)),
    "complex": lambda x: torch.complex(x, x.flip(0)),
    "complex by name": lambda x: torch.complex(imag=x, real=x),
    "cast": lambda x: x.to(torch.complex64),
    "product": lambda x: torch.fft.fft(x) * 2j,
    "copy": lambda x: torch.fft.fft(x).clone(),
    "physical conjugate": lambda x: torch.conj_physical(torch.fft.fft(x)),
    "view": lambda x: torch.fft.fft(x).t()[1:],
}


def edit(source: str, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.clone()
    z = SOURCES[source](values)
    EDITS[name](z)
    return (z * 1).cpu(), values.cpu()


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_in_place_changes_through_views(inference: bool) -> None:
    """A pair changes like a complex tensor, or its next use raises."""
    x = torch.linspace(-1, 2, 8).reshape(2, 4)

    def use(accelerator: VirtualAccelerator) -> set[tuple[str, str]]:
        raised = set()
        for source in SOURCES:
            for name in EDITS:
                with torch.inference_mode(inference), torch.no_grad():
                    expected = edit(source, name, x)
                    with make_mode(accelerator):
                        try:
                            actual = edit(source, name, x.to(accelerator.device()))
                        except LimitError:
                            raised.add((source, name))
                            continue
                torch.testing.assert_close(actual, expected, msg=f"{source}, {name}")
        return raised

    views = {"view_as_real", "view_as_real twice"}
    separate = set(SOURCES) - {"transform", "view_as_complex"}
    assert run_forked("hpu", use) == {(source, name) for source in separate for name in views}


def test_an_unchanged_copy_does_not_raise() -> None:
    pair = ComplexPair(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0]))
    view = pair[1:]
    copy = torch.view_as_real(view)
    assert (copy * 2).tolist() == [[6.0, 8.0]]
    assert pair.real.tolist() == [1.0, 3.0]
    copy[..., 1].zero_()
    with pytest.raises(LimitError, match="view_as_real") as caught:
        pair * 2
    assert "tensor.real" in caught.value.hint


def test_gradients_through_changed_parts() -> None:
    def use() -> None:
        gradients = []
        for mode in nullcontext(), ModelFunctionMode(make_handlers(torch.device("cpu"), {})):
            x = torch.linspace(-1, 2, 8).reshape(4, 2).requires_grad_()
            with mode:
                z = torch.view_as_complex(x * 1)
                z.real.mul_(0.5)
                torch.view_as_real(z)[..., 1].mul_(3)
                torch.autograd.backward((z * z).abs().sum())
            gradients.append(x.grad)
        torch.testing.assert_close(gradients[0], gradients[1])

    call_in_fork(use)
