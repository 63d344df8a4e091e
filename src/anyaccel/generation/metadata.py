"""Where a picture comes from: all that is needed to make it again, as the text that its file carries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from anyaccel.backends.device_spec import DeviceSpec, read_device_name
from anyaccel.call_limits import LARGEST_SEED
from anyaccel.errors import UsageError

__all__ = [
    "FORMAT",
    "ImageMetadata",
    "describe_metadata",
    "find_differences",
    "read_document",
    "record_call",
    "write_document",
]

FORMAT = 1
"""Raised when an older anyaccel could not read, or would misread, what a newer one writes."""

_TUPLE = "tuple of"
_OWN_FIELDS = ("num_inference_steps", "guidance_scale", "negative_prompt")
"""Arguments of a call that have a field of their own."""


@dataclass(frozen=True, kw_only=True)
class ImageMetadata:
    """One picture's whole recipe, and what it was made with."""

    model: str
    """`embedded`, a hub id, or a folder, in which `~` stands for the user's own."""
    revision: str | None
    """The hub's commit; for a folder and for the embedded model a digest of its files."""
    pipeline: str
    """The class: `StableDiffusionPipeline`."""
    prompt: str
    seed: int
    width: int
    height: int
    """The picture's own; a size that was asked for is in `call` too."""
    dtype: str
    device: str
    """`neuron:0`."""
    virtual: bool
    """Whether the device was a virtual one, so that nothing here is about hardware."""
    speed: str = "exact"
    """How much of the picture's exactness was given up for speed."""
    negative_prompt: str | None = None
    steps: int | None = None
    guidance: float | None = None
    scheduler: str | None = None
    """The class: `DDIMScheduler`."""
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    """The further arguments that the pipeline was called with, exactly."""
    unrecorded: tuple[str, ...] = ()
    """Arguments that no text can hold, such as a picture to begin with."""

    @property
    def is_from_hub(self) -> bool:
        """Whether the model is named by a hub id."""
        return self.model != "embedded" and not self.model.startswith("~") and not Path(self.model).is_absolute()

    @property
    def device_kind(self) -> str:
        """The device as `--device` takes it, wherever it stands: `cuda`, `virtual:neuron`."""
        return str(DeviceSpec(name=read_device_name(self.device), virtual=self.virtual))

    def arguments(self) -> dict[str, Any]:
        """What `anyaccel.generate` takes to make the picture again: `generate(**origin.arguments())`."""
        if self.unrecorded:
            raise UsageError(
                f"the picture was made with {', '.join(self.unrecorded)}, which its record cannot hold",
                hint="call anyaccel.generate with the same from Python",
            )
        own = {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "negative_prompt": self.negative_prompt,
        }
        return {
            "prompt": self.prompt,
            "model": self.model,
            "revision": self.revision if self.is_from_hub else None,
            "device": self.device_kind,
            "seed": self.seed,
            "dtype": self.dtype,
            **({"speed": self.speed} if self.speed != "exact" else {}),
            **{name: value for name, value in own.items() if value is not None},
            **{name: _unpack(value) for name, value in self.call.items()},
        }


