"""The loading of a pipeline's components in diffusers 0.42.1. File paths are relative to the package of diffusers."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyaccel.errors import UpstreamError

__all__ = [
    "CODE_CACHE",
    "CUSTOM_PIPELINE_FILE",
    "LoadedComponent",
    "calling_after_each_component",
    "find_components_manager",
    "find_offload_device",
    "list_component_specs",
    "load_class_of_file",
    "read_absent_components",
    "recording_component_errors",
]

# pipelines/pipeline_loading_utils.py: the file of a pipeline in a folder.
CUSTOM_PIPELINE_FILE = "pipeline.py"
# utils/dynamic_modules_utils.py: part of the paths of the copies of Python files from which custom code is imported.
CODE_CACHE = "diffusers_modules"

_LOCK = threading.RLock()

# Called with the name of a component, the component, the folder of the pipeline and the variant of the files.
LoadedComponent = Callable[[str, Any, str, str | None], None]


@contextmanager
def calling_after_each_component(function: LoadedComponent) -> Iterator[None]:
    """Call a function with each component that `from_pretrained` loads in this block, before it loads the next one.

    Components that the user passes are not loaded.
    """
    # pipelines/pipeline_utils.py: `from_pretrained` calls it with keyword arguments, once for each component.
    module: Any = importlib.import_module("diffusers.pipelines.pipeline_utils")
    thread = threading.get_ident()
    with _LOCK:
        load = module.load_sub_model

        @functools.wraps(load)
        def load_and_call(*args: Any, **kwargs: Any) -> Any:
            component = load(*args, **kwargs)
            if threading.get_ident() == thread:  # others load pipelines without anyaccel
                function(kwargs["name"], component, str(kwargs["cached_folder"]), kwargs.get("variant"))
            return component

        module.load_sub_model = load_and_call
        try:
            yield
        finally:
            module.load_sub_model = load


def list_component_specs(pipe: Any) -> dict[str, Any]:
    """Return the specs of the components that a modular pipeline loads, in the order of its blocks.

    The others are created from a config, such as guiders and image processors.
    """
    # modular_pipelines/modular_pipeline.py. `get_component_spec` returns a copy, but `load` sets the spec's fields.
    return {name: pipe._component_specs[name] for name in pipe.pretrained_component_names}


def load_class_of_file(file: Path, name: str | None = None) -> Any:
    """Import a Python file as diffusers does for custom code; return the class of this name, or its pipeline class."""
    utils: Any = importlib.import_module("diffusers.utils.dynamic_modules_utils")
    # diffusers runs each file in the module of its name, so the classes of an earlier file of that name would be found,
    # too.
    sys.modules.pop(f"diffusers_modules.local.{file.stem}", None)
    folder = str(file.absolute().parent)
    return utils.get_class_from_dynamic_module(folder, module_file=file.name, class_name=name, trust_remote_code=True)


def find_components_manager(pipe: Any) -> Any:
    """Return the components manager of a modular pipeline, or None if it has none."""
    return pipe._components_manager  # modular_pipelines/modular_pipeline.py


def find_offload_device(pipe: Any) -> Any:
    """Return the device to which a components manager moves the models of a modular pipeline when they run, or None."""
    library: Any = importlib.import_module("diffusers")
    manager = find_components_manager(pipe) if isinstance(pipe, library.ModularPipeline) else None
    # modular_pipelines/components_manager.py
    return manager._auto_offload_device if manager is not None and manager._auto_offload_enabled else None


def read_absent_components(pipe: Any, **hub: Any) -> set[str]:
    """Return the components that a plain index marks as absent: `"image_encoder": [null, null]`.

    diffusers tries to load them if a modular pipeline is created from a plain folder or repository.
    """
    # modular_pipelines/modular_pipeline.py: the first config is that of a modular index, the second one of a plain one.
    _, config = pipe._load_pipeline_config(pipe._pretrained_model_name_or_path, **hub)
    return {name for name, entry in (config or {}).items() if isinstance(entry, list) and entry[:1] == [None]}


@contextmanager
def recording_component_errors() -> Iterator[dict[str, Exception]]:
    """Yield the errors by component that `load_components` of modular pipelines only logs in this block."""
    # modular_pipelines/modular_pipeline_utils.py
    spec_class: Any = importlib.import_module("diffusers.modular_pipelines.modular_pipeline_utils").ComponentSpec
    if not hasattr(spec_class, "pretrained_model_name_or_path"):
        raise UpstreamError(
            "this version of diffusers has another format of modular pipelines", hint="pip install 'diffusers>=0.42'"
        )
    thread = threading.get_ident()
    errors: dict[str, Exception] = {}
    with _LOCK:
        load = spec_class.load

        @functools.wraps(load)
        def load_and_record(spec: Any, **kwargs: Any) -> Any:
            try:
                return load(spec, **kwargs)
            except Exception as error:
                if threading.get_ident() == thread:
                    errors[spec.name] = error
                raise

        spec_class.load = load_and_record
        try:
            yield errors
        finally:
            spec_class.load = load
