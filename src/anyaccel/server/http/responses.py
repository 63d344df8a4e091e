"""Functions that convert jobs, images and models to JSON, and encode server-sent events."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyaccel.media.formats import SUFFIXES
from anyaccel.server.jobs.store import Job
from anyaccel.server.worker.messages import ModelFacts

__all__ = [
    "FILE_HEADERS",
    "KEEP_ALIVE",
    "Signer",
    "describe_images",
    "describe_job",
    "describe_model",
    "describe_video",
    "find_media_type",
    "make_event",
    "write_event",
]

# The content of a file never changes, and browsers must not guess its type.
FILE_HEADERS = {"cache-control": "private, max-age=86400, immutable", "x-content-type-options": "nosniff"}

# A comment line of the server-sent events format, which clients ignore.
KEEP_ALIVE = b": keep-alive\n\n"
# Fields of a job's request in its JSON; jobs stored by an older version may lack some.
_REQUEST_FIELDS = (
    "task", "model", "prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale",
    "strength", "lora", "lora_scale", "output_format", "output_compression", "seeds", "partial_images", "kind",
    "num_frames", "fps", "seconds", "arguments", "remixed_from", "speed",
)  # fmt: skip
# OpenAI's `completed` event types declare this field as required. Diffusion pipelines have no token counts.
_NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


class Signer:
    """Signer for image URLs, each of which gives access to one image without an API key."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret

    def sign(self, job: str, name: int | str) -> str:
        """Return the token that gives access to one file of a job: the position of an image, or a file name."""
        # 128 bits cannot be guessed, and the URL stays short.
        return hmac.new(self.secret, f"{job}/{name}".encode(), hashlib.sha256).hexdigest()[:32]

    def is_signed(self, job: str, name: int | str, token: str) -> bool:
        """Return whether a token gives access to the given file of a job."""
        # Constant time: a response time that depends on the first wrong byte would reveal the token.
        return hmac.compare_digest(self.sign(job, name).encode(), token.encode())

    def path(self, job: str, index: int) -> str:
        """Return the URL of an image with its access token, without the scheme and host."""
        return f"/v1/jobs/{job}/images/{index}?token={self.sign(job, index)}"

    def file_path(self, job: str, file: str) -> str:
        """Return the URL of a result file with its access token, without the scheme and host."""
        return f"/v1/jobs/{job}/files/{file}?token={self.sign(job, file)}"


def describe_job(job: Job, signer: Signer, fraction: float = 0.0, waiting: int | None = None) -> dict[str, Any]:
    """Return a job as a JSON-serializable dict.

    `fraction` is the completed fraction of a running job, and `waiting` is the number of older jobs in
    the queue.
    """
    images = (job.result or {}).get("images", [])
    kind = job.request.get("kind", "image")
    results: dict[str, Any] = {"images": []}
    if kind == "image":
        results["images"] = [{**image, "url": signer.path(job.id, index)} for index, image in enumerate(images)]
    else:
        results[f"{kind}s"] = [_describe_files(job, index, item, signer) for index, item in enumerate(images)]
    return {
        "id": job.id,
        "object": "job",
        "state": "cancelling" if job.cancelling and job.state == "running" else job.state,
        "created_at": job.created,
        "started_at": job.started,
        "ended_at": job.ended,
        "attempts": job.attempts,
        "progress": 1.0 if job.state == "done" else round(fraction, 4),
        "waiting": waiting,
        "request": {name: job.request.get(name) for name in _REQUEST_FIELDS},
        "error": _describe_error(job),
        **results,
    }


def _describe_error(job: Job) -> dict[str, Any] | None:
    return None if job.error is None else {"code": job.error.get("code"), "message": job.error.get("message")}


def _describe_files(job: Job, index: int, properties: Mapping[str, Any], signer: Signer) -> dict[str, Any]:
    """Return a video or audio of a job with the URLs of its files."""
    names = [file for file in (job.result or {}).get("files", []) if file.startswith(f"{index}.")]
    urls = {"url": signer.file_path(job.id, names[0])} if names else {}
    for name in names[1:]:
        variant = name.split(".")[1]
        if variant in ("thumbnail", "spritesheet", "waveform"):
            urls[f"{variant}_url"] = signer.file_path(job.id, name)
    return {**properties, **urls}


