"""Files of generated images, videos and audio, with the generation metadata in them or next to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyaccel.generation.image_format import encode_image, read_metadata
from anyaccel.generation.metadata import MediaMetadata, describe_metadata, write_document
from anyaccel.generation.pipeline_interface import PipelineInterface
from anyaccel.media.encode import encode, estimate_bytes
from anyaccel.media.formats import SUFFIXES, check_format, check_frame_rate
from anyaccel.media.output import check_free_space
from anyaccel.media.types import Media, kind_of
from anyaccel.runtime.durations import choose_frame_rate, find_frame_parameter

__all__ = ["EncodedFile", "check_output", "encode_media", "read_metadata"]

# Sizes if neither the call nor the pipeline has them: those of a large model.
_SIDE, _FRAMES, _SECONDS = 1024, 129, 60.0


@dataclass(frozen=True, kw_only=True)
class EncodedFile:
    """The bytes of a file, and those of the file with its metadata if the format cannot contain it."""

    content: bytes
    sidecar: bytes | None = None


def encode_media(
    media: Media,
    suffix: str,
    metadata: Sequence[MediaMetadata],
    quality: int = 95,
    on_frame: Callable[[int, int], None] | None = None,
) -> EncodedFile:
    """Return the file of an image, a video or audio with its metadata. The output is deterministic.

    `on_frame` is called with the number of encoded frames and the number of all frames.
    """
    if kind_of(media) == "image":
        return EncodedFile(content=encode_image(media, suffix, metadata, quality))  # type: ignore[arg-type]
    document = write_document(metadata)
    comment = "\n\n".join(describe_metadata(item) for item in metadata)
    content = encode(media, suffix, document=document, comment=comment, quality=quality, on_frame=on_frame)
    embeds = SUFFIXES[suffix.lower()].embeds_metadata
    return EncodedFile(content=content, sidecar=None if embeds else document.encode())


def check_output(
    interface: PipelineInterface, suffix: str, call: Mapping[str, Any], folder: Path | None, count: int
) -> None:
    """Raise before anything is computed if a file format cannot contain the results, or if the disk is full.

    `folder` is where `count` files are written; None is stdout.
    """
    kind = interface.kind
    if kind is None:
        return
    check_format(suffix, kind, with_audio=interface.with_audio)
    fps, _ = choose_frame_rate(interface.name, interface.parameters, call)
    if kind == "video":
        check_frame_rate(suffix, fps)
    if folder is None:
        return
    sides = {name: call.get(name) or interface.find_default(name) or _SIDE for name in ("width", "height")}
    frames, seconds = 0, 0.0
    if kind == "video":
        parameter = find_frame_parameter(interface.parameters)
        passed = call.get("frames") or (call.get(parameter) if parameter else None)
        default = interface.find_default(parameter) if parameter else None
        wanted = call.get("seconds")
        frames = int(wanted * fps) + 8 if wanted else int(passed or default or _FRAMES)
        seconds = frames / fps
    elif kind == "audio":
        seconds = float(call.get("seconds") or _SECONDS)
    else:
        frames = 1
    size = estimate_bytes(
        kind, suffix, width=int(sides["width"]), height=int(sides["height"]), frames=frames, seconds=seconds
    )
    check_free_space(folder, size * count)
