"""Image files: PNG, JPEG and WebP images, and WebP and GIF animations, with embedded metadata."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from anyaccel.errors import UsageError
from anyaccel.media.types import EmbeddedMetadata, OnFrame, Video

__all__ = ["DOCUMENT_KEY", "IMAGE_FORMATS", "encode_animation", "encode_image", "read_image_document"]

# Pillow's name of each format.
IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".gif": "GIF"}
DOCUMENT_KEY = "anyaccel"
"""Key of the metadata document in PNG, MP4 and WebM files."""

# Keyword of a PNG text chunk that other tools, such as stable-diffusion-webui, read.
_PARAMETERS_KEY = "parameters"
# Tag numbers of EXIF.
_EXIF_IFD, _USER_COMMENT, _XP_COMMENT, _SOFTWARE = 0x8769, 0x9286, 0x9C9C, 0x0131
# Character code that the EXIF standard requires at the start of a UserComment.
_ASCII = b"ASCII\0\0\0"
# Effort of the WebP encoder, from 0 to 6.
_WEBP_METHOD = 4


def encode_image(image: Image.Image, suffix: str, metadata: EmbeddedMetadata, quality: int) -> bytes:
    """Return the bytes of an image file. `quality`, from 0 to 100, applies to JPEG and WebP; PNG is lossless."""
    file_format = IMAGE_FORMATS[suffix.lower()]
    if file_format == "PNG":
        options = _png_options(metadata)
    else:
        options = {"exif": _make_exif(metadata), "quality": quality}
        options |= {"subsampling": 0} if file_format == "JPEG" else {}
        if image.mode not in ("L", "RGB"):
            image = image.convert("RGB")
    stream = io.BytesIO()
    try:
        image.save(stream, file_format, **options)
    except ValueError as error:
        if "too long" not in str(error):  # Pillow's message for an EXIF block of more than 64 KiB
            raise
        raise UsageError(
            f"the metadata is too large for a {file_format} file, which can contain at most 64 KiB of metadata",
            hint="use an output file name that ends with .png",
        ) from error
    return stream.getvalue()


def encode_animation(
    video: Video, suffix: str, metadata: EmbeddedMetadata, quality: int, on_frame: OnFrame | None
) -> bytes:
    """Return the bytes of an animated WebP or GIF file, which repeats without end."""
    file_format = IMAGE_FORMATS[suffix.lower()]
    options: dict[str, Any] = {"save_all": True, "loop": 0}
    if file_format == "WEBP":
        options["exif"] = _make_exif(metadata)
        options |= {"quality": quality, "method": _WEBP_METHOD, "duration": _frame_durations_ms(video, 1)}
    else:
        options["duration"] = _frame_durations_ms(video, 10)
        # A GIF file has one comment.
        options["comment"] = (metadata.document or metadata.comment or metadata.software).encode()
    stream = io.BytesIO()
    total = len(video)
    convert = _reduce_colors if file_format == "GIF" else _keep
    _FrameSequence(video.frames, convert, on_frame).save(stream, file_format, **options)
    if on_frame is not None:
        on_frame(total, total)
    return stream.getvalue()


class _FrameSequence(Image.Image):
    """Frames as an image with several frames, which Pillow's encoders read one by one with `seek`."""

    def __init__(
        self,
        frames: Sequence[Image.Image],
        convert: Callable[[Image.Image], Image.Image],
        on_frame: OnFrame | None,
    ) -> None:
        super().__init__()
        self.n_frames = len(frames)
        self._frames, self._convert = frames, convert
        self._on_frame = on_frame
        self._encoded = 0
        self._index = 0
        self.seek(0)

    def seek(self, frame: int) -> None:
        if frame >= self.n_frames:
            raise EOFError(f"no frame {frame}")
        if frame > self._encoded and self._on_frame is not None:
            self._on_frame(frame, self.n_frames)
        self._encoded = max(self._encoded, frame)
        self._index = frame
        source = self._convert(self._frames[frame])
        source.load()
        self._mode, self._size, self.im, self.palette = source.mode, source.size, source.im, source.palette

    def tell(self) -> int:
        return self._index


def _keep(frame: Image.Image) -> Image.Image:
    return frame


def _reduce_colors(frame: Image.Image) -> Image.Image:
    """Return an image with a palette of 256 colors."""
    # Pillow's default takes 40 times longer, and shows steps in smooth areas, because it does not dither.
    palette = frame.quantize(256, method=Image.Quantize.FASTOCTREE)
    return frame.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG)


def _frame_durations_ms(video: Video, unit_ms: int) -> list[int]:
    """Return the duration of each frame in a multiple of `unit_ms`; their sum is that of the video, rounded."""
    ends = [round((index + 1) * 1000 / video.fps / unit_ms) * unit_ms for index in range(len(video))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _png_options(metadata: EmbeddedMetadata) -> dict[str, Any]:
    text = PngInfo()
    text.add_text("Software", metadata.software)
    # iTXt chunks are UTF-8; plain tEXt chunks allow only Latin-1.
    if metadata.comment is not None:
        text.add_itxt(_PARAMETERS_KEY, metadata.comment)
    if metadata.document is not None:
        text.add_itxt(DOCUMENT_KEY, metadata.document)
    return {"pnginfo": text}


def _make_exif(metadata: EmbeddedMetadata) -> Image.Exif:
    exif = Image.Exif()
    exif[_SOFTWARE] = metadata.software
    # XPComment is UTF-16; the other text tags of EXIF are limited to ASCII.
    if metadata.comment is not None:
        exif[_XP_COMMENT] = metadata.comment.encode("utf-16-le")
    if metadata.document is not None:
        exif[_EXIF_IFD] = {_USER_COMMENT: _ASCII + metadata.document.encode("ascii")}
    return exif


def read_image_document(image: Image.Image) -> str | None:
    """Return the metadata document of an opened image file; None if it has none."""
    if image.format == "PNG":
        record = image.info.get(DOCUMENT_KEY)
    elif image.format == "GIF":
        record = image.info.get("comment", b"")
        return record.decode("utf-8", "replace") if record.lstrip().startswith(b"{") else None
    else:
        record = image.getexif().get_ifd(_EXIF_IFD).get(_USER_COMMENT)
    if isinstance(record, bytes):
        return record.removeprefix(_ASCII).rstrip(b"\0").decode("ascii", "replace") if _ASCII in record[:8] else None
    return str(record) if record is not None else None
