"""What clients are told of jobs and pictures."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from anyaccel.server.jobs.store import Job
from anyaccel.server.worker.messages import ModelFacts

__all__ = ["Signer", "describe_job", "describe_model", "describe_pictures", "make_event"]

_TOLD = (
    "task", "model", "prompt", "negative_prompt", "width", "height", "num_inference_steps", "guidance_scale",
    "strength", "lora", "lora_scale", "output_format", "output_compression", "seeds", "partial_images",
)  # fmt: skip
_NO_TOKENS = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


class Signer:
    """Addresses of pictures that need no key: whoever has the address may see the one picture."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret

    def sign(self, job: str, place: int) -> str:
        """The word that goes with an address."""
        return hmac.new(self.secret, f"{job}/{place}".encode(), hashlib.sha256).hexdigest()[:32]

    def is_signed(self, job: str, place: int, word: str) -> bool:
        """Whether a word goes with an address."""
        return hmac.compare_digest(self.sign(job, place).encode(), word.encode())

    def path(self, job: str, place: int) -> str:
        """The address of a picture, without the host."""
        return f"/v1/jobs/{job}/images/{place}?token={self.sign(job, place)}"


def describe_job(job: Job, signer: Signer, share: float = 0.0, waiting: int | None = None) -> dict[str, Any]:
    """A job as its owner sees it."""
    pictures = (job.result or {}).get("pictures", [])
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
        "progress": 1.0 if job.state == "done" else round(share, 4),
        "waiting": waiting,
        "request": {name: job.request.get(name) for name in _TOLD},
        "error": error,
        "images": [{**picture, "url": signer.path(job.id, place)} for place, picture in enumerate(pictures)],
    }


def describe_pictures(job: Job, contents: list[bytes], signer: Signer, *, as_url: bool, base: str) -> dict[str, Any]:
    """The answer of OpenAI's endpoints."""
    pictures = (job.result or {})["pictures"]
    data = []
    for place, (picture, content) in enumerate(zip(pictures, contents, strict=True)):
        shown = (
            {"url": base + signer.path(job.id, place)} if as_url else {"b64_json": base64.b64encode(content).decode()}
        )
        data.append({**shown, "seed": picture["seed"]})
    first = pictures[0]
    return {
        "created": int(job.ended or job.created),
        "data": data,
        "background": "opaque",
        "output_format": job.request["output_format"],
        "size": f"{first['width']}x{first['height']}",
        "job": job.id,
    }


def make_event(kind: str, job: Job, content: bytes, created: int, *, index: int, size: str, **more: Any) -> bytes:
    """One of the events that OpenAI's clients read while a picture is made; `index` tells several pictures apart."""
    told = {
        "type": kind,
        "b64_json": base64.b64encode(content).decode(),
        "background": "opaque",
        "created_at": created,
        "output_format": job.request["output_format"],
        "quality": "auto",
        "size": size,
        "index": index,
        "seed": job.request["seeds"][index],
        **({"usage": _NO_TOKENS} if kind.endswith("completed") else {}),
        **more,
    }
    return write_event(kind, told)


def write_event(kind: str, told: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(told)}\n\n".encode()


def describe_model(facts: ModelFacts, created: int) -> dict[str, Any]:
    """A model as `/v1/models` lists it."""
    return {
        "id": facts.name,
        "object": "model",
        "created": created,
        "owned_by": "anyaccel",
        "pipeline": facts.pipeline,
        "device": facts.device,
        "virtual": facts.virtual,
        "dtype": facts.dtype,
        "tasks": list(facts.tasks),
        "sizes": [f"{width}x{height}" for width, height in facts.sizes],
        "other_sizes": not facts.fixed_sizes,
        "multiple": facts.multiple,
        "num_inference_steps": facts.steps,
        "guidance_scale": facts.guidance,
        "loras": list(facts.loras),
        "parameters": {task: list(takes) for task, takes in facts.takes.items()},
        "pictures_at_once": facts.at_once,
        "joined": [name for name, joins in facts.joins.items() if joins],
    }
