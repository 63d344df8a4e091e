"""`anyaccel.generate`: pictures from prompts, in one call."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.generation.contact_sheet import make_contact_sheet
from anyaccel.generation.image import GeneratedImage, generate_image
from anyaccel.generation.image_format import encode_image
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.generation.model_cache import LOCK, load_model
from anyaccel.generation.output_files import read_destination, taken
from anyaccel.generation.request import make_request
from anyaccel.planning.plan import Plan

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["Result", "Timings", "generate"]


@dataclass(frozen=True)
class Timings:
    """How long it took, in seconds."""

    load_s: float
    """Loading and placing the model; 0 where the last call left it there."""
    generate_s: tuple[float, ...]
    """Each picture."""


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """What `anyaccel.generate` gives; in a notebook it shows itself."""

    images: list[Image.Image]
    seeds: tuple[int, ...]
    """One an image: the seed that makes just this image again."""
    plan: Plan
    timings: Timings
    origins: tuple[ImageMetadata, ...] = ()
    """The whole recipe of each image, as its file will carry it."""

    def save(self, path: str | os.PathLike[str] = "./", *, force: bool = False) -> list[Path]:
        """Write each image with its recipe: to a file, whose name several images have numbered, or into a folder/.

        The ending says the format: png, jpg, webp. A file that is there already is written over only with `force`.
        """
        destination = read_destination(path, pictures=len(self.images), sheet=False, force=force)
        written = []
        for place, (image, origin) in enumerate(zip(self.images, self.origins, strict=True)):
            name = destination.path_of(place, origin.prompt, origin.seed)
            try:
                written.append(destination.write(name, encode_image(image, destination.suffix, [origin])))
            except FileExistsError as error:
                raise taken(name) from error
        return written

    def sheet(self) -> Image.Image:
        """All images on one; the image itself where there is one alone."""
        return self.images[0] if len(self.images) == 1 else make_contact_sheet(self.images)

    def __iter__(self) -> Iterator[Image.Image]:
        return iter(self.images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Image.Image:
        return self.images[place]

    def __repr__(self) -> str:
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        where = f"{self.plan.device}{' (virtual)' if self.plan.virtual else ''} in {self.plan.dtype.value}"
        return f"Result({len(self.images)} image{'s' * (len(self.images) > 1)}, {seeds}, on {where})"

    def _repr_png_(self) -> bytes:
        return encode_image(self.sheet(), ".png", self.origins)

    def _repr_html_(self) -> str:
        data = base64.b64encode(self._repr_png_()).decode()
        prompts = dict.fromkeys(origin.prompt for origin in self.origins)
        words = html.escape(f"{'; '.join(prompts)}: {self!r}")
        return f'<img src="data:image/png;base64,{data}" alt="{words}"><div><small>{words}</small></div>'


def generate(
    prompt: str | Sequence[str],
    model: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "auto",
    seed: int | Sequence[int] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    speed: str = "exact",
    revision: str | None = None,
    **call: Any,
) -> Result:
    """Make pictures: `anyaccel.generate("a red apple", seed=7)`; of several prompts, one of each.

    The model is the embedded one, a hub id (at a `revision`) or a folder; the last one is kept for the next call. The
    device is whatever `pipe.to` takes, `speed` is `exact`, `fast` or `draft`. Any other keyword goes to the pipeline's
    call, by diffusers' names: `num_inference_steps`, `guidance_scale`, `negative_prompt`, `height`, `width`,
    `num_images_per_prompt`.

    A number as the seed is the first image's, and the next image of the same prompt has the number after it; every
    prompt begins with it anew. A list gives each image its own. Without one it is drawn, and `Result.seeds` tells it.
    Images are made one by one, so that each is the same, to the last bit, as if it had been made alone.
    """
    order = make_request(prompt, model, device, seed, dtype=dtype, speed=speed, revision=revision, **call)
    with LOCK:
        loaded = load_model(order)
        pictures = [generate_image(loaded, text, number, order.call) for text, number in order.pictures]
    return _collect(pictures, loaded.load_s)


def _collect(pictures: list[GeneratedImage], load_s: float) -> Result:
    return Result(
        images=[picture.image for picture in pictures],
        seeds=tuple(picture.origin.seed for picture in pictures),
        plan=pictures[-1].plan,
        timings=Timings(load_s, tuple(picture.seconds for picture in pictures)),
        origins=tuple(picture.origin for picture in pictures),
    )