def record_call(call: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of a call that a record can hold beside its own fields, and the names of those that it cannot."""
    held: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in call.items():
        if name in _OWN_FIELDS and isinstance(value, int | float | str):
            continue
        packed = _pack(value)
        try:
            json.dumps(packed, allow_nan=False)
        except (TypeError, ValueError):
            left_out.append(name)
        else:
            held[name] = packed
    return held, tuple(left_out)


def _pack(value: Any) -> Any:
    """JSON has no tuples, and some pipelines add them to others."""
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in value]}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {_TUPLE} and isinstance(value[_TUPLE], list):
        return tuple(_unpack(item) for item in value[_TUPLE])
    return [_unpack(item) for item in value] if isinstance(value, list) else value


def write_document(origins: Sequence[ImageMetadata]) -> str:
    """The record of one picture, or of a sheet of several, as JSON in ASCII; what all share stands there once."""
    documents = [asdict(origin) for origin in origins]
    if len(documents) == 1:
        return json.dumps({"format": FORMAT, **documents[0]})
    shared = {name: value for name, value in documents[0].items() if all(one[name] == value for one in documents)}
    pictures = [{name: value for name, value in one.items() if name not in shared} for one in documents]
    return json.dumps({"format": FORMAT, **shared, "pictures": pictures})


def read_document(text: str) -> tuple[ImageMetadata, ...]:
    """The origins in a record; raises ValueError with what is wrong with it."""
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("format"), int):
        raise ValueError("it is not a record of anyaccel's")
    if document["format"] > FORMAT:
        raise ValueError(f"it is of format {document['format']}, and this anyaccel reads up to {FORMAT}")
    pictures = document.pop("pictures", [{}])
    if not isinstance(pictures, list) or not pictures or not all(isinstance(one, dict) for one in pictures):
        raise ValueError("its list of pictures is none")
    return tuple(_read_origin({**document, **one}) for one in pictures)


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "bool": (bool,),
    "Mapping[str, Any]": (dict,),
    "Mapping[str, str]": (dict,),
    "tuple[str, ...]": (list,),
}


def _read_origin(document: Mapping[str, Any]) -> ImageMetadata:
    """One origin, each field of the kind that it is declared as; what a later version adds is passed over."""
    values: dict[str, Any] = {}
    for one in fields(ImageMetadata):
        if one.name not in document:
            raise ValueError(f"it has no {one.name}")
        value = document[one.name]
        # A bool is an int to Python, and is none here.
        if not isinstance(value, _KINDS[str(one.type)]) or (isinstance(value, bool) and one.type != "bool"):
            raise ValueError(f"its {one.name} is {value!r:.60}")
        values[one.name] = tuple(value) if isinstance(value, list) else value
    origin = ImageMetadata(**values)
    if not 0 <= origin.seed <= LARGEST_SEED:
        raise ValueError(f"its seed is {origin.seed}")
    return origin


def describe_metadata(origin: ImageMetadata) -> str:
    """The recipe in words, in the form that other programs for pictures write and read under `parameters`."""
    facts = {
        "Steps": origin.steps,
        "Sampler": origin.scheduler,
        "CFG scale": origin.guidance,
        "Seed": origin.seed,
        "Size": f"{origin.width}x{origin.height}",
        "Model": origin.model,
        "Model hash": origin.revision,
        "Type": origin.dtype,
        "Speed": origin.speed if origin.speed != "exact" else None,
        "Device": f"{origin.device} (virtual)" if origin.virtual else origin.device,
        "Version": f"anyaccel {origin.versions.get('anyaccel', '')}".rstrip(),
    }
    lines = [origin.prompt]
    lines += [f"Negative prompt: {origin.negative_prompt}"] if origin.negative_prompt else []
    lines.append(", ".join(f"{name}: {value}" for name, value in facts.items() if value is not None))
    return "\n".join(lines)


def find_differences(then: ImageMetadata, now: ImageMetadata) -> list[str]:
    """What is not as it was when a picture was made, in words: after any of these, another may come."""
    found = []
    for package in sorted({*then.versions, *now.versions}):
        before, after = then.versions.get(package, "none"), now.versions.get(package, "none")
        if before != after:
            found.append(f"{package} was {before}, and is {after}")
    for name in ("model", "revision", "pipeline", "scheduler", "dtype", "speed"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            found.append(f"the {name} was {before or 'not known'}, and is {after or 'not known'}")
    if then.scheduler == now.scheduler and then.scheduler_config != now.scheduler_config:
        found.append(f"the settings of {now.scheduler} were others")
    if then.device_kind != now.device_kind:
        found.append(f"the device was {then.device_kind}, and is {now.device_kind}")
    return found
