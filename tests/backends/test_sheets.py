"""Built-in sheets: complete, with sources, and consistent with diffusers."""

import itertools
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from diffusers.utils import torch_utils

import anyaccel
from anyaccel.backends.claim import Claim, DtypeLimit, Effect, Evidence, Limit, RoundTrip, SizeLimit, Unknown, Yes
from anyaccel.backends.evidence_files import FOLDER
from anyaccel.backends.registry import build_registry
from anyaccel.backends.requirement import Requirement
from anyaccel.backends.sheet import Compiler, Distributed, Sheet
from anyaccel.errors import UnknownProductError
from tests.conftest import ALL_SHEETS, ROOT

SHEETS = pytest.mark.parametrize("sheet", ALL_SHEETS, ids=lambda sheet: sheet.name)
CLAIMS = {
    f"{sheet.name}.{name}": claim for sheet in ALL_SHEETS for name, claim in sheet.claims() if isinstance(claim, Claim)
}


def test_eight_backends_and_rocm_exist() -> None:
    names = {sheet.name for sheet in ALL_SHEETS}
    assert names == {"cpu", "cuda", "rocm", "mps", "hpu", "neuron", "xpu", "npu", "mlu"}


def is_repository_file(source: str, *folders: str) -> bool:
    """Return whether a source is a file in one of these folders of the repository."""
    return source.startswith(folders) and (ROOT / source).is_file()


def find_gaps(claim: Claim) -> list[str]:
    """Return the fields of a claim that are missing or invalid."""
    valid = {
        "says": bool(claim.says.strip()),
        "source": is_repository_file(claim.source, "benchmarks/results/", FOLDER)
        or claim.source.startswith(("https://", "http://")),
        "evidence": claim.evidence in get_args(Evidence),
    }
    if isinstance(claim, Limit | Requirement):
        valid["hint"] = bool(claim.hint)
    if isinstance(claim, Limit):
        against = claim.contradicted_by
        valid["effect"] = claim.effect in get_args(Effect)
        valid["contradicted_by"] = not against or against.startswith("https://") or is_repository_file(against, FOLDER)
    return [field for field, is_valid in valid.items() if not is_valid]


def test_every_claim_is_complete() -> None:
    assert len(CLAIMS) > 250
    assert {name: gaps for name, claim in CLAIMS.items() if (gaps := find_gaps(claim))} == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("says", " "),
        ("source", "benchmarks/results/none.json"),
        ("evidence", "hearsay"),
        ("hint", ""),
        ("effect", "odd"),
        ("contradicted_by", "nobody"),
    ],
)
def test_check_finds_incomplete_claims(field: str, value: str) -> None:
    limit = next(claim for claim in CLAIMS.values() if isinstance(claim, Limit))
    assert find_gaps(limit) == []
    changed: dict[str, Any] = {field: value}
    assert find_gaps(replace(limit, **changed)) == [field]


@SHEETS
def test_unknown_answers_have_a_text(sheet: Sheet) -> None:
    unknown = [claim for _, claim in sheet.claims() if isinstance(claim, Unknown)]
    assert all(claim.says.strip() for claim in unknown)


@SHEETS
def test_names_on_a_sheet_are_unique(sheet: Sheet) -> None:
    names = [name for name, _ in sheet.claims()]
    assert len(names) == len(set(names))


@SHEETS
def test_conditions_name_products_of_the_sheet(sheet: Sheet) -> None:
    products = {product.name for product in sheet.products}
    named = {name for limit in sheet.limits(Limit).values() for name in limit.only_on}
    assert named <= products


@SHEETS
def test_default_dtypes_are_supported(sheet: Sheet) -> None:
    assert sheet.default_dtypes.order
    for dtype in sheet.default_dtypes.order:
        answer = sheet.dtype(dtype)
        rejected = isinstance(answer, Limit) and answer.effect == "error" and not answer.conditional
        assert not rejected, f"{sheet.name} runs models in {dtype}, which it rejects"


@SHEETS
def test_replacement_dtypes_are_supported(sheet: Sheet) -> None:
    for limit in sheet.limits(DtypeLimit).values():
        if limit.becomes:
            replacement = sheet.dtype(limit.becomes)
            unconditional = isinstance(replacement, Limit) and not replacement.conditional
            assert not (unconditional and isinstance(replacement, Limit) and replacement.effect == "error") or (
                replacement.contradicted_by
            )


