"""Parsing of device strings, valid and invalid."""

import re
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anyaccel
from anyaccel.backends.device import OpenDevice, read_device
from anyaccel.backends.device_spec import DeviceSpec
from anyaccel.backends.registry import build_registry
from anyaccel.backends.sheet import Sheet
from anyaccel.errors import DeviceUnavailableError, UnknownDeviceError, UsageError
from tests.conftest import ALL_SHEETS, SOURCE

REGISTRY = build_registry([])


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYACCEL_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("auto", {"name": "auto"}),
        (" Auto ", {"name": "auto"}),
        ("hpu", {"name": "hpu"}),
        ("HPU:3", {"name": "hpu", "index": 3}),
        ("rocm:0", {"name": "rocm", "index": 0}),
        (torch.device("cuda", 1), {"name": "cuda", "index": 1}),
        (torch.device("cpu"), {"name": "cpu"}),
        ("mps:16GiB", {"name": "mps", "memory": "16GiB"}),
        ("cuda:24.5 gb", {"name": "cuda", "memory": "24.5 gb"}),
        ("gaudi2", {"name": "hpu", "product": "gaudi2"}),
        ("h200:1", {"name": "cuda", "product": "h200", "index": 1}),
        ("mi300x", {"name": "rocm", "product": "mi300x"}),
        ("910b-32gb", {"name": "npu", "product": "910b-32gb"}),
        ("gaudi", {"name": "hpu"}),
        ("trainium:2", {"name": "neuron", "index": 2}),
        ("metal:16GiB", {"name": "mps", "memory": "16GiB"}),
        ("virtual:neuron", {"name": "neuron", "virtual": True}),
        ("Virtual:Gaudi", {"name": "hpu", "virtual": True}),
        ("virtual:neuron:3", {"name": "neuron", "virtual": True, "index": 3}),
        ("virtual:neuron:3,count=4", {"name": "neuron", "virtual": True, "index": 3, "count": 4}),
        (
            "virtual:hpu,count=8,memory=16GiB,strict",
            {"name": "hpu", "virtual": True, "count": 8, "memory": "16GiB", "strict": True},
        ),
        (
            "virtual:hpu, strict, memory=gaudi2",
            {"name": "hpu", "virtual": True, "strict": True, "product": "gaudi2"},
        ),
        ("virtual:gaudi2", {"name": "hpu", "virtual": True, "product": "gaudi2"}),
    ],
)
def test_valid_strings(device: object, expected: dict[str, object]) -> None:
    assert DeviceSpec.parse(device, REGISTRY) == DeviceSpec(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "'' is not a valid device: the name is missing", "cuda, hpu:3"),
        (":0", "':0' is not a valid device: the name is missing", "virtual:neuron,count=2"),
        ("gpu!", "'gpu!' is not a valid name", "cuda, hpu:3"),
        ("cuda 0", "unknown device 'cuda 0'", "did you mean cuda?"),
        ("cuda:", "'' is neither a device index nor a memory size", "cuda, hpu:3"),
        ("cuda:x", "'x' is neither a device index nor a memory size", "cuda, hpu:3"),
        ("cuda:-1", "'-1' is neither a device index nor a memory size", "cuda, hpu:3"),
        ("cuda:0:1", "'0:1' is neither a device index nor a memory size", "cuda, hpu:3"),
        ("cuda:9999999999", "'9999999999' is not a valid device index", "did you mean cuda:9999999999GiB?"),
        ("cuda:24.5", "'24.5' is not a valid device index", "did you mean cuda:24.5GiB?"),
        ("gaudi2:16GiB", "the memory size of gaudi2 is fixed", "hpu:16GiB"),
        ("cuda,strict", "only virtual devices accept options", "use virtual:cuda,strict"),
        ("virtual:", "the name is missing", "virtual:neuron,count=2"),
        (
            "virtual:mps:16GiB",
            "the memory size of a virtual device must be passed as an option",
            "use virtual:mps,memory=16GiB",
        ),
        ("virtual:mps,", "unknown option ''", "options: count=N, memory=SIZE, strict"),
        ("virtual:mps,strit", "unknown option 'strit'", "options: count=N, memory=SIZE, strict"),
        ("virtual:mps,count", "unknown option 'count'", "count=N"),
        ("virtual:mps,strict=1", "unknown option 'strict=1'", "strict"),
        ("virtual:mps,strict,strict", "duplicate option strict", "set strict only once"),
        ("virtual:mps,memory=1GiB,memory=2GiB", "duplicate option memory", "set memory only once"),
        (
            "virtual:gaudi2,memory=1GiB",
            "the memory size of gaudi2 is fixed",
            "use virtual:gaudi2, or virtual:hpu,memory=1GiB",
        ),
        ("virtual:mps,memory=lots", "'lots' is not a valid memory size", "16GiB"),
        ("virtual:mps,count=0", "must be between 1 and 999, not 0", "count=2"),
        ("virtual:mps,count=-1", "must be between 1 and 999, not -1", "count=2"),
        (
            "virtual:neuron:2,count=2",
            "index 2 in virtual:neuron:2,count=2 is out of range: the device count is 2",
            "neuron:1",
        ),
        ("nueron", "unknown device 'nueron'", "did you mean neuron?"),
        ("virtual:nueron", "unknown device 'nueron'", "did you mean neuron?"),
        ("trainum", "unknown device 'trainum'", "did you mean trainium?"),
        ("virtual:auto", "unknown device 'auto'", "known: cuda"),
        ("rtx6090", "unknown device 'rtx6090'", "with a memory size, such as cuda:24GiB, or a similar product: rtx"),
        ("gtx1080", "unknown device 'gtx1080'", "with a memory size, such as cuda:24GiB"),
        ("rtx 4060 ti", "unknown device 'rtx 4060 ti'", "use rtx4060ti-8gb or rtx4060ti-16gb"),
        ("RTX3080-Laptop", "unknown device 'rtx3080-laptop'", "use rtx3080-laptop-8gb or rtx3080-laptop-16gb"),
        ("arc-b999", "unknown device 'arc-b999'", "such as xpu:24GiB, or a similar product: arc-b580"),
        ("rx6800", "unknown device 'rx6800'", "with a memory size, such as rocm:24GiB"),
        ("gaudi9", "unknown device 'gaudi9'", "such as hpu:24GiB, or a known product: gaudi3, gaudi2"),
        ("m4-max", "unknown device 'm4-max'", "with a memory size, such as mps:24GiB"),
        (None, "unknown device 'none'", "known: cuda"),
        (b"cpu", "is not a valid device", "cuda, hpu:3"),
    ],
)
def test_invalid_strings(text: object, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        DeviceSpec.parse(text, REGISTRY)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert isinstance(caught.value, UnknownDeviceError) == message.startswith("unknown device")


SIZES = st.builds(lambda number, unit: f"{number}{unit}", st.integers(1, 999), st.sampled_from(["MiB", "GiB", "gb"]))
SHEETS = st.sampled_from(ALL_SHEETS)


@st.composite
def specs(draw: st.DrawFn) -> DeviceSpec:
    sheet = draw(SHEETS)
    product = draw(st.none() | st.sampled_from([product.name for product in sheet.products]))
    virtual = draw(st.booleans())
    count = draw(st.none() | st.integers(1, 999)) if virtual else None
    last = 10**9 - 1 if count is None else count - 1
    index = draw(st.none() | st.integers(0, last))
    memory = draw(st.none() | SIZES) if product is None and (virtual or index is None) else None
    strict = draw(st.booleans()) if virtual else False
    return DeviceSpec(
        name=sheet.name, index=index, product=product, memory=memory, virtual=virtual, count=count, strict=strict
    )


@given(specs())
def test_spec_round_trips_through_its_string(spec: DeviceSpec) -> None:
    assert DeviceSpec.parse(str(spec), REGISTRY) == spec


@given(
    st.text(max_size=30) | st.from_regex(r"(virtual:)?(hpu|gaudi2|auto|x)(:[0-9a-z.]*)?(,[a-z0-9=]*)*", fullmatch=True)
)
def test_any_text_is_a_spec_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        text = str(DeviceSpec.parse(text, REGISTRY))
    with suppress(UsageError):
        assert str(DeviceSpec.parse(text, REGISTRY)) == text


def test_names_aliases_and_products_are_unique() -> None:
    names = [
        name
        for sheet in ALL_SHEETS
        for name in (sheet.name, *sheet.aliases, *(product.name for product in sheet.products))
    ]
    assert len(names) == len(set(names))
    for sheet in ALL_SHEETS:
        for alias in sheet.aliases:
            assert DeviceSpec.parse(alias, REGISTRY).name == sheet.name


def test_virtual_prefix_is_defined_once() -> None:
    files = [path for path in SOURCE.rglob("*.py") if '= "virtual:"' in path.read_text()]
    assert [path.name for path in files] == ["device_spec.py"]


def test_integer_is_an_index_of_the_auto_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_device(0) == DeviceSpec(name=anyaccel.open_device("auto").sheet.name, index=0)
    monkeypatch.setenv("ANYACCEL_DEVICE", "virtual:neuron,count=4")
    assert read_device(3) == DeviceSpec(name="neuron", virtual=True, count=4, index=3)
    assert read_device("hpu").name == "hpu"
    with pytest.raises(UsageError, match="-1 is not a valid device index"):
        read_device(-1)
    with pytest.raises(UnknownDeviceError, match="unknown device 'true'"):
        read_device(True)


def test_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("nonsense", "cuda:x", "virtual:hpu,count=0", "virtual:hpu:2,count=1"):
        monkeypatch.setenv("ANYACCEL_DEVICE", value)
        with pytest.raises(UsageError, match=r"\(from ANYACCEL_DEVICE\)"):
            read_device("auto")


def test_specs_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match="cpu:16GiB includes a memory size, but the memory of a real device cannot be changed"
    ):
        anyaccel.open_device("cpu:16GiB")
    with pytest.raises(
        DeviceUnavailableError, match="the virtual device virtual:hpu has not been started in this process"
    ):
        anyaccel.open_device("virtual:hpu")
    assert not anyaccel.is_available("virtual:hpu")
    opened = anyaccel.open_device("cpu")
    monkeypatch.setattr(type(opened.driver), "product", lambda self, index: None)
    with pytest.raises(DeviceUnavailableError, match="no cpu device in this process has the product name host"):
        anyaccel.open_device("host")
    assert not anyaccel.is_available("host")
    monkeypatch.setattr(type(opened.driver), "product", lambda self, index: "host")
    assert anyaccel.open_device("host") == opened
    assert anyaccel.is_available("host:0")


