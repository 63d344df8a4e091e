"""Generation metadata: everything required to regenerate an image, a video or audio, stored in its file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from anyaccel.backends.device_spec import DeviceSpec, read_device_name
from anyaccel.call_limits import LARGEST_SEED
from anyaccel.embedded.model import NAME
from anyaccel.embedded.motion import VIDEO_NAME
from anyaccel.errors import UsageError
from anyaccel.generation.recorded_files import (
    check_recorded_files,
    is_recorded_input,
    list_adapters,
    list_input_files,
)

__all__ = [
    "FORMAT",
    "MediaMetadata",
    "describe_metadata",
    "find_differences",
    "read_document",
    "record_call",
    "write_document",
]

# Newest document format that this version reads. Increase it if older versions could not read new documents.
# Format 1 lists the images of a contact sheet under `pictures`, format 2 under `images`. The document of a single image
# is the same in both; it is written as format 1, which version 0.1 can read. That version would ignore `weights`, so
# images of quantized weights have format 2. Earlier versions would also ignore the fields of format 3.
FORMAT = 3
_SINGLE_IMAGE_FORMAT, _IMAGES_FORMAT = 1, 2
# Fields that documents of earlier formats do not have.
_ADDED_IN_2 = ("weights", "weight_errors")
# Written only if they differ from their defaults, so that the documents of images from a prompt stay readable by
# earlier versions.
_ADDED_IN_3 = ("kind", "inputs", "adapters", "requested_scheduler", "fps", "frames", "sampling_rate")

# Key of the JSON object that stands for a tuple: JSON has only lists.
_TUPLE = "tuple of"
# Call arguments with their own field in `MediaMetadata`.
_OWN_FIELDS = ("num_inference_steps", "guidance_scale", "negative_prompt")


@dataclass(frozen=True, kw_only=True)
class MediaMetadata:
    """Everything that determines an image, a video or audio: the model, call, device and software versions."""

    model: str
    """`embedded`, `embedded-video`, a Hub ID, or a folder, with `~` for the home folder."""
    revision: str | None
    """Commit of a hub model; for a folder and the embedded model a digest of the files."""
    pipeline: str
    """Class name, such as `StableDiffusionPipeline`."""
    prompt: str
    seed: int
    width: int
    height: int
    """Actual size of the image; a requested size is also in `call`."""
    dtype: str
    device: str
    """Device with its index, such as `neuron:0`."""
    virtual: bool
    """Whether the device was a virtual accelerator."""
    speed: str = "exact"
    """Speed level: `exact`, `fast` or `draft`."""
    weights: str | None = None
    """Format to which the weights were quantized, such as `int8`."""
    weight_errors: Mapping[str, Any] = field(default_factory=dict)
    """Mean relative error of the quantized weights of each model."""
    negative_prompt: str | None = None
    steps: int | None = None
    guidance: float | None = None
    scheduler: str | None = None
    """Class name, such as `DDIMScheduler`."""
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the pipeline call."""
    unrecorded: tuple[str, ...] = ()
    """Names of arguments that cannot be stored as JSON, such as an input image that was not a file."""
    kind: str = "image"
    """`image`, `video` or `audio`."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """The input files: `name` of the argument, `kind`, `path` with `~` for the home folder, and `sha256`."""
    adapters: tuple[Mapping[str, Any], ...] = ()
    """LoRAs, IP-Adapters and ControlNets: `kind`, `source`, `weight`, and `sha256` of a local file."""
    requested_scheduler: str | None = None
    """Name of the scheduler that replaced the one of the model."""
    fps: float | None = None
    """Frames per second of a video."""
    frames: int | None = None
    """Number of frames of a video."""
    sampling_rate: int | None = None
    """Samples per second of audio."""

    @property
    def is_from_hub(self) -> bool:
        """Whether the model comes from the Hugging Face Hub."""
        return (
            self.model not in (NAME, VIDEO_NAME)
            and not self.model.startswith("~")
            and not Path(self.model).is_absolute()
        )

    @property
    def device_kind(self) -> str:
        """Device name without an index, as accepted by `--device`: `cuda`, `virtual:neuron`."""
        return str(DeviceSpec(name=read_device_name(self.device), virtual=self.virtual))

    def arguments(self, replaced: Collection[str] = ()) -> dict[str, Any]:
        """Return the arguments that regenerate the result: `anyaccel.generate(**metadata.arguments())`.

        Arguments in `replaced` are left out. Raises UsageError if an argument was not recorded, or if an input file or
        an adapter has changed.
        """
        missing = [name for name in self.unrecorded if name not in replaced]
        if missing:
            raise UsageError(
                f"the {self.kind} was generated with arguments that its metadata does not include: "
                f"{', '.join(missing)}",
                hint="call anyaccel.generate in Python and pass these arguments again",
            )
        own = {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "negative_prompt": self.negative_prompt,
            "scheduler": self.requested_scheduler,
        }
        arguments = {
            "prompt": self.prompt,
            "model": self.model,
            "revision": self.revision if self.is_from_hub else None,
            "device": self.device_kind,
            "seed": self.seed,
            "dtype": self.dtype,
            **({"speed": self.speed} if self.speed != "exact" else {}),
            **({"weights": self.weights} if self.weights is not None else {}),
            **{name: value for name, value in own.items() if value is not None},
            **{name: _unpack(value) for name, value in self.call.items()},
            **list_input_files([item for item in self.inputs if item["name"] not in replaced], self.kind),
            **list_adapters([item for item in self.adapters if item["kind"] not in replaced], self.kind),
        }
        return {name: value for name, value in arguments.items() if name not in replaced}


def record_call(call: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the call arguments to record, and the names of those that cannot be stored as JSON.

    Arguments that have their own field in `MediaMetadata`, such as input files, are omitted.
    """
    recorded: dict[str, Any] = {}
    unrecorded: list[str] = []
    for name, value in call.items():
        if (name in _OWN_FIELDS and isinstance(value, int | float | str)) or is_recorded_input(value):
            continue
        packed = _pack(value)
        try:
            json.dumps(packed, allow_nan=False)
        except (TypeError, ValueError):
            unrecorded.append(name)
        else:
            recorded[name] = packed
    return recorded, tuple(unrecorded)


