"""Checks of a generation request that need the class of the pipeline, but not its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.errors import MissingLibraryError, UsageError
from anyaccel.generation.adapters import Additions
from anyaccel.generation.call_validation import check_outputs, map_call
from anyaccel.generation.inputs import find_parameter
from anyaccel.generation.pipeline_interface import PipelineInterface, find_interface
from anyaccel.generation.request import GenerationRequest
from anyaccel.generation.schedulers import choose_scheduler
from anyaccel.generation.tasks import check_task
from anyaccel.upstream.prompt_cleaning import needs_ftfy

__all__ = ["check_request"]


def check_request(request: GenerationRequest) -> PipelineInterface | None:
    """Return the interface of the pipeline that a request uses, or None if it is known only after loading.

    Raise UsageError if the pipeline cannot run the request.
    """
    interface = find_interface(request.model)
    if interface is None:
        return None
    additions = request.additions
    _check_additions(interface, additions, request.call)
    found = check_task(interface, request.call, controlnet=bool(additions.controlnets))
    check_outputs(found)
    for prompt, _ in request.images[:1]:
        has_prompt = "prompt" in found.parameters and prompt is not None
        map_call(found, request.call, prompt=has_prompt or bool(prompt))
        if has_prompt and found.pipeline_class is not None and needs_ftfy(found.pipeline_class):
            raise MissingLibraryError(
                f"{found.name} requires ftfy to clean prompts, which is not installed",
                hint="pip install 'anyaccel[video]'",
            )
    return found


def _check_additions(interface: PipelineInterface, additions: Additions, call: Mapping[str, Any]) -> None:
    """Raise UsageError if a pipeline does not support an adapter, or if its input is missing."""
    kind: Any = interface.pipeline_class
    if additions.loras and kind is not None and not hasattr(kind, "load_lora_weights"):
        raise UsageError(f"{interface.name} does not support LoRA", hint="omit --lora")
    if additions.ip_adapters and kind is not None and not hasattr(kind, "load_ip_adapter"):
        raise UsageError(f"{interface.name} does not support IP-Adapters", hint="omit --ip-adapter")
    images = call.get("ip_adapter_image")
    if additions.ip_adapters and images is None and call.get("ip_adapter_image_embeds") is None:
        raise UsageError("an IP-Adapter requires an image", hint="add --ip-image PATH (in Python ip_adapter_image=…)")
    if (
        images is not None
        and not additions.ip_adapters
        and not (kind is None or "image_encoder" in interface.components)
    ):
        raise UsageError(
            "an image for an IP-Adapter requires the IP-Adapter", hint="add --ip-adapter PATH (in Python ip_adapter=…)"
        )
    _check_count("--ip-image", "--ip-adapter", images, len(additions.ip_adapters), several=1)
    _check_control(interface, additions, call.get("control_image"))
    if additions.scheduler is not None:
        current = interface.components.get("scheduler")
        if current is not None:
            choose_scheduler(additions.scheduler, current)


def _check_control(interface: PipelineInterface, additions: Additions, control: Any) -> None:
    """Raise UsageError if there is a ControlNet without a control image, or the other way round."""
    if additions.controlnets and control is None:
        raise UsageError("a ControlNet requires an image", hint="add --control PATH (in Python control_image=…)")
    _check_count("--control", "--control-model", control, len(additions.controlnets))
    parameter = find_parameter("control_image", interface.parameters, interface.components)
    if control is not None and not additions.controlnets and parameter is None:
        raise UsageError(
            f"{interface.name} does not take a control image without a ControlNet",
            hint="add --control-model MODEL (in Python controlnet=…)",
        )


def _check_count(option: str, model_option: str, values: Any, models: int, several: int = 0) -> None:
    """Raise UsageError unless there is one input for each model; `several` models may have more inputs."""
    count = len(values) if isinstance(values, list | tuple) else 1
    if values is not None and models and models != several and count != models:
        raise UsageError(
            f"{models} of {model_option} require{'s' * (models == 1)} {models} of {option}, not {count}",
            hint=f"pass {option} once for each {model_option}",
        )
