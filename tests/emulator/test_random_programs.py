"""Random programs give the same tensors on the CPU and every virtual device: values, shapes, strides, aliasing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.run_forked import run_forked
from tests.emulator.forked import DEVICES
from tests.emulator.program import NAMES, Instruction, run_program

EXAMPLES = 150
PHASES = (Phase.generate, Phase.shrink)

NUMBER = st.integers(0, 11)
PROGRAM = st.lists(st.tuples(st.sampled_from(NAMES), st.tuples(NUMBER, NUMBER, NUMBER)), min_size=3, max_size=25)


def _aliases(pool: list[torch.Tensor]) -> list[list[bool]]:
    addresses = [tensor.untyped_storage().data_ptr() for tensor in pool]
    return [[first == second for second in addresses] for first in addresses]


def _read_layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _compare(program: list[Instruction], device: torch.device) -> None:
    expected, rejected_on_cpu = run_program(program, torch.device("cpu"))
    actual, rejected = run_program(program, device)
    assert rejected == rejected_on_cpu, "the CPU and the device reject different instructions"
    assert [_read_layout(tensor) for tensor in actual] == [_read_layout(tensor) for tensor in expected]
    assert _aliases(actual) == _aliases(expected), "the tensors share memory differently"
    for position, (virtual, cpu_tensor) in enumerate(zip(actual, expected, strict=True)):
        assert virtual.device == device
        moved = virtual.cpu()
        same = torch.allclose(moved, cpu_tensor) if cpu_tensor.is_floating_point() else torch.equal(moved, cpu_tensor)
        assert same, f"tensor {position} is {moved}, expected {cpu_tensor}"


def _note_program(program: list[Instruction]) -> None:
    """Add the program to the error as a note, because Schemathesis disables Hypothesis's own report."""
    note(f"program={program}")


def _search(accelerator: VirtualAccelerator) -> int:
    """Run many programs; an error contains the shortest failing program as a note."""
    tried = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=PHASES,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(PROGRAM)
    def check(program: list[Instruction]) -> None:
        nonlocal tried
        tried += 1
        _note_program(program)
        _compare(program, accelerator.device(0))

    with torch.no_grad():
        check()
    assert accelerator.memory.used(0) == 0, "memory leak"
    return tried


@pytest.mark.parametrize("device", DEVICES)
def test_random_programs_match_the_cpu(device: str) -> None:
    assert run_forked(device, _search, memory="1GiB") >= EXAMPLES


def test_failure_has_its_program_as_a_note() -> None:
    def fail(accelerator: VirtualAccelerator) -> None:
        @settings(max_examples=20, derandomize=True, deadline=None, database=None, phases=PHASES)
        @given(PROGRAM)
        def check(program: list[Instruction]) -> None:
            _note_program(program)
            raise AssertionError(f"{len(program)} instructions")

        check()

    with pytest.raises(AssertionError, match="3 instructions") as caught:
        run_forked("npu", fail)
    assert any("program=[" in note for note in caught.value.__notes__)
