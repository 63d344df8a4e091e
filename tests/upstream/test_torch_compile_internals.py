"""Checks every entry of torch_compile_internals.py against the installed torch. A failure names the entry to update."""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyaccel.processes.forked_call import call_in_fork
from anyaccel.upstream import torch_compile_internals as internals


def test_unwrap_compiled() -> None:
    layer = torch.nn.Linear(2, 2)
    compiled = torch.compile(layer, backend="eager")
    assert internals.is_compiled(compiled)
    assert internals.unwrap_compiled(compiled) is layer
    assert not internals.is_compiled(layer)
    assert internals.unwrap_compiled(layer) is layer


def compile_with_a_break() -> tuple[bool, list[Any], bool, bool]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(internals.GRAPH_BREAK_LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    recompiled: list[bool] = []
    traced: list[bool] = []

    def compile_graph(module: Any, inputs: Any) -> Any:
        recompiled.append(internals.is_recompiling())
        traced.append(internals.is_tracing())
        return module.forward

    internals.register_compiler(compile_graph, "upstream_test")

    @torch.compile(backend="upstream_test", dynamic=False)
    def add(values: torch.Tensor) -> torch.Tensor:
        values = values + 1
        torch._dynamo.graph_break()
        return values * 2

    add(torch.zeros(2))
    first = recompiled[:]
    add(torch.zeros(3))
    breaks = [parsed for parsed in map(internals.parse_graph_break, messages) if parsed]
    timed = any(sum(times) > 0 for times in internals.read_compile_times_s().values())
    return not any(first) and any(recompiled), breaks, timed, all(traced) and not internals.is_tracing()


def test_graph_breaks_recompilations_and_compile_times() -> None:
    recompiles, breaks, timed, traced = call_in_fork(compile_with_a_break)
    assert recompiles
    assert timed
    assert traced
    assert breaks
    file, line, reason = breaks[0]
    assert file.endswith("test_torch_compile_internals.py")
    assert line > 0
    assert reason


def test_load_dynamo_is_still_needed() -> None:
    from torch._dynamo.polyfills import tensor

    internals.load_dynamo()
    assert "torch.Tensor.__new__" in inspect.getsource(tensor), "load_dynamo may no longer be needed"


def test_is_compiler_error() -> None:
    assert internals.is_compiler_error(torch._dynamo.exc.Unsupported("a reason"))
    assert internals.is_compiler_error(torch._inductor.exc.InductorError(ValueError("a reason"), None))
    assert not internals.is_compiler_error(ValueError("another"))


def test_skip_in_graphs() -> None:
    def compile_a_call() -> bool:
        internals.skip_in_graphs("anyaccel.backends")
        from anyaccel.backends.device_type_checks import is_host

        compiled = torch.compile(lambda values: values + is_host(values.device), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="skip"):
            compiled(torch.zeros(2))
        return True

    assert call_in_fork(compile_a_call)


def test_remove_and_restore_compiled_call() -> None:
    class Layer(torch.nn.Linear):  # Dynamo does not compile frames of torch's own layers on their own
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values) + 1

    layer, graphs = Layer(2, 2), list[Any]()

    def compile_graph(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    with torch.no_grad():
        layer.compile(backend=compile_graph)
        layer(torch.ones(1, 2))
        assert len(graphs) == 1
        compiled = internals.remove_compiled_call(layer)
        layer(torch.ones(3, 2))
        assert len(graphs) == 1
        internals.restore_compiled_call(layer, compiled)
        layer(torch.ones(3, 2))
    assert len(graphs) == 2


def test_find_compiler_and_inductor_cache() -> None:
    assert callable(internals.find_compiler("inductor"))
    assert internals.find_inductor_cache()
    internals.set_ptxas_path()
    with internals.pause_gc_after_compile():
        assert torch._dynamo.config.run_gc_after_compile is False


def test_unreadable_artifacts_are_logged_by_the_cache_logger(caplog: pytest.LogCaptureFixture) -> None:
    assert torch.compiler.load_cache_artifacts(b"not an artifact") is None
    assert {record.name for record in caplog.records} == {internals.CACHE_LOGGER}


def test_inductor_can_draw_random_numbers_like_eager_mode() -> None:
    config: Any = importlib.import_module("torch._inductor.config")
    with internals.draw_like_eager():
        assert config.fallback_random
    assert not config.fallback_random


def test_operations_compute_real_values_outside_of_fake_mode() -> None:
    with FakeTensorMode(), internals.leave_fake_mode():
        assert (torch.ones(2) + 1).tolist() == [2, 2]


def test_reset_dynamo_forgets_compiled_code() -> None:
    graphs: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda x: x + 1, backend=count)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert len(graphs) == 1
    internals.reset_dynamo()
    compiled(torch.ones(2))
    assert len(graphs) == 2
