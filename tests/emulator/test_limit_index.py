"""Every kind of limit, on devices with and without it, and the ledger."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from anyaccel.emulator import dispatch
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.limit_index import read_operation
from anyaccel.emulator.limit_ledger import LedgerRow
from anyaccel.emulator.run_forked import run_forked
from anyaccel.emulator.tensor import active

DEVICES = ["mps", "hpu", "neuron", "npu", "xpu", "mlu"]
HERE = Path(__file__).name


def observe(device: str, program: Callable[[torch.device], object], memory: str | None = None) -> list[LedgerRow]:
    """Return the ledger rows of a program on a virtual device."""

    def use(accelerator: VirtualAccelerator) -> list[LedgerRow]:
        program(accelerator.device())
        return accelerator.ledger.rows()

    return run_forked(device, use, memory=memory)


def effects(rows: list[LedgerRow], limit: str) -> set[str]:
    return {row.effect for row in rows if row.limit == limit}


@pytest.mark.parametrize(
    ("device", "effect"),
    [("mps", "error"), ("npu", "error"), ("neuron", "error"), ("hpu", "narrowed"), ("mlu", "narrowed"), ("xpu", None)],
)
def test_float64(device: str, effect: str | None) -> None:
    rows = observe(device, lambda device: torch.linspace(0, 1, 4, dtype=torch.float64).to(device))
    assert effects(rows, "dtypes.float64") == ({effect} if effect else set())


def test_narrowed_dtype_loses_precision() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[float, torch.dtype]:
        tensor = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64, device=accelerator.device())
        return float(tensor.cpu()[0]), tensor.dtype

    assert run_forked("hpu", use) == (1.0, torch.float64)
    assert run_forked("xpu", use) == (1.0 + 2.0**-40, torch.float64)


@pytest.mark.parametrize(
    # Gaudi's limit is inferred and contradicted, so it is not enforced.
    ("device", "effect"),
    [("neuron", "error"), ("hpu", None), ("mps", None), ("xpu", None), ("npu", None)],
)
@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.randn(2, device=device),
        lambda device: torch.rand_like(torch.ones(2, device=device)),
        lambda device: torch.ones(2, device=device).normal_(),
        lambda device: torch.randint(0, 5, (2,), device=device),
        lambda device: functional.dropout(torch.ones(8, device=device), training=True),
    ],
    ids=["randn", "rand_like", "normal_", "randint", "dropout"],
)
def test_random_numbers(device: str, effect: str | None, draw: Callable[[torch.device], object]) -> None:
    assert effects(observe(device, draw), "random_numbers") == ({effect} if effect else set())


@pytest.mark.parametrize("device", DEVICES)
def test_noise_drawn_on_the_cpu_hits_no_limit(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    assert observe(device, lambda device: torch.randn(2, generator=generator).to(device)) == []


@pytest.mark.parametrize(
    "look_up",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.where(x > 0),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique(x),
    ],
    ids=["nonzero", "mask", "where", "masked_select", "unique"],
)
def test_data_dependent_shapes(look_up: Callable[[torch.Tensor], object]) -> None:
    def program(device: torch.device) -> object:
        return look_up(torch.ones(4).to(device))

    assert effects(observe("neuron", program), "data_dependent_shapes") == {"error"}
    assert effects(observe("hpu", program), "data_dependent_shapes") == {"slow"}
    assert effects(observe("xpu", program), "data_dependent_shapes") == set()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: repr(x),
        lambda x: bool(x[0] > 0),
        lambda x: torch.empty(4).copy_(x),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([x[0]]),
    ],
    ids=["item", "cpu", "tolist", "repr", "bool", "copy_", "equal", "tensor"],
)
def test_host_round_trips(read: Callable[[torch.Tensor], object]) -> None:
    rows = observe("xpu", lambda device: read(torch.ones(4).to(device)))
    assert [(row.limit, row.effect, row.count, Path(row.file).name) for row in rows] == [
        ("host_round_trip", "slow", 1, HERE)
    ]


@pytest.mark.parametrize(("heads", "expected"), [(8, set()), (2**11, {"wrong"}), (2**12 + 1, {"wrong", "error"})])
def test_attention_scores_are_measured_without_allocation(heads: int, expected: set[str]) -> None:
    """1024 x 1024 scores per head: 2**31 at 2048 heads, 2**32 at 4096."""

    def program(device: torch.device) -> object:
        query = torch.zeros(1, 1, 1, 2).to(device).expand(1, heads, 1024 + (heads > 8), 2)
        if heads == 8:
            return torch.ops.aten.scaled_dot_product_attention(query, query, query)
        measure(query)
        return None

    def measure(query: torch.Tensor) -> None:
        facts = read_operation(torch.ops.aten.scaled_dot_product_attention.default)
        dispatch._enforce_on_scores(active(), facts, [query, query])

    rows = observe("mps", program)
    assert {row.effect for row in rows if row.limit.startswith("largest_tensor")} == expected


def test_4_gib_buffer_fails_only_on_arc_a770() -> None:
    def program(device: torch.device) -> None:
        huge = torch.empty(1).expand(2**30)  # 4 GiB by shape, 4 bytes of memory
        dispatch._enforce_on_result(active(), read_operation(torch.ops.aten.add.Tensor), huge)

    assert effects(observe("xpu", program, memory="arc-a770"), "largest_tensor.tensor") == {"error"}
    assert effects(observe("xpu", program, memory="arc-b580"), "largest_tensor.tensor") == set()


def test_uninitialized_memory_breaks_sliced_attention_only_on_mps() -> None:
    """baddbmm(beta=0) reads its first argument on MPS: https://github.com/huggingface/diffusers/issues/14438."""

    def use(accelerator: VirtualAccelerator) -> tuple[bool, list[str]]:
        left, right = (torch.ones(1, 2, 2).to(accelerator.device()) for _ in range(2))
        uninitialized = torch.empty(1, 2, 2, device=accelerator.device())
        scores = torch.baddbmm(uninitialized, left, right, beta=0, alpha=1.0).cpu()
        return bool(scores.isnan().any()), [row.limit for row in accelerator.ledger.rows("wrong")]

    assert run_forked("mps", use) == (True, ["operations.baddbmm_reads_ignored_input"])
    assert run_forked("xpu", use) == (False, [])


