"""`anyaccel serve [MODEL…]`: an OpenAI-compatible server for images, videos and audio from any pipeline."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anyaccel.call_limits import parse_image_size
from anyaccel.cli.completion import complete_speed
from anyaccel.cli.shared_options import Dtype, RayAddress, Text, Weights
from anyaccel.errors import UsageError

if TYPE_CHECKING:
    from anyaccel.server.settings import ServerSettings

__all__ = ["serve_models"]

_KEYS = "ANYACCEL_API_KEYS"
_INSTALL = "pip install 'anyaccel[serve]'"
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        "-d",
        help="Device to use: auto, cuda, hpu:3, virtual:neuron; with --ray, repeat for several. Default: auto.",
    ),
]
Replicas = Annotated[
    Text,
    typer.Option(
        "--replicas",
        metavar="N|auto",
        help="With --ray: number of replicas per device type; auto scales with the load. Default: one per device.",
    ),
]
Sizes = Annotated[
    Text,
    typer.Option("--sizes", metavar="WxH,…", help="Image sizes to warm up at startup. Default: set by the model."),
]


def _parse_data_folder(text: str) -> Path:
    if not text:  # for example --data "$UNSET"; Path("") is the current folder
        raise typer.BadParameter("the value is empty; pass a folder or omit the option")
    return Path(text)


DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder for jobs and images. Default: serve/ in the cache folder.",
        parser=_parse_data_folder,
    ),
]

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="Hub IDs or folders, optionally as NAME=MODEL. Default: the embedded model."),
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 selects a free port.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option("--api-key", help=f"API key to accept; repeat for several, or set {_KEYS} (comma-separated)."),
]
NoKey = Annotated[bool, typer.Option("--no-key", help="Accept requests without an API key, even from other machines.")]
MaxBatch = Annotated[int, typer.Option("--max-batch", min=1, max=256, help="Maximum number of images per batch.")]
MaxQueue = Annotated[
    int, typer.Option("--max-queue", min=1, help="Maximum number of queued requests; further requests get status 429.")
]
MaxModels = Annotated[
    int | None,
    typer.Option("--max-models", min=1, help="Maximum number of models in memory. Default: as many as fit."),
]
Loras = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="NAME=PATH", help="LoRA adapter to serve under NAME; repeat for several."),
]
LoraFolder = Annotated[
    Path | None,
    typer.Option(
        "--lora-dir",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Folder with .safetensors files that clients can add as LoRA adapters. Default: none.",
    ),
]
ControlModels = Annotated[
    list[str] | None,
    typer.Option("--control-model", metavar="MODEL", help="ControlNet with which the models are loaded; repeatable."),
]
IpAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--ip-adapter", metavar="PATH[:SCALE]", help="IP-Adapter with which the models are loaded; repeatable."
    ),
]
Speeds = Annotated[
    list[str] | None,
    typer.Option(
        "--speed",
        metavar="exact|fast|draft",
        help="Speed level; repeat to let requests select one with `quality`. Default: exact.",
        autocompletion=complete_speed,
    ),
]
Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit", metavar="NAME=NUMBER", help="Override a request limit, such as max_steps=50; repeat for several."
    ),
]
Otlp = Annotated[
    Text,
    typer.Option("--otlp", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="OTLP endpoint for traces. Default: no traces."),
]


def serve_models(
    models: Models = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8000,
    device: Devices = None,
    dtype: Dtype = None,
    speed: Speeds = None,
    weights: Weights = None,
    api_key: ApiKeys = None,
    no_key: NoKey = False,
    max_batch: MaxBatch = 8,
    max_queue: MaxQueue = 64,
    max_models: MaxModels = None,
    sizes: Sizes = None,
    lora: Loras = None,
    lora_dir: LoraFolder = None,
    control_model: ControlModels = None,
    ip_adapter: IpAdapters = None,
    data: DataFolder = None,
    limit: Limits = None,
    ray: RayAddress = None,
    replicas: Replicas = None,
    otlp: Otlp = None,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    The server has a job queue that survives restarts, and a web page. Requests from different clients are batched
    per denoising step; every client receives the same image as without batching.
    """
    # The server has optional dependencies, which a plain `pip install anyaccel` does not install.
    try:
        from anyaccel.server.run_server import check_address
    except ImportError as error:
        raise UsageError(f"anyaccel serve requires {error.name}, which is not installed", hint=_INSTALL) from error
    devices = _check_devices(device, ray, replicas)
    from anyaccel.server.settings import ServerSettings, read_limits, read_lora, read_served_names

    keys = _read_keys(api_key)
    check_address(host, keys, without_key=no_key)  # before loading: a public address requires a key
    settings = ServerSettings(
        models=read_served_names(models or _list_default_models()),
        data=(data or _default_data_folder()).expanduser().absolute(),
        device=devices[0],
        dtype=dtype,
        speeds=_check_speeds(speed),
        weights=weights,
        host=host,
        port=port,
        keys=keys,
        max_batch=max_batch,
        max_models=max_models,
        sizes=tuple(parse_image_size(text) for text in sizes.split(",")) if sizes else (),
        loras=tuple(read_lora(text) for text in lora or ()),
        lora_dir=None if lora_dir is None else lora_dir.expanduser().resolve(),
        controlnets=tuple(control_model or ()),
        ip_adapters=tuple(ip_adapter or ()),
        otlp=otlp,
        limits=read_limits(limit or (), max_queue),
    )
    _serve(settings, ray, devices, replicas)


def _list_default_models() -> list[str]:
    from anyaccel.embedded.model import NAME
    from anyaccel.embedded.motion import VIDEO_NAME, has_motion_module

    return [NAME, VIDEO_NAME] if has_motion_module() else [NAME]


def _read_keys(api_key: list[str] | None) -> tuple[str, ...]:
    # Both sources count: a key on the command line is visible in the process list, the variable is not.
    return tuple(key.strip() for key in (*(api_key or ()), *os.environ.get(_KEYS, "").split(",")) if key.strip())


def _check_devices(device: list[str] | None, ray: str | None, replicas: str | None) -> tuple[str, ...]:
    devices = tuple(device or ("auto",))
    if ray is None and (replicas is not None or len(devices) > 1):
        raise UsageError(
            "--replicas requires --ray" if replicas is not None else "more than one --device requires --ray",
            hint="add --ray auto to start Ray on this machine",
        )
    return devices


def _check_speeds(speeds: list[str] | None) -> tuple[str, ...]:
    from anyaccel.planning.options import check_speed

    for speed in speeds or ():
        check_speed(speed)
    return tuple(dict.fromkeys(speeds or ("exact",)))


def _serve(settings: ServerSettings, ray: str | None, devices: tuple[str, ...], replicas: str | None) -> None:
    def report_ready(address: str) -> None:
        # Scripts wait for this line to learn the port, so its format must not change.
        _print_line(f"ready: {address}")

    # Ray is an optional dependency, so it is imported only if it is used.
    if ray is None:
        from anyaccel.server.run_server import serve

        serve(settings, _print_line, report_ready)
    else:
        from anyaccel.cluster.serve.applications import read_replicas
        from anyaccel.cluster.serve.start import serve_on_ray

        serve_on_ray(settings, ray, devices, read_replicas(replicas), _print_line, report_ready)


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _default_data_folder() -> Path:
    from anyaccel.storage.cache_dir import find_cache_folder

    return find_cache_folder() / "serve"