@SHEETS
def test_sheet_is_frozen_and_can_be_pickled(sheet: Sheet) -> None:
    assert pickle.loads(pickle.dumps(sheet)) == sheet
    with pytest.raises(AttributeError):
        sheet.name = "other"  # type: ignore[misc]


def test_sheets_have_the_facts_of_docs_seeds() -> None:
    mps, hpu, neuron = (anyaccel.sheet(name) for name in ("mps", "hpu", "neuron"))
    assert not mps.reliable_batches
    sizes = {limit.of: (limit.amount, limit.unit, limit.effect) for limit in mps.limits(SizeLimit).values()}
    assert sizes == {"tensor": (2**32, "elements", "error"), "attention_scores": (2**31, "elements", "wrong")}
    assert mps.on(versions={"torch": "1.13.1"}).has_quirk("first_pass_differs")
    assert not mps.on(versions={"torch": "2.13.0"}).has_quirk("first_pass_differs")
    assert {p.name: (p.memory_bytes, p.per_server) for p in hpu.products} == {
        "gaudi1": (32 * 10**9, 8),
        "gaudi2": (96 * 10**9, 8),
        "gaudi3": (128 * 10**9, 8),
    }
    assert {v.name: v.value for v in hpu.variables if v.value} == {
        "PT_HPU_GPU_MIGRATION": "1",
        "PT_HPU_MAX_COMPOUND_OP_SIZE": "1",
    }
    assert isinstance(neuron.compiler, Compiler)
    assert (neuron.compiler.backend, neuron.compiler.dynamic, neuron.compiler.fullgraph) == ("neuron", False, True)
    assert neuron.compiler.cache_variable == "TORCH_NEURONX_NEFF_CACHE_DIR"


def test_limits_of_neuron() -> None:
    """float64, random numbers and data-dependent shapes fail; int64 is narrowed without an error."""
    neuron = anyaccel.sheet("neuron")
    effects = {name: limit.effect for name, limit in neuron.limits(Limit).items()}
    assert effects["dtypes.float64"] == "error"
    assert effects["random_numbers"] == "error"
    assert effects["data_dependent_shapes"] == "error"
    assert effects["dtypes.int64"] == "narrowed"
    assert neuron.static_shapes
    assert not neuron.rng_on_device


@pytest.mark.parametrize("device", ["mps", "npu", "neuron"])
def test_float64_is_rejected(device: str) -> None:
    answer = anyaccel.sheet(device).dtype("float64")
    assert isinstance(answer, Limit)
    assert answer.effect == "error"


@pytest.mark.parametrize("product", ["trn1", "inf2"])
def test_products_without_a_torch_device_are_marked(product: str) -> None:
    entry = anyaccel.sheet("neuron").product(product)
    assert not entry.native
    assert "not a torch device" in entry.software


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        ("cuda", "nccl"),
        ("hpu", "hccl"),
        ("neuron", "neuron"),
        ("xpu", "xccl"),
        ("npu", "hccl"),
        ("mlu", "cncl"),
    ],
)
def test_distributed_backends(device: str, backend: str) -> None:
    distributed = anyaccel.sheet(device).distributed
    assert isinstance(distributed, Distributed)
    assert distributed.backend == backend


def test_sheet_matches_the_recorded_measurements() -> None:
    cuda = build_registry([]).backend("cuda").sheet
    measured = json.loads((ROOT / cuda.host_round_trip.source).read_text())  # type: ignore[union-attr]
    assert measured["evidence"] == "hardware"
    assert cuda.limits(RoundTrip)["host_round_trip"].cost_us == measured["round_trip_us"]
    assert cuda.product("h200").memory_bytes == measured["total_bytes"]


@pytest.mark.parametrize("version", ["abc", "", None, 13])
def test_invalid_version_decides_no_condition(version: Any) -> None:
    answer = anyaccel.sheet("mps").on(versions={"macos": version}).dtype("bfloat16")
    assert isinstance(answer, Limit)


def test_slow_dynamic_shapes_are_not_static_shapes() -> None:
    assert not anyaccel.sheet("hpu").static_shapes
    assert anyaccel.sheet("neuron").static_shapes


def test_product_resolves_conditions() -> None:
    hpu = anyaccel.sheet("hpu")
    assert isinstance(hpu.on(product="gaudi2").dtype("float16"), Yes)
    first = hpu.on(product="gaudi1").dtype("float16")
    assert isinstance(first, Limit)
    assert not first.conditional
    assert hpu.on(product="gaudi1").adjusted_dtype("float16") == "bfloat16"
    assert hpu.adjusted_dtype("float16") == "float16", "an unresolved condition changes nothing"
    xpu = anyaccel.sheet("xpu")
    assert xpu.on(product="arc-b580").limits(SizeLimit) == {}
    assert len(xpu.on(product="arc-a770").limits(SizeLimit)) == 1


