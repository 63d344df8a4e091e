"""Stub for the vendor's compiler: `torch.compile(backend='neuron')` on a virtual device.

The stub compiles nothing: it runs a graph operation by operation and checks each operation against
the limits. Like a vendor's compiler, it records one graph per set of input shapes and the source
line of each graph break, and writes one artifact file per graph to the vendor's cache folder for
later processes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anyaccel.backends.claim import Limit
from anyaccel.backends.sheet import Compiler
from anyaccel.emulator.torch_patch_registry import apply_patch
from anyaccel.errors import LimitError, VirtualDeviceError
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.upstream.torch_compile_internals import (
    GRAPH_BREAK_LOGGER,
    is_recompiling,
    parse_graph_break,
    register_compiler,
    skip_in_graphs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyaccel.emulator.accelerator import VirtualAccelerator

__all__ = ["CompileLog", "Graph", "GraphBreak", "install_compiler"]

# Version in the artifacts; vendors' compilers reject artifacts of another version.
COMPILER_VERSION = "1"


@dataclass(frozen=True)
class Graph:
    """A graph that torch.compile passed to the backend."""

    digest: str
    inputs: tuple[str, ...]
    """One string per input: `float32[1, 4, 8, 8]` for a tensor."""
    from_cache: bool
    """Whether the cache folder had its artifact."""
    recompiles: bool
    """Whether the same code was compiled before for other inputs."""


@dataclass(frozen=True)
class GraphBreak:
    """A source line at which a graph ended and execution returned to Python."""

    file: str
    line: int
    reason: str


@dataclass
class CompileLog:
    """Log of the graphs and graph breaks from torch.compile in this process."""

    graphs: list[Graph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def compiled(self) -> int:
        """Number of graphs that were compiled because the cache did not contain them."""
        return sum(not graph.from_cache for graph in self.graphs)

    @property
    def recompilations(self) -> list[Graph]:
        """Graphs that were compiled again because the inputs changed."""
        return [graph for graph in self.graphs if graph.recompiles]


def install_compiler(accelerator: VirtualAccelerator) -> None:
    """Register the stub as the torch.compile backend that the sheet names, unless that is inductor."""
    skip_in_graphs(__package__)  # dynamo must not trace the emulator into a program's graph
    compiler = accelerator.sheet.compiler
    if not isinstance(compiler, Compiler) or compiler.backend == "inductor":
        return

    def compile_graph(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        _record_graph(accelerator, compiler, module, example_inputs)
        forward: Callable[..., Any] = module.forward
        return forward

    register_compiler(compile_graph, compiler.backend)
    apply_patch("torch.compile", lambda original: _enforce_static_shapes(original, accelerator, compiler), "emulator")
    _record_graph_breaks(accelerator.compiler)


def _enforce_static_shapes(original: Any, accelerator: VirtualAccelerator, compiler: Compiler) -> Any:
    """Return a `torch.compile` wrapper that sets `dynamic=False` if the backend requires static shapes."""

    def compile_for_device(model: Any = None, **options: Any) -> Any:
        if options.get("backend") == compiler.backend and not compiler.dynamic:
            if options.get("dynamic"):
                raise LimitError(
                    f"{accelerator.sheet.title} (virtual) rejects torch.compile(dynamic=True). {compiler.says} "
                    f"({compiler.evidence}: {compiler.source})",
                    hint="omit dynamic=True and use only a few image sizes",
                )
            # The default None switches to dynamic shapes at the first recompilation.
            options["dynamic"] = False
        return original(model, **options)

    compile_for_device.__doc__ = original.__doc__
    compile_for_device.__name__ = "compile"
    return compile_for_device


def _record_graph(
    accelerator: VirtualAccelerator, compiler: Compiler, module: torch.fx.GraphModule, example_inputs: list[Any]
) -> None:
    inputs = tuple(_format_input(value) for value in example_inputs)
    # The code is not a sufficient key: the same code is compiled again for other input shapes.
    digest = hashlib.sha256("\n".join([module.code, *inputs]).encode()).hexdigest()[:32]
    recompiles = is_recompiling()
    graph = Graph(digest, inputs, _load_or_write_artifact(compiler, digest, inputs), recompiles)
    # Several threads can compile at the same time.
    with accelerator.compiler.lock:
        accelerator.compiler.graphs.append(graph)
    if recompiles and isinstance(accelerator.sheet.new_shapes, Limit):
        accelerator.hit_limit("new_shapes", accelerator.sheet.new_shapes, "torch.compile")


def _format_input(value: Any) -> str:
    """Format a graph input, such as `float32[1, 4]` for a tensor.

    The device is omitted, because all devices share the compiled artifacts.
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__}:{value}"


def find_artifact_folder(compiler: Compiler) -> Path | None:
    """Return the compiler's cache folder from the vendor's environment variable, or None if it is not set."""
    # Gaudi's PT_HPU_RECIPE_CACHE_CONFIG is "folder,delete,size".
    folder = os.environ.get(compiler.cache_variable, "").split(",")[0] if compiler.cache_variable else ""
    return Path(folder) if folder else None


def _load_or_write_artifact(compiler: Compiler, digest: str, inputs: tuple[str, ...]) -> bool:
    """Return whether the graph's artifact is in the cache folder; if not, write it.

    Raises VirtualDeviceError if the artifact was written by a different compiler version.
    """
    folder = find_artifact_folder(compiler)
    if folder is None:
        return False
    path = folder / f"{digest}.json"
    artifact = _read_artifact(path, digest)
    if artifact is not None:
        if artifact["compiler"] != COMPILER_VERSION:
            raise VirtualDeviceError(
                f"{path} was compiled with compiler version {artifact['compiler']}, but the current version is "
                f"{COMPILER_VERSION}",
                hint=f"delete the file, or set {compiler.cache_variable} to a different folder",
            )
        return True
    folder.mkdir(parents=True, exist_ok=True)
    content = {"graph": digest, "compiler": COMPILER_VERSION, "inputs": list(inputs), "virtual": True}
    atomic_write(path, json.dumps(content))
    return False


def _read_artifact(path: Path, digest: str) -> dict[str, Any] | None:
    """Return the contents of an artifact, or None if it is missing or corrupted."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    complete = isinstance(content, dict) and content.get("graph") == digest and "compiler" in content
    return content if complete else None


def _record_graph_breaks(log: CompileLog) -> None:
    """Collect graph breaks from torch's debug log, because torch does not report them anywhere else."""

    class GraphBreakHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            graph_break = parse_graph_break(record.getMessage())
            if graph_break is not None:
                with log.lock:
                    log.breaks.append(GraphBreak(*graph_break))

    logger = logging.getLogger(GRAPH_BREAK_LOGGER)
    logger.addHandler(GraphBreakHandler())
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # the debug records must not reach the program's log
