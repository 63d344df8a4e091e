"""Input images of a job, converted to what the pipelines expect."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageOps

from anyaccel.generation.inputs import InputMedia
from anyaccel.media.types import Kind

__all__ = ["fit_inputs", "read_inputs"]


def read_inputs(files: Mapping[str, str | bytes]) -> dict[str, list[Image.Image]]:
    """Return the images of each input of a job; the files are called `image`, `image.1`, `image.2`."""
    images: dict[str, list[Image.Image]] = {}
    for name in sorted(files, key=_sort_key):
        source, base = files[name], name.partition(".")[0]
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            converted = _convert_mask(image) if base == "mask_image" else _convert_image(image)
        images.setdefault(base, []).append(converted)
    return images


def fit_inputs(
    inputs: Mapping[str, list[Image.Image]], kind: Kind, size: tuple[int, int], *, many_images: bool
) -> dict[str, Any]:
    """Return the inputs as arguments of a call, resized to the size of the result.

    Images for an IP-Adapter, and reference images of an edit, keep their sizes.
    """
    arguments: dict[str, Any] = {}
    for name, images in inputs.items():
        keep_all = name == "ip_adapter_image" or (name == "image" and many_images and len(images) > 1)
        fitted = [
            image if keep_all or (name == "image" and kind == "image" and index > 0) else _fit(image, kind, size)
            for index, image in enumerate(images)
        ]
        media = [InputMedia(kind="image", media=image) for image in fitted]
        arguments[name] = media if len(media) > 1 else media[0]
    return arguments


def _fit(image: Image.Image, kind: Kind, size: tuple[int, int]) -> Image.Image:
    if image.size == size:
        return image
    # A photo rarely has the aspect ratio of the video that starts from it: crop it instead of distorting it.
    if kind == "video":
        return ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    return image.resize(size, Image.Resampling.LANCZOS)


def _sort_key(name: str) -> tuple[str, int]:
    base, _, number = name.partition(".")
    return base, int(number) if number.isdigit() else 0


def _convert_image(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, apply its EXIF orientation and flatten transparency onto white."""
    upright = ImageOps.exif_transpose(image)
    # Pillow's `convert` clips 16-bit values at 255 instead of scaling: https://github.com/python-pillow/Pillow/issues/3159
    if upright.mode.startswith("I"):
        upright = upright.point(lambda value: value / 257).convert("L")
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    white = Image.new("RGBA", upright.size, "white")
    white.alpha_composite(upright.convert("RGBA"))
    return white.convert("RGB")


def _convert_mask(image: Image.Image) -> Image.Image:
    """Convert a mask to the diffusers convention: grayscale, with white where the image changes.

    OpenAI's API uses the alpha channel instead: the image changes where the mask is transparent.
    """
    if not image.has_transparency_data:
        return image.convert("L")
    return ImageOps.invert(image.convert("RGBA").getchannel("A"))
