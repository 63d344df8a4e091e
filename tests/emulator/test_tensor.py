"""Tensors of a virtual device behave like torch's own: creation, moves, indexing, writes, reads and errors."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from anyaccel.emulator.accelerator import VirtualAccelerator
from tests.emulator.forked import KNOWN_TO_TORCH, OnEveryDevice

on_every_device = OnEveryDevice()
CPU = torch.device("cpu")
Make = Callable[[torch.device], torch.Tensor]

FACTORIES: dict[str, Make] = {
    "tensor": lambda d: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=d),
    "tensor of a scalar": lambda d: torch.tensor(3, device=d),
    "empty tensor": lambda d: torch.tensor([], device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "as_tensor of NumPy": lambda d: torch.as_tensor(np.ones((2, 3), np.float32), device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3.0, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange by steps": lambda d: torch.arange(1, 9, 2, device=d, dtype=torch.float32),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 5, device=d),
    "full": lambda d: torch.full((2, 3), 7.0, device=d),
    "ones": lambda d: torch.ones(2, 3, device=d),
    "zeros": lambda d: torch.zeros((2, 3), device=d, dtype=torch.bfloat16),
    "zeros_like of a CPU tensor": lambda d: torch.zeros_like(torch.ones(2, 3), device=d),
    "ones_like of a transpose": lambda d: torch.ones_like(torch.ones(3, 2, device=d).t()),
    "full_like": lambda d: torch.full_like(torch.ones(2, 3, device=d), 3),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3, 4), (2, 0, 1), device=d).fill_(1),
    "channels_last": lambda d: torch.empty(2, 3, 4, 4, memory_format=torch.channels_last, device=d).fill_(1),
    "empty_like": lambda d: torch.empty_like(torch.ones(2, 3, device=d)).fill_(1),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3, 2),
    "new_ones": lambda d: torch.ones(2, device=d).new_ones((3,)),
    "new_full": lambda d: torch.ones(2, device=d).new_full((3,), 2),
    "new_empty": lambda d: torch.ones(2, device=d).new_empty((3,)).fill_(1),
    "new_empty_strided": lambda d: torch.ones(2, device=d).new_empty_strided((3, 2), (1, 3)).fill_(1),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 3, device=d),
    "hann_window": lambda d: torch.hann_window(8, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(8, device=d),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.ones(2, device=d)),
    "polar": lambda d: torch.polar(torch.ones(2, device=d), torch.ones(2, device=d)),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(3, device=d), torch.arange(2, device=d), indexing="ij")[0],
    "from_numpy": lambda d: torch.from_numpy(np.arange(4)).to(d),
    "one_hot": lambda d: torch.nn.functional.one_hot(torch.arange(3, device=d), 4),
    "float8": lambda d: torch.ones(2, 2, device=d).to(torch.float8_e4m3fn).float(),
}

KEYS: list[Any] = [
    0, -1, slice(1, 3), (slice(None), 1), (..., 2), None, (None, 0), [0, 2], ([0, 2], [1, 3]), (slice(None), [1, 3]),
    [True, False, True], torch.tensor([0, 2]), torch.tensor([True, False, True]), torch.tensor(1), np.array([0, 2]),
    (torch.tensor([0, 1]), slice(None), torch.tensor([1, 2])), (slice(None), slice(None, None, 2)), True, np.int64(1),
    (0, 1, 2), (slice(None), -1, None), (),
]  # fmt: skip


def check_same(virtual: torch.Tensor, cpu_tensor: torch.Tensor) -> None:
    assert (virtual.shape, virtual.stride(), virtual.dtype) == (cpu_tensor.shape, cpu_tensor.stride(), cpu_tensor.dtype)
    assert torch.equal(virtual.cpu(), cpu_tensor) or torch.allclose(virtual.cpu(), cpu_tensor, atol=1e-5)


@on_every_device()
def test_devices_have_names_and_indices(accelerator: VirtualAccelerator) -> None:
    name = accelerator.name
    assert torch.device(f"{name}:3").index == 3
    assert torch.device(name).index is None
    assert torch.device(name, 1) == torch.device(f"{name}:1") == torch.device(type=name, index=1)
    assert torch.device(0) == torch.device(name, 0)
    assert isinstance(torch.device("cpu"), torch.device)
    assert str(torch.ones(1, device=f"{name}:1").device) == f"{name}:1"


@on_every_device()
def test_devices_can_be_pickled(accelerator: VirtualAccelerator) -> None:
    for device in (accelerator.device(1), CPU):
        assert pickle.loads(pickle.dumps(device)) == device


@on_every_device()
def test_factories_match_the_cpu(accelerator: VirtualAccelerator) -> None:
    for name, make in FACTORIES.items():
        tensor = make(accelerator.device(1))
        assert tensor.device == accelerator.device(1), name
        check_same(tensor, make(CPU))


@on_every_device()
def test_one_element_tensors_are_scalars_in_lists(accelerator: VirtualAccelerator) -> None:
    def make(device: torch.device) -> torch.Tensor:
        return torch.tensor([torch.tensor([5], device=device)] * 2 + [3], device=device)

    check_same(make(accelerator.device()), make(CPU))


@on_every_device()
def test_kaiser_window(accelerator: VirtualAccelerator) -> None:
    check_same(torch.kaiser_window(8, device=accelerator.device()), torch.kaiser_window(8))


@on_every_device()
def test_to_accepts_all_argument_forms(accelerator: VirtualAccelerator) -> None:
    name, device, cpu_tensor = accelerator.name, accelerator.device(1), torch.ones(2, 3)
    moved = cpu_tensor.to(device)
    results = [
        moved, cpu_tensor.to(f"{name}:1"), cpu_tensor.to(device=device), cpu_tensor.to(device, torch.float32),
        cpu_tensor.to(torch.device(1)), cpu_tensor.to(device, non_blocking=True), cpu_tensor.to(moved),
        cpu_tensor.to(device, copy=True), moved.to(torch.float16), moved.half(),
        moved.to(memory_format=torch.contiguous_format), cpu_tensor.type_as(moved),
    ]  # fmt: skip
    assert {tensor.device for tensor in results} == {device}
    assert moved.to(device) is moved
    assert moved.to(device, copy=True) is not moved
    assert cpu_tensor.to(device, torch.float16).dtype is moved.to(dtype=torch.float16).dtype is torch.float16
    assert cpu_tensor.to(name).device == cpu_tensor.to(torch.device(name)).device == accelerator.device(0)
    assert moved.to(f"{name}:0").device == accelerator.device(0)
    assert moved.to("cpu").device == moved.cpu().device == moved.to(cpu_tensor).device == CPU


@on_every_device(broken="C++ accepts only an accelerator that it was built for", on=KNOWN_TO_TORCH)
def test_to_a_device_index(accelerator: VirtualAccelerator) -> None:
    assert torch.ones(2).to(1).device == accelerator.device(1)


@on_every_device()
def test_indexing_reads_and_writes(accelerator: VirtualAccelerator) -> None:
    device, cpu_tensor = accelerator.device(1), torch.arange(60.0).reshape(3, 4, 5)
    for key in KEYS:
        for key_there in [key, key.to(device)] if isinstance(key, torch.Tensor) else [key]:
            virtual = cpu_tensor.to(device)
            check_same(virtual[key_there], cpu_tensor[key])
            for value in (-1, cpu_tensor[key] * 2):
                written = cpu_tensor.clone()
                written[key] = value
                virtual = cpu_tensor.to(device)
                virtual[key_there] = value.to(device) if isinstance(value, torch.Tensor) else value
                check_same(virtual, written)


@on_every_device()
def test_indexing_by_a_range(accelerator: VirtualAccelerator) -> None:
    assert torch.arange(4, device=accelerator.device())[range(2)].tolist() == [0, 1]


@on_every_device()
def test_views_alias_and_shapes_change_in_place(accelerator: VirtualAccelerator) -> None:
    base = torch.arange(6.0, device=accelerator.device(1)).reshape(2, 3)
    turned, row = base.t(), base[1]
    turned.add_(1)
    row[0] = 9
    assert base.tolist() == [[1, 2, 3], [9, 5, 6]]
    assert turned.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert (row.storage_offset(), row.data_ptr()) == (3, base.data_ptr() + 12)
    base.unsqueeze_(0)
    assert tuple(base.shape) == (1, 2, 3)
    base.squeeze_(0).t_()
    assert (tuple(base.shape), base.stride()) == ((3, 2), (1, 3))
    base.transpose_(0, 1).resize_(3, 4)
    assert base.shape == (3, 4)
    assert turned[0, 0] == 1


@on_every_device()
def test_data_accepts_another_tensor(accelerator: VirtualAccelerator) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2, device=accelerator.device()))
    parameter.data = torch.full((3, 3), 5.0, device=accelerator.device())
    assert parameter.tolist() == [[5.0] * 3] * 3


@on_every_device()
def test_data_has_its_own_shape(accelerator: VirtualAccelerator) -> None:
    first, second = torch.zeros(1, device=accelerator.device()), torch.ones(2, 3, device=accelerator.device())
    first.data = second
    first.t_()
    assert (first + 1).shape == (3, 2)
    assert (second + 1).shape == (2, 3)


@on_every_device()
def test_data_moves_to_the_device(accelerator: VirtualAccelerator) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.data = parameter.data.to(accelerator.device())
    assert parameter.device == accelerator.device()
    assert (parameter * 2).tolist() == [2, 2]


class KeepReferences(TorchFunctionMode):
    """A function mode with a weak reference to each result, as the one that follows known values."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.references += [weakref.ref(result)] if isinstance(result, torch.Tensor) else []
        return result


