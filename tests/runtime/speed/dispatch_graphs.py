"""A fake graph recorder for the CPU, which replays operations without running Python code, as CUDA graphs do."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class DispatchGraphs:
    """A `record` function that stores the ATen operations of one run and replays them into the same tensors.

    As in a CUDA graph, tensors are read by address, and a value that Python code reads during the capture is an error.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        log = _Log()
        with log:
            result = function()

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode():
                for func, leaves, spec, outputs in log.operations:
                    args, kwargs = tree_unflatten(leaves, spec)
                    for buffer, value in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                        if not _is_same_memory(buffer, value):
                            buffer.copy_(value)

        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, result), replay


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        leaves, spec = tree_flatten((args, kwargs or {}))
        # Aliases: a later `weight.data = …` must not change what the operation reads.
        aliases = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        output = func(*args, **(kwargs or {}))
        self.operations.append((func, aliases, spec, [tensor.detach() for tensor in _tensors(output)]))
        return output


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _is_same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.stride() == right.stride()
