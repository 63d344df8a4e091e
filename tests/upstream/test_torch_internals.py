"""Checks every entry of torch_internals.py against the installed torch. A failure names the entry to update."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.processes.forked_call import call_in_fork
from anyaccel.upstream import torch_internals as internals


def test_module_hooks_lists_all_hook_tables() -> None:
    layer = torch.nn.Linear(2, 2)
    empty = {name: len(value) for name, value in vars(layer).items() if isinstance(value, dict)}
    layer.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    changed = {name for name, size in empty.items() if len(vars(layer)[name]) != size}
    assert changed == set(internals.MODULE_HOOKS)


def test_moving_a_module_compares_each_weight_with_its_copy() -> None:
    compared = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is internals.HAS_COMPATIBLE_TYPE:
                compared.append([tensor.device.type for tensor in args])
            return func(*args, **(kwargs or {}))

    layer = torch.nn.Linear(2, 2)
    with Mode():
        layer.to("meta")
    assert compared == [["cpu", "meta"]] * 2


def test_int_mm_and_scaled_mm() -> None:
    ones = torch.ones(32, 32, dtype=torch.int8)
    assert set(internals.int_mm(ones, ones).flatten().tolist()) == {32}
    scale, packed = torch.ones(()), torch.ones(32, 32).to(torch.float8_e4m3fn)
    product = internals.scaled_mm(packed, packed.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    assert set(product.float().flatten().tolist()) == {32}


def test_function_modes_receive_pad_sequence_and_properties() -> None:
    seen: list[Any] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.nn.utils.rnn.pad_sequence([torch.zeros(1), torch.zeros(2)])
        torch.zeros(1).is_cuda  # noqa: B018
    assert internals.pad_sequence in seen
    assert internals.find_property("is_cuda") in seen


def test_find_default_device() -> None:
    assert internals.find_default_device() is None
    with torch.device("meta"):
        assert internals.find_default_device() == torch.device("meta")
    torch.set_default_device("meta")
    try:
        assert internals.find_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)


def test_refresh_factories() -> None:
    factories = torch.utils._device._device_constructors
    before = factories()
    internals.refresh_factories()
    assert factories() is not before
    assert torch.zeros in factories()


def test_allow_half_precision_attention() -> None:
    def switch() -> bool:
        internals.allow_half_precision_attention()
        return bool(torch._C._get_math_sdp_allow_fp16_bf16_reduction())

    assert call_in_fork(switch)


def test_dispatch_keys_and_device_types() -> None:
    assert internals.read_private_use_name() == "privateuseone"
    assert int(internals.read_device_type("PrivateUse1")) > int(internals.read_device_type("XPU"))
    assert internals.read_device_type("NO_SUCH_DEVICE") is None
    assert internals.is_decomposed(torch.ops.aten.group_norm.default)
    assert not internals.is_decomposed(torch.ops.aten.add.Tensor)
    assert not internals.has_fallback("AutocastPrivateUse1")
    with torch.autocast("cpu", torch.bfloat16), internals.exclude_dispatch_key("AutocastCPU"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_guard_table_has_an_entry_for_the_cpu_only() -> None:
    table = internals.find_guard_table(int(internals.read_device_type("PrivateUse1")) + 1)
    assert table[int(internals.read_device_type("CPU"))] is not None
    assert table[int(internals.read_device_type("XPU"))] is None, "this torch was built for XPU"


def register() -> tuple[str, bool, bool]:
    import types

    device_type = internals.read_device_type("XPU")
    table = internals.find_guard_table(int(internals.read_device_type("PrivateUse1")) + 1)
    guard = internals.make_guard(device_type)
    filled = guard is not None and table[int(internals.read_device_type("PrivateUse1"))] is not None
    module = types.ModuleType("torch.upstream")
    internals.register_device_module("hpu", module)
    return str(guard.type_()), filled, torch.get_device_module("hpu") is module


def test_make_guard_and_register_device_module() -> None:
    name, filled, registered = call_in_fork(register)
    assert name.endswith("XPU")
    assert filled
    assert registered


def claim() -> str:
    import types

    module: Any = types.ModuleType("torch.upstream")
    module.is_available, module._is_in_bad_fork = lambda: True, lambda: False
    internals.claim_private_use("upstream", module)
    return f"{internals.read_private_use_name()} {torch.device('upstream', 1)}"


def test_claim_private_use() -> None:
    assert call_in_fork(claim) == "upstream upstream:1"


def test_find_rebuild() -> None:
    tensor = internals.find_rebuild(is_parameter=False)(torch.ones(2), torch.float32, "cpu", False)
    assert tensor.tolist() == [1.0, 1.0]
    parameter = internals.find_rebuild(is_parameter=True)(torch.ones(2), True, {})
    assert isinstance(parameter, torch.nn.Parameter)


def test_out_of_memory_on_the_cpu_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value), str(caught.value)


def test_reexported_names() -> None:
    leaves, spec = internals.tree_flatten({"a": [1, (2,)]})
    assert isinstance(spec, internals.TreeSpec)
    assert internals.tree_unflatten(leaves, spec) == {"a": [1, (2,)]}
    assert internals.tree_map(lambda value: value + 1, [1]) == [2]
    assert internals.tree_map_only(int, lambda value: value + 1, [1, "x"]) == [2, "x"]
    assert issubclass(internals.FakeTensor, torch.Tensor)
    assert internals.PlainGenerator is torch.Generator
    assert hasattr(internals.TorchDispatchMode, "__torch_dispatch__")
    assert internals.disable_torch_function(torch.add, (), (1, 2), {}) == 3


def test_is_transformed() -> None:
    seen: list[bool] = []

    def record(value: torch.Tensor) -> torch.Tensor:
        seen.append(internals.is_transformed())
        return value

    record(torch.ones(2))
    torch.vmap(record)(torch.ones(2))
    trace: Any = torch.jit.trace
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        trace(record, torch.ones(2), check_trace=False)
    assert seen == [False, True, True]


def test_count_modes_and_autocast() -> None:
    assert (internals.count_function_modes(), internals.count_dispatch_modes()) == (0, 0)
    assert not internals.is_autocast_enabled()
    dispatch_mode: Any = internals.TorchDispatchMode
    with torch.overrides.BaseTorchFunctionMode(), dispatch_mode(), torch.autocast("cpu"):
        assert (internals.count_function_modes(), internals.count_dispatch_modes()) == (1, 1)
        assert internals.is_autocast_enabled()


def test_read_global_hooks() -> None:
    after, before = internals.read_global_hooks()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert (len(after), len(before)) == (1, 0)
    handle.remove()
    assert not after


def test_push_and_pop_function_mode() -> None:
    stack: Any = internals
    mode = torch.overrides.BaseTorchFunctionMode()
    stack.push_function_mode(mode)
    try:
        assert stack.read_function_modes() == [mode]
    finally:
        assert stack.pop_function_mode() is mode
    assert stack.read_function_modes() == []


def test_skip_function_modes() -> None:
    class Fail(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("the mode must not run")

    with Fail(), internals.skip_function_modes():
        assert torch.ones(2).sum().item() == 2


def test_read_version_counts_in_place_writes() -> None:
    tensor = torch.zeros(2)
    before = internals.read_version(tensor)
    tensor.view(2).add_(1)
    assert internals.read_version(tensor) == before + 1
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version counter"):
        internals.read_version(torch.zeros(2))


def test_read_address_of_views_and_generators() -> None:
    tensor, generator = torch.zeros(4), torch.Generator()
    assert internals.read_address(tensor[2:].untyped_storage()) == internals.read_address(tensor.untyped_storage())
    assert internals.read_address(tensor.clone().untyped_storage()) != internals.read_address(tensor.untyped_storage())
    assert internals.read_address(generator) != internals.read_address(torch.Generator())


def test_read_module_tables() -> None:
    layer = torch.nn.BatchNorm1d(2, affine=False)
    assert internals.read_parameter_table(layer) == {"weight": None, "bias": None}
    moved = torch.nn.Parameter(torch.ones(2))
    internals.read_parameter_table(layer)["weight"] = moved
    assert layer.weight is moved
    assert internals.read_child_table(torch.nn.Sequential(layer)) == {"0": layer}
    parameters, buffers = (vars(layer)[name] for name in internals.WEIGHT_TABLES)
    assert parameters is internals.read_parameter_table(layer)
    assert buffers == dict(layer.named_buffers())


def test_read_hook_tables() -> None:
    layer = torch.nn.Linear(2, 2)
    after, before = internals.read_hook_tables(layer)
    layer.register_forward_hook(lambda *_: None)
    assert (len(after), len(before)) == (1, 0)
    layer.register_forward_pre_hook(lambda *_: None)
    assert (len(after), len(before)) == (1, 1)
    assert [vars(layer)[name] for name in internals.FORWARD_HOOK_TABLES] == [after, before]


def test_convolutions_call_conv_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Conv2d, internals.CONVOLUTION_FORWARD, lambda self, values, weight, bias: "replaced")
    assert torch.nn.Conv2d(1, 1, 1)(torch.zeros(1, 1, 1, 1)) == "replaced"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_list_computed_weights() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: None)
    assert internals.list_computed_weights(layer) == []
    torch.nn.utils.weight_norm(layer)
    assert internals.list_computed_weights(layer) == ["weight"]
    assert internals.list_computed_weights(torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2))) == ["weight"]


def test_read_schema_and_can_decompose() -> None:
    add, in_place = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
    assert internals.read_schema(add).name == "aten::add"
    assert (internals.read_schema(add).is_mutable, internals.read_schema(in_place).is_mutable) == (False, True)
    assert [result.alias_info is None for result in internals.read_schema(torch.ops.aten.view.default).returns] == [
        False
    ]
    assert [argument.name for argument in internals.read_schema(torch.ops.aten.normal_.default).arguments][
        -1
    ] == "generator"
    assert internals.read_schema(add).overload_name == "Tensor"
    assert internals.read_schema(torch.ops.aten.view.default).overload_name == ""
    assert internals.can_decompose(torch.ops.aten.matmul.default)
    assert not internals.can_decompose(torch.ops.aten.mm.default)


def test_make_wrapper_subclass() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any) -> Any:
            raise AssertionError("no operation may run")

    wrapper = internals.make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.float16, device=torch.device("meta"))
    assert type(wrapper) is Wrapper
    assert (tuple(wrapper.shape), wrapper.dtype, wrapper.device.type) == ((2, 3), torch.float16, "meta")


def test_read_timeout() -> None:
    import datetime

    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=7)
    assert internals.read_timeout(options) == datetime.timedelta(seconds=7)
    source = inspect.getsource(distributed.distributed_c10d._new_process_group_helper)
    assert "backend_options._timeout" in source


def test_boolean_indexing_on_meta_selects_every_element() -> None:
    values, mask = torch.empty(3, 2, device="meta"), torch.empty(3, dtype=torch.bool, device="meta")
    with pytest.raises(NotImplementedError):
        values[mask]
    with internals.assume_all_nonzero():
        assert values[mask].shape == (3, 2)


def test_unwrap_no_grad() -> None:
    def function() -> None: ...

    assert internals.unwrap_no_grad(function) is function
    assert internals.unwrap_no_grad(torch.no_grad()(torch.inference_mode()(function))) is function


def test_flex_attention_is_supported_on_some_devices() -> None:
    assert internals.supports_flex_attention(torch.empty(1))
    assert not internals.supports_flex_attention(torch.empty(1, device="meta"))