def _pack(value: Any) -> Any:
    """Convert tuples, including those in lists, to JSON objects, so that they can be restored as tuples."""
    # Not to lists: some pipelines concatenate tuples, which fails with a list.
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in value]}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {_TUPLE} and isinstance(value[_TUPLE], list):
        return tuple(_unpack(item) for item in value[_TUPLE])
    return [_unpack(item) for item in value] if isinstance(value, list) else value


def write_document(metadata: Sequence[MediaMetadata]) -> str:
    """Return the metadata of one result, or of all images on a contact sheet, as an ASCII JSON document."""
    documents = [_to_document(item) for item in metadata]
    newest = any(name in document for document in documents for name in _ADDED_IN_3)
    if len(documents) == 1:
        quantized = _IMAGES_FORMAT if metadata[0].weights else _SINGLE_IMAGE_FORMAT
        return json.dumps({"format": FORMAT if newest else quantized, **documents[0]})
    # Values that all images share are stored once: with a few dozen images, the scheduler configs would exceed the
    # 64 KiB of EXIF data in a JPEG.
    shared = {
        name: value
        for name, value in documents[0].items()
        if all(name in document and document[name] == value for document in documents)
    }
    images = [{name: value for name, value in document.items() if name not in shared} for document in documents]
    return json.dumps({"format": FORMAT if newest else _IMAGES_FORMAT, **shared, "images": images})


def _to_document(metadata: MediaMetadata) -> dict[str, Any]:
    document = asdict(metadata)
    for item in fields(metadata):
        if item.name in _ADDED_IN_3 and document[item.name] == item.default:
            del document[item.name]
    return document


def read_document(text: str) -> tuple[MediaMetadata, ...]:
    """Return the metadata for each image in a document; raise ValueError if the document is not valid."""
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("format"), int):
        raise ValueError("expected a JSON object with an integer `format`")
    if document["format"] > FORMAT:
        raise ValueError(f"format {document['format']} is newer than the supported format {FORMAT}")
    # Version 0.1 wrote `pictures`. A single image has neither key.
    images_v1 = document.pop("pictures", [{}])
    images = document.pop("images", images_v1)
    if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
        raise ValueError(f"expected a non-empty list of images, not {images!r:.60}")
    return tuple(_read_image_metadata({**document, **image}) for image in images)


