"""Checks on a file of weights: its content must be what its suffix says, complete and free of executable code."""

from __future__ import annotations

from pathlib import Path

from anyaccel.errors import MissingLibraryError, ModelError, ModelFileError
from anyaccel.runtime.weight_files.gguf_header import read_gguf_header
from anyaccel.runtime.weight_files.safetensors_header import check_safetensors
from anyaccel.upstream.gguf_internals import is_language_model, name_kind, read_block_sizes, read_kinds

__all__ = ["PICKLES", "WEIGHTS", "check_weight_file", "make_pickle_error"]

PICKLES = (".bin", ".ckpt", ".pt", ".pth")
WEIGHTS = (".safetensors", *PICKLES, ".gguf")
# Dtypes in GGUF files that need no dequantization.
_PLAIN_KINDS = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
_LFS_POINTER = b"version https://git-lfs"
_PICKLE = "a pickle"
_START_BYTES = 256


def check_weight_file(path: Path, *, pickles: bool) -> None:
    """Raise `ModelError` if a file of weights cannot be loaded or could run code; read only its header.

    `pickles` allows pickled weights.
    """
    if path.suffix not in WEIGHTS:
        raise ModelError(
            f"{path} is not a file of weights: its suffix is not one of {', '.join(WEIGHTS)}",
            hint="pass the folder of the pipeline, which contains model_index.json",
        )
    start = _read_start(path)
    _check_text(path, start)
    expected = _PICKLE if path.suffix in PICKLES else f"a {path.suffix[1:]} file"
    actual = _find_content(start)
    if actual and actual != expected:
        hint = "convert it to safetensors, or download another file" if actual == _PICKLE else "rename the file"
        raise ModelFileError(f"{path} is {actual}, although its suffix is {path.suffix}", hint=hint)
    if path.suffix in PICKLES and not pickles:
        raise make_pickle_error(path)
    if path.suffix == ".safetensors":
        check_safetensors(path)
    elif path.suffix == ".gguf":
        _check_gguf(path)


def _read_start(path: Path) -> bytes:
    """Return the first bytes of a file; raise `ModelFileError` if it cannot be read."""
    try:
        if not path.is_file():
            problem = "not a file" if path.exists() else "missing"
            problem = "a link to a file that does not exist" if path.is_symlink() and not path.exists() else problem
            raise ModelFileError(f"{path} is {problem}", hint="copy or download the file again")
        with path.open("rb") as file:
            return file.read(_START_BYTES)
    except ModelFileError:
        raise
    except OSError as error:
        raise ModelFileError(
            f"cannot read {path}: {error.strerror}", hint="check the path and the permissions of the file"
        ) from error


def make_pickle_error(path: Path) -> ModelError:
    """Return the error for pickled weights."""
    return ModelError(
        f"the weights in {path} are pickled, and loading a pickle can run arbitrary code",
        hint="convert them to safetensors, or pass use_safetensors=False if you trust the source",
    )


def _check_text(path: Path, start: bytes) -> None:
    """Raise `ModelFileError` for an empty file and for text files that failed downloads leave."""
    if not start:
        raise ModelFileError(f"{path} is empty", hint="copy or download the file again")
    if start.startswith(_LFS_POINTER):
        raise ModelFileError(
            f"{path} is a Git LFS pointer, not the weights themselves",
            hint="install git-lfs and run git lfs pull in the repository, or download the file with hf download",
        )
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b'{"error', b"invalid ", b"access to model")):
        kind = "an HTML page" if text.startswith(b"<") else "an error message"
        raise ModelFileError(
            f"{path} is {kind}, not weights: {start.decode(errors='replace').strip()[:60]!r}",
            hint="download the file again; a link to the file itself may require a login or an access token",
        )


def _find_content(start: bytes) -> str:
    """Return what a file contains: `a safetensors file`, `a gguf file`, `a pickle`; or an empty string."""
    if start.startswith(b"GGUF"):
        return "a gguf file"
    # Files of `torch.save` are ZIP archives with a pickle; older ones start with the protocol of the pickle.
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return _PICKLE
    # The header of a safetensors file has eight bytes for its length, and starts with a brace.
    return "a safetensors file" if start[8:9] == b"{" and start[6:8] == b"\x00\x00" else ""


def _check_gguf(path: Path) -> None:
    """Raise `ModelError` for a GGUF file that diffusers cannot dequantize, or that has no diffusion model."""
    try:
        sizes, supported = read_block_sizes(), read_kinds()
    except ImportError as error:
        raise MissingLibraryError(
            f"cannot load {path}: it requires the package gguf", hint="pip install gguf"
        ) from error
    try:
        header = read_gguf_header(path)
    except (RecursionError, ValueError) as error:
        hint = "copy or download the file again"
        raise ModelFileError(f"{path} is not a valid GGUF file: {error}", hint=hint) from error
    if is_language_model(header.architecture):
        raise ModelError(
            f"{path} has the weights of a {header.architecture} model for llama.cpp, not of a diffusion model",
            hint="load text encoders from the folder of the pipeline, in safetensors",
        )
    plain = {kind for kind in sizes if name_kind(kind) in _PLAIN_KINDS}
    unknown = sorted({name_kind(kind) for _, kind, _, _ in header.tensors if kind not in supported | plain})
    if unknown:
        raise ModelError(
            f"{path} has weights of the GGUF type {', '.join(unknown)}, which diffusers cannot dequantize",
            hint=f"use a file with one of the types {', '.join(sorted(map(name_kind, supported)))}",
        )
    ends = [offset + count // sizes[kind][0] * sizes[kind][1] for _, kind, count, offset in header.tensors]
    size, needed = path.stat().st_size, header.start + max(ends, default=0)
    if size < needed:
        raise ModelFileError(
            f"{path} is truncated: it has {size:,} bytes, but its header requires {needed:,}",
            hint="copy or download the file again",
        )
