"""Graph passes that make a graph cheaper or possible to compile, or keep its values as in eager mode."""

from __future__ import annotations

import operator
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host
from anyaccel.upstream.torch_compile_internals import leave_fake_mode

__all__ = ["fold_cpu_constants", "keep_rounding", "replace_fill_diagonal"]

_IN_PLACE_OPERATORS = {operator.setitem, *(getattr(operator, name) for name in dir(operator) if name.startswith("__i"))}
# `__index__`, `__inv__` and `__invert__` start with the same letters, but do not write to their argument.
_IN_PLACE_OPERATORS -= {operator.__index__, operator.__inv__, operator.__invert__}
_UNINITIALIZED = "empty"
_HALF_PRECISION = (torch.float16, torch.bfloat16)


def fold_cpu_constants(module: torch.fx.GraphModule) -> int:
    """Compute CPU tensors that depend on no input once, and store them in the module; return their number.

    Rotary embeddings are an example: several models compute them on the CPU at every call. In a graph
    for an accelerator, Inductor would compile C++ code for them, which takes longer than compiling the
    rest of a small model, and the copy to the device would prevent the capture of device graphs.
    """
    values: dict[torch.fx.Node, Any] = {}
    state = torch.default_generator.get_state()
    with leave_fake_mode(), torch.no_grad():
        for node in module.graph.nodes:
            if _is_constant(node, values):
                values[node] = _evaluate(node, values)
    if not torch.equal(torch.default_generator.get_state(), state):
        # Random values are not constants.
        torch.default_generator.set_state(state)
        return 0
    used = [node for node in values if any(user not in values for user in node.users)]
    is_tensor = all(isinstance(values[node], torch.Tensor) for node in used)
    if not used or not is_tensor or _is_written_to(module.graph, values):
        return 0
    for index, node in enumerate(used):
        name = f"_tensor_constant_anyaccel{index}"
        # A plain attribute, as for `torch.tensor` in compiled code: AOTAutograd rejects buffers that are not inputs.
        setattr(module, name, values[node])
        with module.graph.inserting_before(node):
            stored = module.graph.create_node("get_attr", name)
            constant = module.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (stored,))
        stored.meta = constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
    module.graph.eliminate_dead_code()
    module.recompile()
    return len(used)


def _is_constant(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> bool:
    """Return whether a node computes a CPU tensor from constants, or moves such a tensor to a device."""
    if node.op not in ("call_function", "call_method") or not values.keys() >= set(node.all_input_nodes):
        return False
    if _is_in_place(node) or _UNINITIALIZED in str(getattr(node.target, "__name__", node.target)):
        return False
    example = node.meta.get("example_value")
    items = list(example) if isinstance(example, list | tuple) else [example]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if not tensors or len(tensors) != len(items):
        return False
    return all(is_host(tensor.device) for tensor in tensors) or (
        bool(node.all_input_nodes) and node.op == "call_method" and node.target == "to"
    )


def _evaluate(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _is_in_place(node: torch.fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    writes = name.endswith("_") and not name.endswith("__")
    return writes or node.target in _IN_PLACE_OPERATORS or "out" in node.kwargs or node.kwargs.get("inplace") is True


def _is_written_to(graph: torch.fx.Graph, values: dict[torch.fx.Node, Any]) -> bool:
    """Return whether an in-place operation may write to a constant, directly or through a view."""
    derived = set(values)
    for node in graph.nodes:
        if derived.isdisjoint(node.all_input_nodes):
            continue
        if _is_in_place(node) and node not in values:
            return True
        derived.add(node)
    return False


def replace_fill_diagonal(module: torch.fx.GraphModule) -> int:
    """Replace `fill_diagonal_` on matrices with `masked_fill_`; return the number of replacements.

    AOTAutograd implements `fill_diagonal_` with `as_strided`, which it rejects for a view that is written
    to (https://github.com/pytorch/pytorch/issues/104505, torch 2.11).
    """
    replaced = 0
    for node in list(module.graph.nodes):
        if node.op != "call_method" or node.target != "fill_diagonal_" or len(node.args) != 2 or node.kwargs:
            continue
        matrix, value = node.args
        example = matrix.meta.get("example_value")
        if (
            not isinstance(example, torch.Tensor)
            or example.dim() != 2
            or not all(type(n) is int for n in example.shape)
        ):
            continue
        with module.graph.inserting_before(node):
            options: dict[str, Any] = {"dtype": torch.bool, "device": example.device}
            diagonal = module.graph.call_function(torch.eye, tuple(example.shape), options)
            filled = module.graph.call_method("masked_fill_", (matrix, diagonal, value))
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled)
        module.graph.erase_node(node)
        replaced += 1
    if replaced:
        module.recompile()
    return replaced


def keep_rounding(module: torch.fx.GraphModule) -> int:
    """Let casts from float32 to half precision round, as in eager mode; return the number of casts.

    Inductor computes in float32 and drops a cast whose result it converts back, such as the one in the
    rotary embedding of Kandinsky 5. A bitwise operation needs the rounded value.
    """
    # `emulate_precision_casts` of Inductor has no effect on such a pair of casts in torch 2.11, and slows down all
    # other kernels, because it also forbids fused multiply-add.
    casts = [node for node in module.graph.nodes if _rounds(node)]
    for node in casts:
        dtype = node.meta["example_value"].dtype
        with module.graph.inserting_after(node):
            bits = module.graph.call_method("view", (node, torch.int16))
        with module.graph.inserting_after(bits):
            same_bits = module.graph.call_method("bitwise_and", (bits, -1))
        with module.graph.inserting_after(same_bits):
            rounded = module.graph.call_method("view", (same_bits, dtype))
        rounded.meta = dict(node.meta)
        node.replace_all_uses_with(rounded, delete_user_cb=lambda user, bits=bits: user is not bits)
    if casts:
        module.recompile()
    return len(casts)


def _rounds(node: torch.fx.Node) -> bool:
    """Return whether a node casts a float32 tensor to half precision."""
    result, inputs = node.meta.get("example_value"), node.all_input_nodes
    if not inputs or not isinstance(result, torch.Tensor) or result.dtype not in _HALF_PRECISION:
        return False
    before = inputs[0].meta.get("example_value")
    return isinstance(before, torch.Tensor) and before.dtype is torch.float32 and before.shape == result.shape
