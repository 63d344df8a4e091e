"""anyaccel: any diffusion pipeline, any accelerator, the same picture.

Public names are imported on first use, so `import anyaccel` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Type checkers do not evaluate __getattr__. `X as X` marks a re-export (PEP 484).
if TYPE_CHECKING:
    from anyaccel.backends import Backend as Backend
    from anyaccel.backends import Driver as Driver
    from anyaccel.backends import Memory as Memory
    from anyaccel.backends import Sheet as Sheet
    from anyaccel.backends.availability import Device as Device
    from anyaccel.backends.device import devices as devices
    from anyaccel.backends.device import is_available as is_available
    from anyaccel.backends.device import open_device as open_device
    from anyaccel.backends.device import sheet as sheet
    from anyaccel.backends.device_functions import adjust_dtype as adjust_dtype
    from anyaccel.backends.device_functions import device_count as device_count
    from anyaccel.backends.device_functions import empty_cache as empty_cache
    from anyaccel.backends.device_functions import manual_seed as manual_seed
    from anyaccel.backends.device_functions import max_memory as max_memory
    from anyaccel.backends.device_functions import memory as memory
    from anyaccel.backends.device_functions import randn as randn
    from anyaccel.backends.device_functions import reset_peak_memory as reset_peak_memory
    from anyaccel.backends.device_functions import supports_training as supports_training
    from anyaccel.backends.device_functions import synchronize as synchronize
    from anyaccel.checking.check import check as check
    from anyaccel.checking.report import Report as Report
    from anyaccel.emulator.activation import virtual as virtual
    from anyaccel.errors import AnyaccelError as AnyaccelError
    from anyaccel.explanation.explain import explain as explain
    from anyaccel.generation.generate import Result as Result
    from anyaccel.generation.generate import generate as generate
    from anyaccel.planning.plan import Plan as Plan
    from anyaccel.runtime.auto_pipelines import AutoPipelineForImage2Image as AutoPipelineForImage2Image
    from anyaccel.runtime.auto_pipelines import AutoPipelineForInpainting as AutoPipelineForInpainting
    from anyaccel.runtime.auto_pipelines import AutoPipelineForText2Image as AutoPipelineForText2Image
    from anyaccel.runtime.pipeline import DiffusionPipeline as DiffusionPipeline
    from anyaccel.runtime.pipeline import ModularPipeline as ModularPipeline
    from anyaccel.runtime.pipeline import place as place

# The module that defines each public name. Not a scan of the modules: importing them would import torch.
_MODULES = {
    "AnyaccelError": "anyaccel.errors",
    "AutoPipelineForImage2Image": "anyaccel.runtime.auto_pipelines",
    "AutoPipelineForInpainting": "anyaccel.runtime.auto_pipelines",
    "AutoPipelineForText2Image": "anyaccel.runtime.auto_pipelines",
    "Backend": "anyaccel.backends",
    "Device": "anyaccel.backends.availability",
    "DiffusionPipeline": "anyaccel.runtime.pipeline",
    "Driver": "anyaccel.backends",
    "Memory": "anyaccel.backends",
    "ModularPipeline": "anyaccel.runtime.pipeline",
    "Plan": "anyaccel.planning.plan",
    "Result": "anyaccel.generation.generate",
    "Sheet": "anyaccel.backends",
    "Report": "anyaccel.checking.report",
    "adjust_dtype": "anyaccel.backends.device_functions",
    "check": "anyaccel.checking.check",
    "device_count": "anyaccel.backends.device_functions",
    "devices": "anyaccel.backends.device",
    "empty_cache": "anyaccel.backends.device_functions",
    "explain": "anyaccel.explanation.explain",
    "generate": "anyaccel.generation.generate",
    "is_available": "anyaccel.backends.device",
    "manual_seed": "anyaccel.backends.device_functions",
    "max_memory": "anyaccel.backends.device_functions",
    "memory": "anyaccel.backends.device_functions",
    "open_device": "anyaccel.backends.device",
    "place": "anyaccel.runtime.pipeline",
    "randn": "anyaccel.backends.device_functions",
    "reset_peak_memory": "anyaccel.backends.device_functions",
    "sheet": "anyaccel.backends.device",
    "supports_training": "anyaccel.backends.device_functions",
    "synchronize": "anyaccel.backends.device_functions",
    "virtual": "anyaccel.emulator.activation",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("anyaccel")
    if name not in _MODULES:
        raise AttributeError(f"module 'anyaccel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # later accesses bypass __getattr__
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