# OpenAI's status of a video for each state of its job. It has none for canceled videos.
_VIDEO_STATUSES = {"queued": "queued", "running": "in_progress", "done": "completed"}


def describe_video(job: Job, fraction: float, keep_s: float) -> dict[str, Any]:
    """Return a video job in the JSON format of OpenAI's video endpoints; `keep_s` is how long results are stored."""
    request = job.request
    error = _describe_error(job)
    if job.state == "cancelled":
        error = {"code": "cancelled", "message": "the video was cancelled"}
    is_done = job.state == "done"
    return {
        "id": job.id,
        "object": "video",
        "created_at": int(job.created),
        "completed_at": int(job.ended) if is_done and job.ended is not None else None,
        "expires_at": int(job.ended + keep_s) if is_done and job.ended is not None else None,
        "status": _VIDEO_STATUSES.get(job.state, "failed"),
        "progress": 100 if is_done else min(99, int(100 * fraction)),
        "error": error,
        "model": request["model"],
        "prompt": request["prompt"],
        "seconds": f"{request['seconds']:g}",
        "size": f"{request['width']}x{request['height']}",
        "remixed_from_video_id": request.get("remixed_from"),
        "seed": request["seeds"][0],
        "num_frames": request["num_frames"],
        "fps": request["fps"],
    }


def find_media_type(file: Path) -> str:
    """Return the media type of a result file."""
    return SUFFIXES[file.suffix].media_type


def describe_images(job: Job, contents: list[bytes], signer: Signer, *, as_url: bool, base: str) -> dict[str, Any]:
    """Return a job's images in the JSON format of OpenAI's image endpoints.

    With `as_url`, the dict contains signed URLs that start with `base`; otherwise, it contains base64
    data.
    """
    images = (job.result or {})["images"]
    data = []
    for index, (image, content) in enumerate(zip(images, contents, strict=True)):
        payload = (
            {"url": base + signer.path(job.id, index)} if as_url else {"b64_json": base64.b64encode(content).decode()}
        )
        data.append({**payload, "seed": image["seed"]})
    first = images[0]
    return {
        "created": int(job.ended or job.created),
        "data": data,
        "background": "opaque",
        "output_format": job.request["output_format"],
        "size": f"{first['width']}x{first['height']}",
        "job": job.id,
    }


def make_event(kind: str, job: Job, content: bytes, created: int, *, index: int, size: str, **extra: Any) -> bytes:
    """Encode an image as an OpenAI streaming event, with the image's index and seed added."""
    data = {
        "type": kind,
        "b64_json": base64.b64encode(content).decode(),
        "background": "opaque",
        "created_at": created,
        "output_format": job.request["output_format"],
        "quality": "auto",
        "size": size,
        "index": index,
        "seed": job.request["seeds"][index],
        **({"usage": _NO_USAGE} if kind.endswith("completed") else {}),
        **extra,
    }
    return write_event(kind, data)


def write_event(kind: str, data: Mapping[str, Any]) -> bytes:
    """Encode an event name and JSON data as a server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def describe_model(facts: ModelFacts, created: int) -> dict[str, Any]:
    """Return a model's properties as a JSON-serializable dict for `/v1/models`."""
    return {
        "id": facts.name,
        "object": "model",
        "created": created,
        "owned_by": "anyaccel",
        "pipeline": facts.pipeline,
        "device": facts.device,
        "virtual": facts.virtual,
        "dtype": facts.dtype,
        "weights": facts.weights,
        "tasks": list(facts.tasks),
        "sizes": [f"{width}x{height}" for width, height in facts.sizes],
        "other_sizes": not facts.fixed_sizes,
        "multiple": facts.multiple,
        **facts.defaults[facts.tasks[0]],
        "defaults": {task: dict(values) for task, values in facts.defaults.items()},
        "loras": list(facts.loras),
        "parameters": {task: list(names) for task, names in facts.parameters.items()},
        "kind": facts.kind,
        "inputs": {task: list(names) for task, names in facts.inputs.items()},
        "arguments": {
            task: {name: list(types) for name, types in items.items()} for task, items in facts.arguments.items()
        },
        "video": None if facts.video is None else asdict(facts.video),
        "audio": None if facts.audio is None else asdict(facts.audio),
        "speeds": list(facts.speeds),
        # The next two keys keep their names from version 0.1.
        "pictures_at_once": facts.max_concurrent,
        "joined": [name for name, batched in facts.batched.items() if batched],
    }