# JSON types for each annotation in `MediaMetadata`, which `from __future__ import annotations` turns into strings.
_FIELD_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "bool": (bool,),
    "Mapping[str, Any]": (dict,),
    "Mapping[str, str]": (dict,),
    "tuple[str, ...]": (list,),
    "tuple[Mapping[str, Any], ...]": (list,),
}


def _read_image_metadata(document: Mapping[str, Any]) -> MediaMetadata:
    """Return the metadata of one image; raise ValueError if a field is missing or invalid.

    Unknown fields, which later versions may add, are ignored.
    """
    values: dict[str, Any] = {}
    for attribute in fields(MediaMetadata):
        if attribute.name not in document and attribute.name in (*_ADDED_IN_2, *_ADDED_IN_3):
            continue
        if attribute.name not in document:
            raise ValueError(f"the field {attribute.name!r} is missing")
        value = document[attribute.name]
        # bool is a subclass of int, so isinstance alone would accept `"seed": true`.
        is_misplaced_bool = isinstance(value, bool) and attribute.type != "bool"
        if is_misplaced_bool or not isinstance(value, _FIELD_TYPES[str(attribute.type)]):
            raise ValueError(f"the field {attribute.name!r} has the invalid value {value!r:.60}")
        values[attribute.name] = tuple(value) if isinstance(value, list) else value
    metadata = MediaMetadata(**values)
    check_recorded_files((*metadata.inputs, *metadata.adapters))
    if not 0 <= metadata.seed <= LARGEST_SEED:
        raise ValueError(f"the seed must be an integer from 0 to 2**64 - 1, not {metadata.seed}")
    return metadata


def describe_metadata(metadata: MediaMetadata) -> str:
    """Return the metadata as text in the `parameters` format of stable-diffusion-webui."""
    values = {
        "Steps": metadata.steps,
        "Sampler": metadata.scheduler,
        "CFG scale": metadata.guidance,
        "Seed": metadata.seed,
        "Size": f"{metadata.width}x{metadata.height}" if metadata.kind != "audio" else None,
        "Frames": metadata.frames,
        "FPS": None if metadata.fps is None else f"{metadata.fps:g}",
        "Sampling rate": metadata.sampling_rate,
        "Model": metadata.model,
        "Model hash": metadata.revision,
        "Type": metadata.dtype,
        "Speed": metadata.speed if metadata.speed != "exact" else None,
        "Weights": metadata.weights,
        "Inputs": "; ".join(str(item["path"]) for item in metadata.inputs) or None,
        "Adapters": "; ".join(f"{item['source']}:{item['weight']:g}" for item in metadata.adapters) or None,
        "Device": f"{metadata.device} (virtual)" if metadata.virtual else metadata.device,
        "Version": f"anyaccel {metadata.versions.get('anyaccel', '')}".rstrip(),
    }
    lines = [metadata.prompt]
    lines += [f"Negative prompt: {metadata.negative_prompt}"] if metadata.negative_prompt else []
    lines.append(", ".join(f"{name}: {value}" for name, value in values.items() if value is not None))
    return "\n".join(lines)


def find_differences(recorded: MediaMetadata, current: MediaMetadata) -> list[str]:
    """Return one line for each difference that can affect the image, such as a package version."""
    differences = []
    for package in sorted({*recorded.versions, *current.versions}):
        before, after = recorded.versions.get(package, "none"), current.versions.get(package, "none")
        if before != after:
            differences.append(f"{package} was {before} and is now {after}")
    for name in ("model", "revision", "pipeline", "scheduler", "dtype", "speed"):
        before, after = getattr(recorded, name), getattr(current, name)
        if before != after:
            differences.append(f"the {name} was {before or 'unknown'} and is now {after or 'unknown'}")
    if recorded.weights != current.weights:
        before, after = recorded.weights or "not quantized", current.weights or "not quantized"
        differences.append(f"the weights were {before} and are now {after}")
    if recorded.scheduler == current.scheduler and recorded.scheduler_config != current.scheduler_config:
        differences.append(f"the config of {current.scheduler} has changed")
    if recorded.device_kind != current.device_kind:
        differences.append(f"the device was {recorded.device_kind} and is now {current.device_kind}")
    return differences
