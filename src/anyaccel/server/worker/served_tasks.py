"""Tasks of a served model: its pipelines, their inputs, and the lengths of its videos or audio."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from PIL import Image

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.generation.call_validation import check_outputs, map_call
from anyaccel.generation.inputs import InputMedia, find_parameter
from anyaccel.generation.model_loading import LoadedModel
from anyaccel.generation.pipeline_interface import PipelineInterface, read_interface
from anyaccel.generation.tasks import find_pipe
from anyaccel.runtime.call.validation import find_size_multiple
from anyaccel.runtime.call_request import takes_reference_images
from anyaccel.runtime.durations import choose_frame_rate, find_frame_parameter, round_frames
from anyaccel.runtime.placement.memory_plan import find_default_side
from anyaccel.server.worker.job_spec import Task
from anyaccel.server.worker.messages import AudioFacts, VideoFacts

__all__ = [
    "find_default_size",
    "find_multiple",
    "find_pipelines",
    "list_inputs",
    "list_required",
    "read_audio_facts",
    "read_video_facts",
    "takes_many_images",
]

_LOG = logging.getLogger(__name__)
# Inputs of each task besides the prompt.
_TASK_INPUTS: Mapping[Task, tuple[str, ...]] = {
    "generate": ("control_image",),
    "edit": ("image", "control_image"),
    "inpaint": ("image", "mask_image", "control_image"),
}
_LIST_PARAMETERS = ("images", "reference_images", "input_images")
# A model without a default length generates videos of about this length.
_DEFAULT_SECONDS = 5


def find_pipelines(loaded: LoadedModel) -> dict[Task, Any]:
    """Return a pipeline for each task that the model may support; all of them share its components."""
    interface = read_interface(loaded.pipe)
    check_outputs(interface)
    if "prompt" not in interface.parameters:
        raise UsageError(f"{interface.name} does not accept a prompt", hint="serve a model that generates from text")
    if interface.pipeline_class is None:  # modular: its blocks for other tasks are not tested
        map_call(interface, {}, prompt=True)
        return {"generate": loaded.pipe}
    pipes: dict[Task, Any] = {}
    for task, needed in (("generate", ()), ("edit", ("image",)), ("inpaint", ("image", "mask_image"))):
        if task == "inpaint" and interface.kind != "image":
            continue
        try:
            pipe = _find_pipe(loaded, needed)
        except (AnyaccelError, ValueError, AttributeError, KeyError, TypeError) as error:
            _LOG.debug("anyaccel: %s does not support the task %s: %s", interface.name, task, error)
            continue
        if pipe is not None:
            pipes[task] = pipe  # type: ignore[index]
    if not pipes:
        raise UsageError(
            f"{interface.name} requires inputs that the service does not support", hint="serve another model"
        )
    return pipes


def _find_pipe(loaded: LoadedModel, needed: tuple[str, ...]) -> Any:
    """Return the pipeline for these inputs, or None if the one that takes them also works without the last input."""
    probe = Image.new("RGB", (64, 64))
    names = [*needed, *(["control_image"] if loaded.controlnet is not None else [])]
    call = {name: InputMedia(kind="image", media=probe) for name in names}
    pipe = find_pipe(loaded, call)
    interface = read_interface(pipe)
    if not names or (needed == () and loaded.controlnet is not None):
        # A ControlNet pipeline that was loaded as such has a control image; others need none of the inputs.
        is_control = find_parameter("control_image", interface.parameters, interface.components) is not None
        call = {**call, **({"control_image": InputMedia(kind="image", media=probe)} if is_control else {})}
    map_call(interface, call, prompt=True)
    return pipe


def list_inputs(pipe: Any, task: Task, *, with_ip_adapter: bool) -> tuple[str, ...]:
    """Return the inputs of a pipeline for a task."""
    interface = read_interface(pipe)
    names = [*_TASK_INPUTS[task], *(["ip_adapter_image"] if with_ip_adapter else [])]
    if interface.pipeline_class is None:
        return ()
    return tuple(name for name in names if find_parameter(name, interface.parameters, interface.components) is not None)


def list_required(inputs: Collection[str]) -> tuple[str, ...]:
    """Return the inputs without which a pipeline with adapters fails."""
    return tuple(name for name in ("control_image", "ip_adapter_image") if name in inputs)


def takes_many_images(pipe: Any) -> bool:
    """Return whether a call can have several input images."""
    interface = read_interface(pipe)
    parameter = find_parameter("image", interface.parameters, interface.components)
    return parameter in _LIST_PARAMETERS or (parameter == "image" and takes_reference_images(interface.name))


def find_default_size(pipe: Any) -> tuple[int, int]:
    """Return the default width and height of a pipeline."""
    interface = read_interface(pipe)
    if interface.kind == "audio":
        return 0, 0
    if interface.kind == "video":
        width, height = (interface.find_default(name) for name in ("width", "height"))
        if isinstance(width, int) and isinstance(height, int):
            return width, height
    side = find_default_side(pipe)
    return side, side


def find_multiple(pipe: Any) -> int:
    """Return the required divisor of width and height."""
    multiple = find_size_multiple(pipe) or 1
    processor = getattr(pipe, "video_processor", None)
    if processor is None:
        return multiple
    scale = getattr(processor.config, "vae_scale_factor", 1)
    # Wan rounds the size down to whole patches of the transformer: (frames, height, width).
    patch = getattr(getattr(getattr(pipe, "transformer", None), "config", None), "patch_size", 1)
    patch_side = patch[-1] if isinstance(patch, list | tuple) and len(patch) == 3 else 1
    return max(multiple, int(scale) * int(patch_side))


def read_video_facts(interface: PipelineInterface) -> VideoFacts:
    """Return the lengths and the frame rate of the videos of a pipeline."""
    fps, _ = choose_frame_rate(interface.name, interface.parameters, {})
    parameter = find_frame_parameter(interface.parameters)
    default = interface.find_default(parameter) if parameter else None
    # Two neighboring lengths that the pipeline generates show which others it does.
    lengths = sorted({round_frames(interface.pipe, count, default) for count in range(1, 100)})
    step = lengths[-1] - lengths[-2] if len(lengths) > 1 else 1
    rest = lengths[-1] % step
    frames = default if isinstance(default, int) else round_frames(interface.pipe, round(_DEFAULT_SECONDS * fps), None)
    return VideoFacts(
        frames=frames, fps=fps, step=step, rest=rest, with_audio=interface.with_audio, sets_frames=parameter is not None
    )


def read_audio_facts(interface: PipelineInterface) -> AudioFacts:
    """Return the default length of the audio of a pipeline, and whether a request can set it."""
    try:
        map_call(interface, {"seconds": 1.0}, prompt=True)
    except UsageError:
        return AudioFacts(seconds=None, sets_seconds=False)
    return AudioFacts(seconds=None, sets_seconds=True)
