"""The pipeline class for the inputs of a call, such as image-to-image for a text-to-image model and an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.generation.inputs import INPUT_OPTIONS, InputMedia, find_parameter
from anyaccel.generation.model_loading import LoadedModel
from anyaccel.generation.pipeline_interface import PipelineInterface, make_class_interface, read_interface
from anyaccel.upstream.auto_pipelines import Task, find_task_class

__all__ = ["check_task", "choose_class", "find_pipe", "list_inputs"]

# Pipelines for another input of the same model that diffusers' auto pipelines do not list (diffusers 0.42). Only those
# that run with the weights of the first one.
_SIBLINGS: Mapping[tuple[str, str], str] = {
    ("AnimateDiffPipeline", "video"): "AnimateDiffVideoToVideoPipeline",
    ("CogVideoXPipeline", "video"): "CogVideoXVideoToVideoPipeline",
    ("FluxKontextPipeline", "mask_image"): "FluxKontextInpaintPipeline",
    ("Flux2KleinPipeline", "mask_image"): "Flux2KleinInpaintPipeline",
    ("LTX2Pipeline", "image"): "LTX2ImageToVideoPipeline",
    ("LTXPipeline", "image"): "LTXImageToVideoPipeline",
    ("LTXPipeline", "video"): "LTXConditionPipeline",
    ("LTXImageToVideoPipeline", "video"): "LTXConditionPipeline",
    ("SanaVideoPipeline", "image"): "SanaImageToVideoPipeline",
    ("StableAudio3Pipeline", "audio"): "StableAudio3AudioToAudioPipeline",
    ("WanPipeline", "image"): "WanImageToVideoPipeline",
    ("WanPipeline", "video"): "WanVideoToVideoPipeline",
}


def list_inputs(call: Mapping[str, Any]) -> list[str]:
    """Return the names of the call arguments that are media."""

    def is_media(value: Any) -> bool:
        return isinstance(value, InputMedia) or (isinstance(value, list | tuple) and any(map(is_media, value)))

    return [name for name, value in call.items() if is_media(value)]


def choose_class(interface: PipelineInterface, call: Mapping[str, Any], *, controlnet: bool = False) -> type | None:
    """Return the pipeline class for the inputs of a call, or None for the loaded one, which takes them.

    Raise UsageError if no class of diffusers takes them with this model.
    """
    inputs = list_inputs(call)
    if interface.pipeline_class is None or not (inputs or controlnet):
        return None  # modular pipelines choose their blocks by the inputs
    if not controlnet and _takes_all(interface, inputs):
        return None
    found = _find_class(interface, inputs, controlnet)
    if found is None:
        options = " and ".join(INPUT_OPTIONS.get(name, name) for name in inputs) or "--control-model"
        raise UsageError(
            f"{interface.name} does not take {_list_kinds(inputs, controlnet)}, and diffusers has no pipeline "
            "that does with this model",
            hint=f"omit {options}, or use a model for this task",
        )
    # Wan 2.2 TI2V is one model for both tasks; the others have separate weights.
    if found.__name__ == "WanImageToVideoPipeline" and not interface.settings.get("expand_timesteps"):
        raise UsageError(
            "this Wan model generates videos from text only", hint="omit --image, or use an image-to-video model of Wan"
        )
    return None if found is interface.pipeline_class else found


def _takes_all(interface: PipelineInterface, inputs: list[str]) -> bool:
    # An IP-Adapter is loaded into the model, and does not change the task.
    return all(find_parameter(name, interface.parameters, interface.components) for name in inputs)


def _list_kinds(inputs: list[str], controlnet: bool) -> str:
    return " and ".join([*inputs, *(["a ControlNet"] if controlnet else [])])


def _find_class(interface: PipelineInterface, inputs: list[str], controlnet: bool) -> type | None:
    import diffusers

    for name in inputs:
        sibling = getattr(diffusers, _SIBLINGS.get((interface.name, name), ""), None)
        if sibling is not None and not controlnet and _takes_all(make_class_interface(sibling, {}), inputs):
            return sibling  # type: ignore[no-any-return]
    components = {"controlnet": ""} if controlnet else {}
    for task in _list_tasks(inputs):
        found = find_task_class(interface.name, task, controlnet=controlnet)
        if found is not None and _takes_all(make_class_interface(found, components), inputs):
            return found
    return None


def _list_tasks(inputs: list[str]) -> list[Task]:
    """Return the tasks that take these inputs, best first."""
    if "mask_image" in inputs:
        return ["inpainting"]
    if "image" in inputs:
        return ["image-to-image", "image-to-video"]
    if "video" in inputs:
        return ["video-to-video"]
    return ["text-to-image"]


def check_task(interface: PipelineInterface, call: Mapping[str, Any], *, controlnet: bool = False) -> PipelineInterface:
    """Return the interface of the pipeline class for a call; raise UsageError if there is none."""
    found = choose_class(interface, call, controlnet=controlnet)
    components = {**interface.components, **({"controlnet": ""} if controlnet else {})}
    return interface if found is None else make_class_interface(found, components)


def find_pipe(loaded: LoadedModel, call: Mapping[str, Any]) -> Any:
    """Return the pipeline for the inputs of a call: the loaded one, or one for another task with its components."""
    from anyaccel.runtime.pipeline import derive_portable
    from anyaccel.upstream.modular_blocks import configure_progress_bars

    interface = read_interface(loaded.pipe)
    found = choose_class(interface, call, controlnet=loaded.controlnet is not None)
    if found is None:
        return loaded.pipe
    if found not in loaded.derived:
        options = {} if loaded.controlnet is None else {"controlnet": loaded.controlnet}
        pipe = derive_portable(found, loaded.pipe, options)
        configure_progress_bars(pipe, disable=None)
        loaded.derived[found] = pipe
    return loaded.derived[found]