@on_every_device()
def test_data_moves_to_the_device_inside_a_function_mode(accelerator: VirtualAccelerator) -> None:
    parameter, moved = torch.nn.Parameter(torch.ones(2)), torch.ones(2, device=accelerator.device())
    with KeepReferences() as mode:
        parameter.data = moved
        assert (parameter * 2).tolist() == [2, 2]
    assert mode.references


@on_every_device()
def test_data_moves_back_to_the_cpu(accelerator: VirtualAccelerator) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device=accelerator.device()))
    parameter.data = parameter.data.cpu()
    assert parameter.device == CPU


@on_every_device()
def test_set_preserves_the_offset(accelerator: VirtualAccelerator) -> None:
    tensor = torch.zeros(3, device=accelerator.device())
    tensor.set_(torch.arange(6.0, device=accelerator.device())[3:])  # type: ignore[call-overload]
    assert tensor.tolist() == [3, 4, 5]
    assert tensor.storage_offset() == 3


@on_every_device()
def test_out_is_written_and_resized(accelerator: VirtualAccelerator) -> None:
    device = accelerator.device(1)
    operations: list[Callable[[torch.Tensor], Any]] = [
        lambda out: torch.add(torch.ones(2, 3, device=out.device), 1, out=out),
        lambda out: torch.cat([torch.ones(2, device=out.device)] * 2, out=out),
        lambda out: torch.arange(5, out=out),
        lambda out: torch.linspace(0, 1, 4, out=out),
        lambda out: torch.ones(4, out=out),
        lambda out: torch.max(torch.ones(2, 3, device=out.device), 1, out=(out, out.new_empty(0, dtype=torch.int64))),
    ]
    for operation in operations:
        cpu_tensor, virtual = torch.empty(0), torch.empty(0, device=device)
        operation(cpu_tensor)
        operation(virtual)
        check_same(virtual, cpu_tensor)
    ready = torch.empty(2, device=device)
    assert torch.mul(torch.ones(2, device=device), 3, out=ready) is ready
    assert ready.tolist() == [3, 3]


