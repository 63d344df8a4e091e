"""Health, metrics and status endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

import anyaccel
from anyaccel.server.http.service import Service, ServiceOf

__all__ = ["router"]

router = APIRouter()
# Limits that a request can exceed.
_LIMITS = (
    "max_queue", "max_n", "max_inputs", "max_steps", "max_pixels", "max_prompt", "max_frames", "max_video_pixels",
    "max_audio_s",
)  # fmt: skip


@router.get("/healthz", summary="Liveness probe")
async def is_alive() -> dict[str, str]:
    """Report that the service process is alive, even if it has no worker."""
    return {"status": "alive"}


@router.get(
    "/readyz",
    response_model=None,
    summary="Readiness probe: all models are loaded and warmed up",
    responses={503: {"description": "Starting or shutting down"}},
)
async def is_ready(service: ServiceOf) -> Response:
    """Return the startup progress, with status 503 while the service is starting or shutting down."""
    start = service.dispatcher.start_state
    body = {"status": _find_state(service), "doing": start.message, "done": start.done, "total": start.total}
    return JSONResponse(body, 200 if service.dispatcher.is_ready() and not service.draining else 503)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    summary="Prometheus metrics",
    responses={401: {"description": "Invalid API key"}},
)
async def show_metrics(service: ServiceOf) -> Response:
    """Return the metrics in the Prometheus text format."""
    # In a thread, because counting the jobs reads the database and would block the event loop.
    text = await run_in_threadpool(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/status", summary="Models with their plans, the queue and the limits")
async def show_status(service: ServiceOf) -> dict[str, Any]:
    """Return the service's state, job counts, models and limits, which the web page displays."""
    dispatcher = service.dispatcher
    models = [
        {"name": name, "device": facts.device, "virtual": facts.virtual, "plan": facts.plan, "loras": list(facts.loras)}
        for name, facts in service.models.items()
    ]
    return {
        "version": anyaccel.__version__,
        "state": _find_state(service),
        "doing": dispatcher.start_state.message,
        "done": dispatcher.start_state.done,
        "total": dispatcher.start_state.total,
        "queued": await run_in_threadpool(service.jobs.count, "queued"),
        "running": await run_in_threadpool(service.jobs.count, "running"),
        "models": models,
        "limits": {name: getattr(service.settings.limits, name) for name in _LIMITS},
    }


def _find_state(service: Service) -> str:
    # Draining comes first: the worker is still `ready` then, but new requests are rejected.
    return "ending" if service.draining else service.dispatcher.start_state.state