def test_consumer_gpus_have_memory_and_figures_with_sources() -> None:
    names = {sheet: {product.name for product in anyaccel.sheet(sheet).products} for sheet in ("cuda", "rocm", "xpu")}
    assert {"rtx3060-12gb", "rtx4070ti-super", "rtx4090", "rtx5090", "rtx4090-laptop"} <= names["cuda"]
    assert {"rx7900xtx", "rx7600", "rx9070xt", "rx9060xt-8gb"} <= names["rocm"]
    assert {"arc-a770", "arc-a380", "arc-b570", "arc-b580"} <= names["xpu"]
    # Published by NVIDIA, AMD and Intel: tensor TFLOPS with float32 accumulation, and half of the int8 TOPS.
    for name, gib, tflops, bandwidth in [
        ("rtx3090", 24, 71, 936),
        ("rtx4090", 24, 165.2, 1008),
        ("rtx5080", 16, 112.6, 960),
        ("rx7900xtx", 24, 122.8, 960),
        ("arc-a750", 8, 114.5, 512),
    ]:
        sheet = anyaccel.sheet(name)
        product = sheet.product(name)
        assert product.memory_bytes == gib * 2**30
        assert product.half_precision_flops == pytest.approx(tflops * 1e12, rel=0.01)
        assert product.memory_bytes_per_s == bandwidth * 1e9
    laptop, desktop = (anyaccel.sheet("cuda").product(name) for name in ("rtx4090-laptop", "rtx4090"))
    assert laptop.memory_bytes == 16 * 2**30
    assert laptop.half_precision_flops is None, "it depends on the power limit of the laptop"
    assert laptop.source != desktop.source


@pytest.mark.parametrize(
    ("product", "dtype", "supported"),
    [
        ("rtx3090", "float8_e4m3fn", False),
        ("rtx4090", "float8_e4m3fn", True),
        ("rx7800xt", "float8_e4m3fn", False),
        ("rx9070xt", "float8_e4m3fn", True),
        ("arc-a380", "float64", False),
        ("arc-b570", "float64", True),
    ],
)
def test_limits_apply_to_the_generation_of_a_gpu(product: str, dtype: str, supported: bool) -> None:
    assert isinstance(anyaccel.sheet(product).dtype(dtype), Yes) == supported


def test_unknown_product_lists_the_known_ones() -> None:
    with pytest.raises(UnknownProductError, match=r"did you mean gaudi2\? known: gaudi3, gaudi2, gaudi1"):
        anyaccel.sheet("hpu").on(product="gaudy2")


# Differences from diffusers 0.42.1, with the source that the sheets follow instead.
DIFFERENCES = {
    # Stored as float32 by the bridge while torch reports float64: gaudi-pytorch-bridge backend/helpers/tensor_utils.cpp
    ("hpu", "float64"): torch.float32,
    # Stored as float32 on the device: torch_mlu/csrc/aten/utils/types.cpp
    ("mlu", "float64"): torch.float32,
}


TABLES = pytest.mark.skipif(
    not hasattr(torch_utils, "maybe_adjust_dtype_for_device"),
    reason="requires diffusers 0.39 or later",
)


DEVICES = sorted({sheet.torch_name for sheet in ALL_SHEETS})


@TABLES
def test_dtypes_agree_with_diffusers() -> None:
    ours, theirs = {}, {}
    for device, dtype in itertools.product(DEVICES, ("float64", "int64", "float32", "float16", "bfloat16", "int32")):
        fake_device: Any = SimpleNamespace(type=device)  # torch rejects "neuron" without its module
        theirs[device, dtype] = torch_utils.maybe_adjust_dtype_for_device(getattr(torch, dtype), fake_device)
        ours[device, dtype] = getattr(torch, anyaccel.sheet(device).adjusted_dtype(dtype))
    assert {key: dtype for key, dtype in ours.items() if dtype != theirs[key]} == DIFFERENCES


@TABLES
def test_training_agrees_with_diffusers() -> None:
    theirs = {device: torch_utils.backend_supports_training(device) for device in DEVICES}
    assert {device: anyaccel.supports_training(device) for device in DEVICES} == theirs