def test_initialized_memory_is_finite_on_mps() -> None:
    def use(accelerator: VirtualAccelerator) -> bool:
        device = accelerator.device()
        tensors = [
            torch.zeros(2, device=device),
            torch.full((2,), 3.0, device=device),
            torch.ones(2, device=device) * 2,
        ]
        return all(bool(torch.isfinite(tensor.cpu()).all()) for tensor in tensors)

    assert run_forked("mps", use)


def test_operation_limits_apply_only_to_their_overloads() -> None:
    def program(device: torch.device) -> None:
        counts = torch.tensor([1, 2]).to(device)
        torch.arange(2).to(device).repeat_interleave(counts)

    assert effects(observe("neuron", program), "operations.repeat_interleave_by_tensor") == {"error"}
    by_number = observe("neuron", lambda device: torch.arange(2).to(device).repeat_interleave(2))
    assert effects(by_number, "operations.repeat_interleave_by_tensor") == set()


def test_ledger_counts_by_source_line() -> None:
    def program(device: torch.device) -> None:
        x = torch.ones(2).to(device)
        for _ in range(3):
            x.double()
        x.double()

    rows = [row for row in observe("mps", program) if row.limit == "dtypes.float64"]
    assert sorted(row.count for row in rows) == [1, 3]
    lines = Path(__file__).read_text().splitlines()
    assert all(re.search(r"x\.double\(\)", lines[row.line - 1]) for row in rows)


def test_ledger_records_the_denoising_step() -> None:
    class Pipeline:
        scheduler = None

        def __call__(self, x: torch.Tensor) -> None:
            x.sum().item()
            for i, t in enumerate([999, 500, 1]):
                (x * t * i).sum().item()

    def use(accelerator: VirtualAccelerator) -> dict[int | None, int]:
        Pipeline()(torch.ones(2).to(accelerator.device()))
        return accelerator.ledger.round_trips()

    assert run_forked("hpu", use) == {None: 1, 0: 1, 1: 1, 2: 1}


def test_ledger_as_text() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[str, str]:
        empty = str(accelerator.ledger)
        torch.ones(2).to(accelerator.device()).double()
        return empty, str(accelerator.ledger)

    empty, full = run_forked("mps", use)
    assert empty == "the ledger is empty: no limit was hit"
    assert "dtypes.float64" in full
    assert HERE in full