@on_every_device()
def test_reads_are_explicit_and_counted(accelerator: VirtualAccelerator) -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=accelerator.device(1))
    reads: list[Callable[[], Any]] = [tensor.numpy, lambda: np.asarray(tensor), lambda: np.array(tensor)]
    for read in reads:
        with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
            read()
    trips = accelerator.round_trips
    assert tensor.tolist() == tensor.numpy(force=True).tolist() == [[1, 2], [3, 4]]
    assert (tensor[0, 1].item(), int(tensor[1, 1]), float(tensor[1, 0])) == (2.0, 4, 3.0)
    assert bool(tensor[0, 0])
    assert not bool(tensor[0, 0] * 0)
    assert accelerator.round_trips == trips + 7
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(tensor)
    assert [row.tolist() for row in tensor] == [[1, 2], [3, 4]]
    assert 2 in tensor
    assert (tensor * np.float32(2)).device == accelerator.device(1)  # type: ignore[operator]
    for shown in (repr(tensor), str(tensor), repr(torch.nn.Parameter(tensor))):
        assert "[3., 4.]" in shown
        assert f"device='{accelerator.device(1)}'" in shown
    assert (tensor.nbytes, tensor.element_size(), tensor.get_device(), tensor.is_cpu) == (16, 4, 1, False)


@on_every_device()
def test_scalar_can_be_formatted(accelerator: VirtualAccelerator) -> None:
    assert f"{torch.tensor(1.5, device=accelerator.device()):.2f}" == "1.50"


@on_every_device()
def test_lists_and_tuples_in_an_index(accelerator: VirtualAccelerator) -> None:
    cpu_tensor = torch.arange(12.0).reshape(3, 4)
    for index in ((slice(None), (0, 2)), ([0, 2], (1, 3)), (0, 2), [0, 2], (slice(None), [True, False, True, True])):
        check_same(cpu_tensor.to(accelerator.device(1))[index], cpu_tensor[index])


@on_every_device()
def test_complex_numbers_and_fft(accelerator: VirtualAccelerator) -> None:
    cpu_tensor = torch.linspace(-1, 1, 32).reshape(4, 8)
    transforms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.fft.fft, torch.fft.rfft, torch.fft.fft2, torch.fft.fftn, torch.fft.fftshift,
        lambda x: torch.fft.irfft(torch.fft.rfft(x)),
        lambda x: torch.view_as_real(torch.fft.fft(x)),
        lambda x: torch.view_as_complex(x.reshape(4, 4, 2)),
        lambda x: torch.fft.fft(x).abs(),
        lambda x: torch.fft.fft(x).real,
        lambda x: x.to(torch.complex64) * 1j,
        lambda x: torch.stft(x, 4, window=torch.ones(4, device=x.device), return_complex=True),
    ]  # fmt: skip
    for transform in transforms:
        check_same(transform(cpu_tensor.to(accelerator.device(1))), transform(cpu_tensor))


@on_every_device()
def test_conjugates(accelerator: VirtualAccelerator) -> None:
    tensor = torch.tensor([1 + 2j], device=accelerator.device()).conj()
    assert (tensor * 2).tolist() == [2 - 4j]
    assert torch.cat([tensor, tensor]).tolist() == [1 - 2j, 1 - 2j]


@on_every_device()
def test_imaginary_part_of_a_conjugate(accelerator: VirtualAccelerator) -> None:
    tensor = torch.tensor([1 + 2j], device=accelerator.device()).conj()
    assert tensor.imag.tolist() == [-2]
