"""Pipeline classes that are defined outside of diffusers, in a Python file of the user or in the user's package."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import diffusers

from anyaccel.errors import AnyaccelError, ModelError, ModelFileError, UsageError, first_line
from anyaccel.upstream.diffusers_loading import CODE_CACHE, CUSTOM_PIPELINE_FILE, load_class_of_file

__all__ = ["check_class_name", "check_custom_blocks", "describe_code_error", "find_custom_file", "load_custom_class"]


def find_custom_file(custom_pipeline: Any) -> Path | None:
    """Return the Python file that `custom_pipeline=` names, or None if it names a repository or a community pipeline.

    Raise `ModelFileError` if the argument is a path that does not exist.
    """
    if not isinstance(custom_pipeline, str | Path):
        raise UsageError(
            f"custom_pipeline must be a path or a name, not {custom_pipeline!r:.80}",
            hint="call from_pretrained of the class, then anyaccel.place(pipe, device)"
            if isinstance(custom_pipeline, type)
            else f"pass the path of a Python file, or of a folder that contains {CUSTOM_PIPELINE_FILE}",
        )
    text = str(custom_pipeline)
    path = Path(text).expanduser()
    if text.startswith(("http://", "https://")):
        return None
    file = path / CUSTOM_PIPELINE_FILE if path.is_dir() else path
    # A repository has at most one slash, and a community pipeline has none.
    is_path = path.is_dir() or isinstance(custom_pipeline, Path) or text.startswith((".", "/", "~"))
    if not is_path and not text.endswith(".py") and text.count("/") < 2:
        return None
    if not file.is_file():
        raise ModelFileError(
            f"the pipeline file {file} does not exist",
            hint=f"pass the path of a Python file, or of a folder that contains {CUSTOM_PIPELINE_FILE}",
        )
    return file


def load_custom_class(file: Path) -> Any:
    """Import a Python file, and return the pipeline class that it defines."""
    found = _load_class(file, None)
    if found is None:
        raise ModelError(
            f"the pipeline file {file} defines no subclass of DiffusionPipeline",
            hint="define exactly one: class MyPipeline(DiffusionPipeline)",
        )
    return found


def check_custom_blocks(folder: Path) -> None:
    """Import the blocks in the Python file of a modular folder, if it has one; raise `ModelError` if this fails.

    This finds the reason after diffusers failed to load the folder.
    """
    config = folder / "modular_config.json"
    auto_map = json.loads(config.read_text()).get("auto_map") if config.is_file() else None
    reference = auto_map.get("ModularPipelineBlocks") if isinstance(auto_map, dict) else None
    if reference is None:
        return
    module, _, name = str(reference).partition(".")
    file = folder / f"{module}.py"
    if not file.is_file():
        raise ModelFileError(
            f"the file {file}, which {config.name} names for the blocks, does not exist",
            hint="copy or download the folder again",
        )
    _load_class(file, name)


def describe_code_error(error: BaseException | None, folder: Path) -> str:
    """Return the error that the Python code of a folder raised, with its line; empty if the code is not the cause."""
    while error is not None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if CODE_CACHE in frame.filename]
        files = [(Path(frame.filename).name, frame.lineno) for frame in frames]
        own = [(name, line) for name, line in files if (folder / name).is_file()]
        if own and not isinstance(error, AnyaccelError):
            return f"{type(error).__name__}: {first_line(error)} ({own[-1][0]}, line {own[-1][1]})"
        error = error.__cause__ or error.__context__
    return ""


def _load_class(file: Path, name: str | None) -> Any:
    try:
        return load_class_of_file(file, name)
    except Exception as error:
        raise ModelError(
            f"cannot import the pipeline file {file}: {type(error).__name__}: {first_line(error)}{_find_line(error)}",
            hint="fix the file, or install the packages that it imports",
        ) from error


def _find_line(error: Exception) -> str:
    """Return the line of the user's file at which an error occurred; a `SyntaxError` names its line itself."""
    frames = traceback.extract_tb(error.__traceback__)
    is_users = bool(frames) and not isinstance(error, SyntaxError) and frames[-1].name == "<module>"
    return f" (line {frames[-1].lineno})" if is_users else ""


def check_class_name(name: Any, source: str) -> None:
    """Raise `ModelError` if diffusers has no pipeline class of the name in an index."""
    if isinstance(name, str) and not hasattr(diffusers, name):
        raise ModelError(
            f"{source} was saved by the pipeline class {name}, which diffusers does not have",
            hint=f"load it with its class, anyaccel.place({name}.from_pretrained(…)), or pass the Python file of the "
            "class: custom_pipeline='path/to/pipeline.py', trust_remote_code=True",
        )
