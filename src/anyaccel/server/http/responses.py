"""Functions that convert jobs, images and models to JSON, and encode server-sent events."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from anyaccel.server.jobs.store import Job
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["KEEP_ALIVE", "Signer", "describe_images", "describe_job", "describe_model", "make_event", "write_event"]

# A comment line of the server-sent events format, which clients ignore.
KEEP_ALIVE = b": keep-alive\n\n"
# Fields of a job's request in its JSON; jobs stored by an older version may lack some.
_REQUEST_FIELDS = (
    "task", "model", "prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale",
    "strength", "lora", "lora_scale", "output_format", "output_compression", "seeds", "partial_images",
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

    def sign(self, job: str, index: int) -> str:
        """Return the token that gives access to one image of a job."""
        # 128 bits cannot be guessed, and the URL stays short.
        return hmac.new(self.secret, f"{job}/{index}".encode(), hashlib.sha256).hexdigest()[:32]

    def is_signed(self, job: str, index: int, token: str) -> bool:
        """Return whether a token gives access to the given image of a job."""
        # Constant time: a response time that depends on the first wrong byte would reveal the token.
        return hmac.compare_digest(self.sign(job, index).encode(), token.encode())

    def path(self, job: str, index: int) -> str:
        """Return the URL of an image with its access token, without the scheme and host."""
        return f"/v1/jobs/{job}/images/{index}?token={self.sign(job, index)}"


def describe_job(job: Job, signer: Signer, fraction: float = 0.0, waiting: int | None = None) -> dict[str, Any]:
    """Return a job as a JSON-serializable dict.

    `fraction` is the completed fraction of a running job, and `waiting` is the number of older jobs in
    the queue.
    """
    images = (job.result or {}).get("images", [])
    error = None
    if job.error is not None:
        error = {"code": job.error.get("code"), "message": job.error.get("message")}
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
        "error": error,
        "images": [{**image, "url": signer.path(job.id, index)} for index, image in enumerate(images)],
    }


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
        # The next two keys keep their names from version 0.1.
        "pictures_at_once": facts.max_concurrent,
        "joined": [name for name, batched in facts.batched.items() if batched],
    }
