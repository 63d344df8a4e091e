"""One picture, made from a prompt and a seed, with its origin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyaccel.backends.device import this_machine
from anyaccel.backends.out_of_memory import is_out_of_memory
from anyaccel.errors import AnyaccelError, UsageError, first_line
from anyaccel.generation.call_validation import check_image_call, find_default, find_missing_image, pick_images
from anyaccel.generation.metadata import ImageMetadata, record_call
from anyaccel.generation.model_cache import LoadedModel
from anyaccel.generation.progress import counting_steps
from anyaccel.planning.plan import Plan
from anyaccel.progress import ProgressListener
from anyaccel.runtime.introspection import find_components
from anyaccel.runtime.pipeline import plain_class
from anyaccel.runtime.placement_state import find_options

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["GeneratedImage", "expected_metadata", "generate_image", "generate_images"]

_PACKAGES = ("anyaccel", "diffusers", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class GeneratedImage:
    """A picture, and all that is known of it."""

    image: Image.Image
    origin: ImageMetadata
    plan: Plan
    seconds: float


def generate_image(
    loaded: LoadedModel, prompt: str, seed: int, call: Mapping[str, Any], listener: ProgressListener | None = None
) -> GeneratedImage:
    """Make one picture. Each is a call of its own: in a batch it would not be the same to the last bit."""
    return generate_images(loaded, [prompt], [seed], call, listener)[0]


def generate_images(
    loaded: LoadedModel,
    prompts: Sequence[str],
    seeds: Sequence[int],
    call: Mapping[str, Any],
    listener: ProgressListener | None = None,
) -> list[GeneratedImage]:
    """Make a picture of each prompt in one call; each is the one that it would be alone, to rounding."""
    pipe, count = loaded.pipe, len(prompts)
    check_image_call(pipe, call)
    asked = {"prompt": prompts[0], "seed": seeds[0], **call}
    if count > 1:
        texts = {name: [text] * count for name, text in call.items() if "prompt" in name and isinstance(text, str)}
        asked = {**asked, "prompt": list(prompts), "seed": list(seeds), **texts}
    start = time.perf_counter()
    with counting_steps(pipe, listener), _explaining(pipe, call):
        output = pipe(**asked)
    images = pick_images(pipe, output, count)
    seconds = (time.perf_counter() - start) / count
    made = []
    for image, prompt, seed in zip(images, prompts, seeds, strict=True):
        origin = replace(expected_metadata(loaded, prompt, seed, call), width=image.width, height=image.height)
        made.append(GeneratedImage(image=image, origin=origin, plan=pipe.plan, seconds=seconds))
    return made


def expected_metadata(loaded: LoadedModel, prompt: str, seed: int, call: Mapping[str, Any]) -> ImageMetadata:
    """The origin of a picture that is yet to be made: all but its size."""
    pipe, plan = loaded.pipe, loaded.pipe.plan
    scheduler, config = _read_scheduler(pipe)
    held, unrecorded = record_call(call)
    versions = this_machine().versions
    return ImageMetadata(
        model=loaded.model.name,
        revision=loaded.revision,
        pipeline=plain_class(pipe).__name__,
        prompt=prompt,
        seed=seed,
        width=0,
        height=0,
        dtype=plan.dtype.value,
        speed=find_options(pipe).speed,
        device=plan.device,
        virtual=plan.virtual,
        negative_prompt=call.get("negative_prompt"),
        steps=_read_number(pipe, call, "num_inference_steps"),
        guidance=_read_number(pipe, call, "guidance_scale"),
        scheduler=scheduler,
        scheduler_config=config,
        versions={name: versions[name] for name in _PACKAGES if name in versions},
        call=held,
        unrecorded=unrecorded,
    )


def _read_number(pipe: Any, call: Mapping[str, Any], name: str) -> Any:
    """A number that a pipeline is given or takes by itself; a list of them is left to the record's `call`."""
    value = call.get(name, find_default(pipe, name))
    return value if isinstance(value, int | float) else None


def _read_scheduler(pipe: Any) -> tuple[str | None, dict[str, Any]]:
    """The class of the scheduler and its settings; of the first one where a pipeline has several."""
    parts = find_components(pipe)
    found = parts.get("scheduler") or next((part for part in parts.values() if hasattr(part, "set_timesteps")), None)
    if found is None:
        return None, {}
    # JSON has no infinity, and a scheduler may.
    return type(found).__name__, json.loads(found.to_json_string(), parse_constant=str)


@contextmanager
def _explaining(pipe: Any, call: Mapping[str, Any]) -> Iterator[None]:
    """Say in our words what a pipeline's own error means, where that is known."""
    try:
        yield
    except AnyaccelError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise AnyaccelError(
            f"the memory of {pipe.plan.device} does not hold this picture: {first_line(error)}",
            hint="ask for a smaller size, or for a type of 16 bits if it is not one already",
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        wanting = find_missing_image(pipe, call)
        if wanting is not None:
            name = plain_class(pipe).__name__
            raise UsageError(
                f"{name} failed, as pipelines do that begin with a picture and are given none: {first_line(error)}",
                hint=f"take a model that makes pictures from text alone, or give {wanting}= from Python",
            ) from error
        raise