def test_product_has_the_resolved_sheet_of_its_device() -> None:
    assert anyaccel.sheet("gaudi2") == anyaccel.sheet("hpu").on(product="gaudi2")
    assert anyaccel.sheet("mi300x").name == "rocm"


def test_cpu_tensors_have_no_index() -> None:
    opened = anyaccel.open_device("cpu")
    assert opened.tensor_device == torch.ones(1).device
    assert opened.sheet.is_host
    assert [sheet.name for sheet in ALL_SHEETS if sheet.is_host] == ["cpu"]
    assert isinstance(opened, OpenDevice)


def test_parsing_needs_no_torch() -> None:
    code = (
        "import sys; from anyaccel.backends.device import read_device; read_device('virtual:hpu,count=2');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "name", "product"),
    [
        ("rtx4090", "cuda", "rtx4090"),
        ("RTX 4090", "cuda", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "cuda", "rtx4090"),
        ("rtx-4090-laptop", "cuda", "rtx4090-laptop"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "cuda", "rtx5090-laptop"),
        ("rtx 4070 ti super", "cuda", "rtx4070ti-super"),
        ("rtx3060_12gb", "cuda", "rtx3060-12gb"),
        ("RX 7900 XTX", "rocm", "rx7900xtx"),
        ("rx-9060-xt-16gb", "rocm", "rx9060xt-16gb"),
        ("Arc B580", "xpu", "arc-b580"),
        ("arcb580", "xpu", "arc-b580"),
    ],
)
def test_products_can_be_written_with_spaces_and_hyphens(text: str, name: str, product: str) -> None:
    spec = DeviceSpec.parse(text, REGISTRY)
    assert (spec.name, spec.product) == (name, product)
    assert DeviceSpec.parse(f"{text}:1", REGISTRY).index == 1


@pytest.mark.parametrize("sheet", ALL_SHEETS, ids=lambda sheet: sheet.name)
def test_title_of_each_product_is_accepted(sheet: Sheet) -> None:
    for product in sheet.products:
        if re.fullmatch(r"[\w. -]+", product.title):
            assert DeviceSpec.parse(product.title, REGISTRY).product == product.name
