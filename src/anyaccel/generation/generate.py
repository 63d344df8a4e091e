"""`anyaccel.generate`: generates images, videos and audio with a single function call."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from anyaccel.generation.contact_sheets import make_sheet
from anyaccel.generation.image_format import encode_image
from anyaccel.generation.media import GeneratedMedia, generate_one
from anyaccel.generation.media_format import encode_media
from anyaccel.generation.metadata import MediaMetadata
from anyaccel.generation.model_loading import LOCK, load_model, open_requested_device
from anyaccel.generation.output_files import file_exists_error, read_destination
from anyaccel.generation.request import make_request
from anyaccel.generation.request_check import check_request
from anyaccel.media.formats import SUFFIXES, check_format, default_suffix
from anyaccel.media.types import Audio, Media, Video, kind_of
from anyaccel.planning.plan import Plan

if TYPE_CHECKING:
    import torch

__all__ = ["Result", "Timings", "generate"]


@dataclass(frozen=True)
class Timings:
    """Durations of model loading and generation, in seconds."""

    load_s: float
    """Loading and placing the model; 0 if the model was cached."""
    generate_s: tuple[float, ...]
    """Generating each image, video or audio."""


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """Result of `anyaccel.generate`: images, videos or audio, with seeds, plan, timings and metadata.

    Notebooks show it.
    """

    images: list[Image.Image]
    seeds: tuple[int, ...]
    """Seed of each image, video or audio, which reproduces it on its own."""
    plan: Plan
    timings: Timings
    metadata: tuple[MediaMetadata, ...] = ()
    """Metadata of each image, video or audio, as stored in its file."""
    videos: list[Video] = field(default_factory=list)
    """Videos: `frames` (PIL images), `fps` and, if there is an audio track, `audio`."""
    audios: list[Audio] = field(default_factory=list)
    """Audio: `samples` (an array of channels and samples) and `rate`."""

    @property
    def media(self) -> list[Media]:
        """All images, videos and audio."""
        return [*self.images, *self.videos, *self.audios]

    def save(self, path: str | os.PathLike[str] = "./", *, force: bool = False) -> list[Path]:
        """Save each image, video or audio with its metadata and return the paths.

        `path` is a file, or a folder if it ends with `/` or is an existing folder. If there are several
        files, a number is added to the file name. The suffix selects the format, such as `.png`, `.mp4` or
        `.wav`. Existing files are overwritten only with `force`.
        """
        # Raises before the first file is written if one of the names is taken.
        destination = read_destination(path, images=len(self), sheet=False, force=force)
        for media in self.media:
            kind = kind_of(media)
            check_format(
                destination.choose_suffix(kind), kind, with_audio=isinstance(media, Video) and bool(media.audio)
            )
        written = []
        for index, (media, metadata) in enumerate(zip(self.media, self.metadata, strict=True)):
            kind = kind_of(media)
            file = destination.path_of(index, metadata.prompt, metadata.seed, kind)
            encoded = encode_media(media, destination.choose_suffix(kind), [metadata])
            try:
                written.append(destination.write(file, encoded.content, encoded.sidecar))
            except FileExistsError as error:  # another process created it after the check
                raise file_exists_error(file) from error
        return written

    def contact_sheet(self) -> Image.Image:
        """Return a contact sheet of all images, or of frames of each video; a single image is returned unchanged."""
        return self.images[0] if len(self.images) == 1 and not self.videos else make_sheet(self.media)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.media)

    def __len__(self) -> int:
        return len(self.media)

    def __getitem__(self, index: int) -> Any:
        return self.media[index]

    def __repr__(self) -> str:
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        device = f"{self.plan.device}{' (virtual)' if self.plan.virtual else ''} in {self.plan.dtype.value}"
        counts = {"image": len(self.images), "video": len(self.videos), "audio file": len(self.audios)}
        listed = ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count)
        return f"Result({listed}, {seeds}, on {device})"

    # Jupyter calls the following two methods to display the result.

    def _repr_png_(self) -> bytes | None:
        return encode_image(self.contact_sheet(), ".png", self.metadata) if self.images else None

    def _repr_html_(self) -> str:
        prompts = dict.fromkeys(metadata.prompt for metadata in self.metadata)
        # Escaped, because a prompt may contain HTML.
        caption = html.escape(f"{'; '.join(prompts)}: {self!r}")
        return f"{''.join(self._list_tags(caption))}<div><small>{caption}</small></div>"

    def _list_tags(self, caption: str) -> Iterator[str]:
        """Yield the HTML elements that show the contact sheet, the videos and the audio."""
        png = self._repr_png_()
        if png is not None:
            yield f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{caption}">'
        shown: list[Media] = [*self.videos, *self.audios]
        for media in shown:
            suffix = default_suffix(kind_of(media))
            data = base64.b64encode(encode_media(media, suffix, self.metadata[:1]).content).decode()
            url = f"data:{SUFFIXES[suffix].media_type};base64,{data}"
            if isinstance(media, Audio):
                yield f'<audio controls src="{url}"></audio>'
            elif SUFFIXES[suffix].media_type.startswith("image/"):  # an animation
                yield f'<img src="{url}" alt="{caption}">'
            else:
                yield f'<video controls loop src="{url}"></video>'


def generate(
    prompt: str | Sequence[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    device: str | int | torch.device = "auto",
    seed: int | Sequence[int] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    speed: str = "exact",
    weights: str | None = None,
    revision: str | None = None,
    lora: Any = None,
    ip_adapter: Any = None,
    controlnet: Any = None,
    scheduler: str | None = None,
    **call: Any,
) -> Result:
    """Generate images, videos or audio: `anyaccel.generate("a red apple", seed=7)`.

    A list of prompts generates one image per prompt; None is for pipelines without a prompt. `model` is a Hub ID
    (with an optional `revision`), a folder, or None for the embedded model. The last model stays loaded for the next
    call. `device` is anything that `pipe.to` accepts; `speed` is `exact`, `fast` or `draft`. `weights` is a format to
    which large models are quantized, such as `int8`. Other keyword arguments are passed to the pipeline call under
    their diffusers names: `num_inference_steps`, `guidance_scale`, `negative_prompt`, `height`, `width`,
    `num_images_per_prompt`. `frames`, `fps` and `seconds` set the length and the frame rate of videos and audio for
    every pipeline.

    Inputs are paths, PIL images or arrays: `image`, `mask_image`, `control_image`, `video`, `audio`,
    `ip_adapter_image`; a list has several images. The pipeline class is chosen for the inputs, such as
    image-to-image. `lora` and `ip_adapter` are files or Hub IDs, as `"file.safetensors:0.8"` or
    `("file.safetensors", 0.8)`, or lists of them; `controlnet` is a folder or Hub ID. `scheduler` is a class name of
    diffusers or a short name such as `euler`.

    An integer `seed` is the seed for the first image of every prompt; further images of a prompt use
    consecutive seeds. A list contains one seed per image. Without `seed`, a random one is drawn and returned in
    `Result.seeds`. Images are generated one by one, so each is bitwise identical to the same image generated
    alone.
    """
    request = make_request(
        prompt,
        model,
        device,
        seed,
        dtype=dtype,
        speed=speed,
        weights=weights,
        revision=revision,
        lora=lora,
        ip_adapter=ip_adapter,
        controlnet=controlnet,
        scheduler=scheduler,
        **call,
    )
    # One call at a time: a second thread could otherwise replace the cached model during this call.
    with LOCK:
        request = open_requested_device(request)
        check_request(request)
        loaded = load_model(request)
        generated = [generate_one(loaded, text, image_seed, request.call) for text, image_seed in request.images]
    return _make_result(generated, loaded.load_s)


def _make_result(generated: list[GeneratedMedia], load_s: float) -> Result:
    media = [item.media for item in generated]
    return Result(
        images=[item for item in media if isinstance(item, Image.Image)],
        seeds=tuple(item.metadata.seed for item in generated),
        plan=generated[-1].plan,
        timings=Timings(load_s, tuple(item.seconds for item in generated)),
        metadata=tuple(item.metadata for item in generated),
        videos=[item for item in media if isinstance(item, Video)],
        audios=[item for item in media if isinstance(item, Audio)],
    )
