"""A stand-in for the vendor's compiler: `torch.compile(backend="neuron")` on a virtual device.

It compiles nothing: a graph runs operation by operation, held against the limits as ever. It does what a vendor's
compiler does around that: one graph a shape, counted with the shapes that caused it; whole graphs or the line where
one breaks; an artefact a graph in the folder that the vendor's variable names, found again by the next process.
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
from anyaccel.emulator.torch_patches import apply_patch
from anyaccel.errors import LimitError, VirtualDeviceError
from anyaccel.storage.atomic_write import atomic_write
from anyaccel.upstream.torch_internals import (
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

COMPILER_VERSION = "1"


@dataclass(frozen=True)
class Graph:
    """One graph that the compiler was given."""

    digest: str
    inputs: tuple[str, ...]
    """`float32[1, 4, 8, 8]` for each tensor."""
    from_cache: bool
    """Whether an earlier process left its artefact, so that nothing was compiled."""
    recompiles: bool
    """Whether the same code had been compiled for other inputs before."""


@dataclass(frozen=True)
class GraphBreak:
    """A line at which a graph ended and the interpreter went on."""

    file: str
    line: int
    reason: str


@dataclass
class CompileLog:
    """What the compiler's stand-in was asked for in this process."""

    graphs: list[Graph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def compiled(self) -> int:
        """Graphs that were compiled here, and not found in the cache."""
        return sum(not graph.from_cache for graph in self.graphs)

    @property
    def recompilations(self) -> list[Graph]:
        """The graphs that were needed since the inputs changed, with those inputs."""
        return [graph for graph in self.graphs if graph.recompiles]


def install_compiler(accelerator: VirtualAccelerator) -> None:
    """Register the vendor's backend with torch.compile, where the sheet names one that torch does not have."""
    skip_in_graphs(__package__)  # what runs an operation here is never part of a program's graph
    compiler = accelerator.sheet.compiler
    if not isinstance(compiler, Compiler) or compiler.backend == "inductor":
        return

    def compile_graph(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        _take_graph(accelerator, compiler, module, example_inputs)
        forward: Callable[..., Any] = module.forward
        return forward

    register_compiler(compile_graph, compiler.backend)
    apply_patch("torch.compile", lambda compile_any: _hold_to_sheet(compile_any, accelerator, compiler), "emulator")
    _listen_for_breaks(accelerator.compiler)


def _hold_to_sheet(compile_any: Any, accelerator: VirtualAccelerator, compiler: Compiler) -> Any:
    """torch.compile for the vendor's backend: shapes stay static where the sheet says so, and asking is refused."""

    def compile_for_device(model: Any = None, **options: Any) -> Any:
        if options.get("backend") == compiler.backend and not compiler.dynamic:
            if options.get("dynamic"):
                raise LimitError(
                    f"{accelerator.sheet.title} (virtual) rejects torch.compile(dynamic=True). {compiler.says} "
                    f"({compiler.evidence}: {compiler.source})",
                    hint="leave dynamic out, and keep to a few sizes",
                )
            options["dynamic"] = False
        return compile_any(model, **options)

    compile_for_device.__doc__ = compile_any.__doc__
    compile_for_device.__name__ = "compile"
    return compile_for_device


def _take_graph(
    accelerator: VirtualAccelerator, compiler: Compiler, module: torch.fx.GraphModule, example_inputs: list[Any]
) -> None:
    inputs = tuple(_describe(value) for value in example_inputs)
    digest = hashlib.sha256("\n".join([module.code, *inputs]).encode()).hexdigest()[:32]
    recompiles = is_recompiling()
    graph = Graph(digest, inputs, _find_or_keep(compiler, digest, inputs), recompiles)
    with accelerator.compiler.lock:
        accelerator.compiler.graphs.append(graph)
    if recompiles and isinstance(accelerator.sheet.new_shapes, Limit):
        accelerator.meet("new_shapes", accelerator.sheet.new_shapes, "torch.compile")


def _describe(value: Any) -> str:
    """`float32[1, 4]`: the type and shape, without the device's index, so that every device shares an artefact."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__}:{value}"


def find_cache_folder(compiler: Compiler) -> Path | None:
    """The folder that the vendor's variable names; some put further settings behind a comma."""
    named = os.environ.get(compiler.cache_variable, "").split(",")[0] if compiler.cache_variable else ""
    return Path(named) if named else None


def _find_or_keep(compiler: Compiler, digest: str, inputs: tuple[str, ...]) -> bool:
    """Whether an artefact of this graph is there; makes one where it is not, or is damaged."""
    folder = find_cache_folder(compiler)
    if folder is None:
        return False
    path = folder / f"{digest}.json"
    artefact = _read_artefact(path, digest)
    if artefact is not None:
        if artefact["compiler"] != COMPILER_VERSION:
            raise VirtualDeviceError(
                f"the artefact {path} was made by version {artefact['compiler']} of the compiler, and this is "
                f"{COMPILER_VERSION}",
                hint=f"remove it, or point {compiler.cache_variable} to another folder",
            )
        return True
    folder.mkdir(parents=True, exist_ok=True)
    content = {"graph": digest, "compiler": COMPILER_VERSION, "inputs": list(inputs), "virtual": True}
    atomic_write(path, json.dumps(content))
    return False


def _read_artefact(path: Path, digest: str) -> dict[str, Any] | None:
    """What an artefact says; None if there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(content, dict) and content.get("graph") == digest and "compiler" in content
    return content if whole else None


def _listen_for_breaks(book: CompileLog) -> None:
    """Torch tells of graph breaks in its log alone: listen there, and keep the log as quiet as it was."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found = parse_graph_break(record.getMessage())
            if found is not None:
                with book.lock:
                    book.breaks.append(GraphBreak(*found))

    logger = logging.getLogger(GRAPH_BREAK_LOGGER)
    logger.addHandler(Listener())
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
