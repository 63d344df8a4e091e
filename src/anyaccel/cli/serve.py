"""`anyaccel serve [MODEL…]`: OpenAI-compatible pictures from any pipeline on any accelerator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anyaccel.call_limits import parse_image_size
from anyaccel.errors import UsageError

if TYPE_CHECKING:
    from anyaccel.server.settings import ServerSettings

__all__ = ["serve_models"]

Text = str | None
Devices = Annotated[
    list[str] | None, typer.Option("--device", "-d", help="auto, a name, hpu:3, virtual:neuron; several on Ray.")
]
RayAddress = Annotated[Text, typer.Option("--ray", metavar="ADDRESS|auto", help="Make the pictures in a Ray cluster.")]
Replicas = Annotated[
    Text, typer.Option("--replicas", metavar="N|auto", help="On Ray, of each kind of device; else one a device.")
]
Sizes = Annotated[Text, typer.Option("--sizes", metavar="WxH,…", help="Sizes to make ready; else the model's own.")]
_KEYS = "ANYACCEL_API_KEYS"


def _read_folder(text: str) -> Path:
    if not text:  # as of a variable of the shell that is not set
        raise typer.BadParameter("it is empty: name a folder, or leave it out")
    return Path(text)


Folder = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where jobs and pictures are kept.", parser=_read_folder),
]


def serve_models(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Hub ids or folders, NAME=MODEL; else the embedded one.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    device: Devices = None,
    dtype: Annotated[Text, typer.Option("--dtype", help="float32, bf16, fp16; else the device's best.")] = None,
    speed: Annotated[str, typer.Option("--speed", help="exact; fast and draft are not quite the same.")] = "exact",
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", help=f"Who may ask; also {_KEYS}, with commas.")
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let everybody ask, from other machines too.")] = False,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, max=256, help="Pictures made at once.")] = 8,
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="Requests that may wait; then 429.")] = 64,
    max_models: Annotated[int | None, typer.Option("--max-models", min=1, help="In memory; else what fits.")] = None,
    sizes: Sizes = None,
    lora: Annotated[list[str] | None, typer.Option("--lora", metavar="NAME=PATH", help="An adapter to serve.")] = None,
    data: Folder = None,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", metavar="NAME=NUMBER", help="Such as max_steps=50 or deadline_s=60.")
    ] = None,
    ray: RayAddress = None,
    replicas: Replicas = None,
    otlp: Annotated[
        Text, typer.Option("--otlp", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="A collector of traces.")
    ] = None,
) -> None:
    """Serve models over HTTP, with OpenAI's API for pictures, jobs that survive a crash, and a page to try it.

    Requests of several clients are made together, step by step, and each gets the picture that it would get alone.
    """
    try:
        from anyaccel.server.run_server import check_address
    except ImportError as error:
        raise UsageError(f"the service needs {error.name}, which is not installed", hint=_INSTALL) from error
    devices = _check_devices(device, ray, replicas)
    from anyaccel.server.settings import ServerSettings, read_limits, read_lora, read_served_names

    keys = tuple(key.strip() for key in (*(api_key or ()), *os.environ.get(_KEYS, "").split(",")) if key.strip())
    check_address(host, keys, without_key=no_key)
    settings = ServerSettings(
        models=read_served_names(models or ["embedded"]),
        data=(data or _find_data()).expanduser().absolute(),
        device=devices[0],
        dtype=dtype,
        speed=speed,
        host=host,
        port=port,
        keys=keys,
        max_batch=max_batch,
        max_models=max_models,
        sizes=tuple(parse_image_size(text) for text in sizes.split(",")) if sizes else (),
        loras=tuple(read_lora(text) for text in lora or ()),
        otlp=otlp,
        limits=read_limits(limit or (), max_queue),
    )
    _serve(settings, ray, devices, replicas)


def _check_devices(device: list[str] | None, ray: str | None, replicas: str | None) -> tuple[str, ...]:
    devices = tuple(device or ("auto",))
    if ray is None and (replicas is not None or len(devices) > 1):
        raise UsageError("several devices or replicas are served on Ray", hint="--ray auto starts it on this machine")
    return devices


def _serve(settings: ServerSettings, ray: str | None, devices: tuple[str, ...], replicas: str | None) -> None:
    def tell_ready(address: str) -> None:
        _tell(f"ready: {address}")

    if ray is None:
        from anyaccel.server.run_server import serve

        serve(settings, _tell, tell_ready)
    else:
        from anyaccel.cluster.serve.applications import read_replicas
        from anyaccel.cluster.serve.start import serve_on_ray

        serve_on_ray(settings, ray, devices, read_replicas(replicas), _tell, tell_ready)


_INSTALL = "pip install 'anyaccel[serve]'"


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _find_data() -> Path:
    from anyaccel.storage.cache_dir import find_cache_folder

    return find_cache_folder() / "serve"
