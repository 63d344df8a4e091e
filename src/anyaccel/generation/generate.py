"""`anyaccel.generate`: generates images from prompts with a single function call."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.generation.image import GeneratedImage, generate_image
from anyaccel.generation.image_format import encode_image
from anyaccel.generation.metadata import ImageMetadata
from anyaccel.generation.model_loading import LOCK, load_model
from anyaccel.generation.output_files import file_exists_error, read_destination
from anyaccel.generation.request import make_request
from anyaccel.media.stills import make_contact_sheet
from anyaccel.planning.plan import Plan

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["Result", "Timings", "generate"]


@dataclass(frozen=True)
class Timings:
    """Durations of model loading and image generation, in seconds."""

    load_s: float
    """Loading and placing the model; 0 if the model was cached."""
    generate_s: tuple[float, ...]
    """Generating each image."""


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """Result of `anyaccel.generate`: images, seeds, plan, timings and metadata; notebooks show the images."""

    images: list[Image.Image]
    seeds: tuple[int, ...]
    """Seed of each image, which reproduces it on its own."""
    plan: Plan
    timings: Timings
    metadata: tuple[ImageMetadata, ...] = ()
    """Metadata of each image, as stored in its file."""

    def save(self, path: str | os.PathLike[str] = "./", *, force: bool = False) -> list[Path]:
        """Save each image with its metadata and return the paths.

        `path` is a file, or a folder if it ends with `/` or is an existing folder. If there are several
        images, a number is added to the file name. The suffix selects the format: `.png`, `.jpg` or
        `.webp`. Existing files are overwritten only with `force`.
        """
        # Raises before the first file is written if one of the names is taken.
        destination = read_destination(path, images=len(self.images), sheet=False, force=force)
        written = []
        for index, (image, metadata) in enumerate(zip(self.images, self.metadata, strict=True)):
            file = destination.path_of(index, metadata.prompt, metadata.seed)
            try:
                written.append(destination.write(file, encode_image(image, destination.suffix, [metadata])))
            except FileExistsError as error:  # another process created it after the check
                raise file_exists_error(file) from error
        return written

    def contact_sheet(self) -> Image.Image:
        """Return a contact sheet of all images; a single image is returned unchanged."""
        return self.images[0] if len(self.images) == 1 else make_contact_sheet(self.images)

    def __iter__(self) -> Iterator[Image.Image]:
        return iter(self.images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Image.Image:
        return self.images[index]

    def __repr__(self) -> str:
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        device = f"{self.plan.device}{' (virtual)' if self.plan.virtual else ''} in {self.plan.dtype.value}"
        return f"Result({len(self.images)} image{'s' * (len(self.images) > 1)}, {seeds}, on {device})"

    # Jupyter calls the following two methods to display the result.

    def _repr_png_(self) -> bytes:
        return encode_image(self.contact_sheet(), ".png", self.metadata)

    def _repr_html_(self) -> str:
        data = base64.b64encode(self._repr_png_()).decode()
        prompts = dict.fromkeys(metadata.prompt for metadata in self.metadata)
        # Escaped, because a prompt may contain HTML.
        caption = html.escape(f"{'; '.join(prompts)}: {self!r}")
        return f'<img src="data:image/png;base64,{data}" alt="{caption}"><div><small>{caption}</small></div>'


def generate(
    prompt: str | Sequence[str],
    model: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "auto",
    seed: int | Sequence[int] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    speed: str = "exact",
    weights: str | None = None,
    revision: str | None = None,
    **call: Any,
) -> Result:
    """Generate images from prompts: `anyaccel.generate("a red apple", seed=7)`.

    A list of prompts generates one image per prompt. `model` is a Hub ID (with an optional `revision`), a
    folder, or None for the embedded model. The last model stays loaded for the next call. `device` is anything
    that `pipe.to` accepts; `speed` is `exact`, `fast` or `draft`. `weights` is a format to which large models are
    quantized, such as `int8`. Other keyword arguments are passed to the
    pipeline call under their diffusers names: `num_inference_steps`, `guidance_scale`, `negative_prompt`,
    `height`, `width`, `num_images_per_prompt`.

    An integer `seed` is the seed for the first image of every prompt; further images of a prompt use
    consecutive seeds. A list contains one seed per image. Without `seed`, a random one is drawn and returned in
    `Result.seeds`. Images are generated one by one, so each is bitwise identical to the same image generated
    alone.
    """
    request = make_request(
        prompt, model, device, seed, dtype=dtype, speed=speed, weights=weights, revision=revision, **call
    )
    # One call at a time: a second thread could otherwise replace the cached model during this call.
    with LOCK:
        loaded = load_model(request)
        generated = [generate_image(loaded, text, image_seed, request.call) for text, image_seed in request.images]
    return _make_result(generated, loaded.load_s)


def _make_result(generated: list[GeneratedImage], load_s: float) -> Result:
    return Result(
        images=[item.image for item in generated],
        seeds=tuple(item.metadata.seed for item in generated),
        plan=generated[-1].plan,
        timings=Timings(load_s, tuple(item.seconds for item in generated)),
        metadata=tuple(item.metadata for item in generated),
    )
