"""Recording what a function asks of the host: calls with their memory laid out, replayed without the function.

Small models spend a quarter of their time in Python, in making views and in asking for memory. A replay has none of it:
every tensor lies where it will lie, and only what computes is called again, by the same kernels in the same order, so
that the numbers are the same to the last bit. What cannot be replayed so is refused while it is recorded: numbers that
Python reads, random draws, shapes that depend on values. What torch's own operations do is checked by its parts, which
takes less than to do it all again; what others do, by a replay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from anyaccel.garbage import without_collecting
from anyaccel.host_recording.call import have_same_numbers
from anyaccel.host_recording.log import Log
from anyaccel.host_recording.program import Program

__all__ = ["record_host"]

_READS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__))


class _Reads(TorchFunctionMode):
    """Refuses what Python reads of a tensor without a call that a log would see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise RuntimeError(f"Python reads a number of a tensor: {func.__name__}")
        return func(*args, **(kwargs or {}))


def record_host(
    function: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    kept: Sequence[bool],
    *,
    longest_call_s: float = math.inf,
    most_bytes: int | None = None,
) -> tuple[Any, Callable[[], None]]:
    """Run a function, and give its result, whose tensors stay where they are, and a replay that fills them anew.

    What follows from inputs that are `kept` alone is worked out again only once one of these was written to. A function
    whose calls take longer on average, or which works in more memory, is refused.
    """
    log = Log()
    before = torch.default_generator.get_state()
    # Where all calls are seen, and memory can be written to again.
    with torch.inference_mode(False), torch.no_grad(), without_collecting():
        with log, _Reads():
            start = time.perf_counter()
            result = function()
            each = (time.perf_counter() - start) / max(1, len(log.calls))
        if each > longest_call_s:
            raise RuntimeError(f"its calls take {1e3 * each:.1f} ms each, which a replay shortens by little")
        if not torch.equal(before, torch.default_generator.get_state()):
            raise RuntimeError("it draws random numbers")
        program = Program(log, inputs, kept)
        leaves, spec = tree_flatten(result)
        program.lay_out(log.describe(leaves), most_bytes)
        if not program.is_sure:
            program.replay()
            if not all(map(have_same_numbers, leaves, program.results)):
                raise RuntimeError("a replay gave another result")
    return tree_unflatten(program.results, spec), program.replay
