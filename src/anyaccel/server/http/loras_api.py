"""Endpoints that list, add and remove LoRA adapters at run time."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from anyaccel.errors import UnknownLoraError, UsageError, nearest
from anyaccel.server.http.errors import ApiError
from anyaccel.server.http.service import Service, ServiceOf

__all__ = ["router"]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in {
        400: "Invalid request, or a file that is not a LoRA",
        401: "Invalid API key",
        404: "Unknown model or LoRA",
        408: "The client sent the request too slowly",
        413: "The request is too large",
        503: "The service is not ready",
    }.items()
}
router = APIRouter(prefix="/v1/loras", responses=_ERRORS)


class LoraRequest(BaseModel):
    """Body of a request that adds a LoRA."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=100, description="Name of a file of `available`.")]
    model: Annotated[str | None, Field(description="A model of `/v1/models`; default: the first one.")] = None


@router.get("", summary="List the LoRAs of the models, and those that can be added")
async def list_loras(service: ServiceOf) -> dict[str, Any]:
    """Return the LoRAs of each model, and the names of the files in the folder of `--lora-dir`."""
    models = service.models
    names = dict.fromkeys(name for facts in models.values() for name in facts.loras)
    data = [_describe(service, name) for name in names]
    available = await run_in_threadpool(service.loras.list_available)
    return {"object": "list", "data": data, "available": available}


@router.post("", summary="Add a LoRA from the service's folder to a model")
async def add(body: LoraRequest, service: ServiceOf) -> dict[str, Any]:
    """Add a LoRA to a model. It is loaded when a request uses it for the first time."""
    model = _find_model(service, body.model)
    if body.name not in service.dispatcher.models[model].loras:
        try:
            await run_in_threadpool(service.loras.add, model, body.name)
        except UsageError as error:
            status = 404 if isinstance(error, UnknownLoraError) else 400
            raise ApiError(status, "invalid_lora", f"{error.message}; {error.hint}", param="name") from error
        except OSError as error:
            raise ApiError(503, "storage", "the service cannot store the list of LoRAs") from error
    return _describe(service, body.name)


@router.delete("/{lora}", summary="Remove a LoRA that was added")
async def remove(
    lora: str, service: ServiceOf, model: Annotated[str | None, Query(description="Default: the first one.")] = None
) -> dict[str, Any]:
    """Remove a LoRA from a model. Running jobs that use it finish; the file stays in the folder."""
    name = _find_model(service, model)
    if lora in service.dispatcher.models[name].loras:
        raise ApiError(400, "invalid_lora", f"{lora[:60]!r} is a LoRA of --lora, which cannot be removed")
    try:
        if not await run_in_threadpool(service.loras.remove, name, lora):
            raise ApiError(404, "unknown_lora", f"the LoRA {lora[:60]!r} was not added to {name}")
    except OSError as error:
        raise ApiError(503, "storage", "the service cannot store the list of LoRAs") from error
    return {"id": lora, "object": "lora.deleted", "deleted": True}


def _find_model(service: Service, name: str | None) -> str:
    service.check_ready()
    models = service.dispatcher.models
    if name is None:
        return next(iter(models))
    if name not in models:
        raise ApiError(404, "model_not_found", f"unknown model {name[:80]!r}: {nearest(name, models)}", param="model")
    return name


def _describe(service: Service, name: str) -> dict[str, Any]:
    fixed = service.dispatcher.models
    models = [model for model, facts in service.models.items() if name in facts.loras]
    return {
        "id": name,
        "object": "lora",
        "models": models,
        "added": not any(name in facts.loras for facts in fixed.values()),
    }
