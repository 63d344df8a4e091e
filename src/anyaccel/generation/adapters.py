"""LoRAs, IP-Adapters, ControlNets and schedulers that `generate` adds to a model."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anyaccel.errors import AnyaccelError, MissingLibraryError, ModelError, UsageError, first_line
from anyaccel.generation.input_files import digest_file
from anyaccel.generation.model_name import abbreviate_home

__all__ = [
    "Adapter",
    "Additions",
    "apply_ip_adapters",
    "apply_loras",
    "load_controlnets",
    "parse_adapter",
    "read_additions",
]

AdapterKind = Literal["lora", "ip_adapter", "controlnet"]
_OPTIONS = {"lora": "--lora", "ip_adapter": "--ip-adapter", "controlnet": "--control-model"}
# A Hub ID, followed by the path of a file in the repository.
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(/(?P<file>[\w./ -]+))?")
_IMAGE_ENCODER = "image_encoder"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA or IP-Adapter with its weight, or a ControlNet."""

    kind: AdapterKind
    source: str
    """Path, with `~` for the home folder; or a Hub ID, with the path of a file in the repository."""
    weight: float = 1.0
    sha256: str | None = None
    """Digest of a local file or folder."""

    @property
    def path(self) -> Path | None:
        """The local file or folder, or None if it is on the Hub."""
        path = Path(self.source).expanduser()
        return path if path.exists() else None

    def split(self) -> tuple[str, str, str | None]:
        """Return the folder or repository, the folder in it, and the name of the file if there is one."""
        path = self.path
        if path is not None:
            return (str(path.parent), "", path.name) if path.is_file() else (str(path), "", None)
        match = _HUB_FILE.fullmatch(self.source)
        assert match is not None  # `parse_adapter` accepts nothing else
        folder, _, name = (match["file"] or "").rpartition("/")
        return match["repository"], folder, name or None


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What `generate` adds to a model or replaces in it."""

    loras: tuple[Adapter, ...] = ()
    ip_adapters: tuple[Adapter, ...] = ()
    controlnets: tuple[Adapter, ...] = ()
    scheduler: str | None = None
    """Short name or class name."""

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All LoRAs, IP-Adapters and ControlNets."""
        return (*self.loras, *self.ip_adapters, *self.controlnets)


def read_additions(
    lora: Any = None, ip_adapter: Any = None, controlnet: Any = None, scheduler: str | None = None
) -> Additions:
    """Return the additions for the arguments of `generate`; raise UsageError if a file does not exist."""
    from anyaccel.generation.schedulers import check_scheduler

    return Additions(
        loras=_read_all("lora", lora),
        ip_adapters=_read_all("ip_adapter", ip_adapter),
        controlnets=_read_all("controlnet", controlnet),
        scheduler=None if scheduler is None else check_scheduler(scheduler),
    )


def _read_all(kind: AdapterKind, values: Any) -> tuple[Adapter, ...]:
    """Return the adapters of an argument: a string, a path, a pair with the weight, or a list of these."""
    if values is None:
        return ()
    single = isinstance(values, str | Path | Adapter) or (
        isinstance(values, tuple) and len(values) == 2 and isinstance(values[1], int | float)
    )
    return tuple(_read_one(kind, value) for value in ([values] if single else values))


def _read_one(kind: AdapterKind, value: Any) -> Adapter:
    if isinstance(value, Adapter):
        return value
    if isinstance(value, tuple):
        source, weight = value
        return _make_adapter(kind, str(source), _check_weight(kind, float(weight), str(value)))
    return parse_adapter(kind, str(value))


def parse_adapter(kind: AdapterKind, text: str) -> Adapter:
    """Parse `PATH[:WEIGHT]` or `HUB-ID[/FILE][:WEIGHT]`; a ControlNet has no weight.

    A path that exists takes precedence, and a drive letter such as `C:` is not a path of its own.
    """
    head, colon, tail = text.rpartition(":")
    if kind == "controlnet" or not colon or len(head) < 2 or Path(text).expanduser().exists():
        return _make_adapter(kind, text, 1.0)
    try:
        weight = float(tail)
    except ValueError:
        return _make_adapter(kind, text, 1.0)
    return _make_adapter(kind, head, _check_weight(kind, weight, text))


def _check_weight(kind: AdapterKind, weight: float, text: str) -> float:
    if not math.isfinite(weight):
        option = _OPTIONS[kind]
        raise UsageError(f"the weight of {option} must be finite: {text:.80}", hint=f"for example {option} FILE:0.8")
    return weight


def _make_adapter(kind: AdapterKind, source: str, weight: float) -> Adapter:
    option, path = _OPTIONS[kind], Path(source).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        if kind == "controlnet" and not (path / "config.json").is_file():
            raise ModelError(
                f"{source} of {option} is not the folder of a model: it has no config.json",
                hint="pass the folder or Hub ID of a ControlNet",
            )
        return Adapter(kind=kind, source=abbreviate_home(path), weight=weight, sha256=digest_file(path))
    is_path = source.startswith((".", "/", "~")) or "\\" in source or path.is_absolute()
    if is_path or not _HUB_FILE.fullmatch(source):
        raise UsageError(f"{source:.80} of {option} does not exist", hint="pass an existing file, or a Hub ID")
    return Adapter(kind=kind, source=source, weight=weight)


def apply_loras(pipe: Any, loras: Sequence[Adapter]) -> None:
    """Load the LoRAs into the models of a pipeline, each with its weight."""
    if not hasattr(pipe, "load_lora_weights"):
        raise UsageError(f"{type(pipe).__name__} does not support LoRA", hint="omit --lora")
    names = []
    for index, lora in enumerate(loras):
        repository, folder, name = lora.split()
        options = {"weight_name": name} if name else {}
        names.append(f"lora_{index}")
        with _naming(lora), warnings.catch_warnings():
            # peft warns about several adapters in a model, which are intended here.
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            pipe.load_lora_weights(
                repository, adapter_name=names[-1], **options, **({"subfolder": folder} if folder else {})
            )
    pipe.set_adapters(names, [lora.weight for lora in loras])


def apply_ip_adapters(pipe: Any, adapters: Sequence[Adapter]) -> None:
    """Load the IP-Adapters into a pipeline, each with its scale."""
    if not hasattr(pipe, "load_ip_adapter"):
        raise UsageError(f"{type(pipe).__name__} does not support IP-Adapters", hint="omit --ip-adapter")
    parts = [adapter.split() for adapter in adapters]
    for adapter, (_, _, name) in zip(adapters, parts, strict=True):
        if name is None:
            raise UsageError(
                f"{adapter.source} of --ip-adapter is a folder or repository without the name of a file",
                hint=f"pass the file, for example {adapter.source}/ip-adapter.safetensors",
            )
    options: dict[str, Any] = {"subfolder": [folder for _, folder, _ in parts]}
    options["weight_name"] = [name for _, _, name in parts]
    if "image_encoder_folder" in inspect.signature(pipe.load_ip_adapter).parameters:
        local = adapters[0].path
        # For the Hub, the folder next to the file, as in h94/IP-Adapter.
        if local is not None and not (local.parent / _IMAGE_ENCODER).is_dir():
            options["image_encoder_folder"] = None
    with _naming(adapters[0]):
        pipe.load_ip_adapter([repository for repository, _, _ in parts], **options)
    pipe.set_ip_adapter_scale([adapter.weight for adapter in adapters])


@contextmanager
def _naming(adapter: Adapter) -> Iterator[None]:
    """Convert errors of diffusers about the weights of an adapter to errors that name its file."""
    try:
        yield
    except AnyaccelError:
        raise
    except ImportError as error:
        raise MissingLibraryError(
            f"cannot load {adapter.source}: {first_line(error)}", hint="install this library with pip"
        ) from error
    except (OSError, ValueError, LookupError, AttributeError, RuntimeError, TypeError) as error:
        if "PEFT backend" in str(error):
            raise MissingLibraryError(
                f"cannot load {adapter.source}: LoRA requires peft, which is not installed", hint="pip install peft"
            ) from error
        kind = {"lora": "a LoRA", "ip_adapter": "an IP-Adapter", "controlnet": "a ControlNet"}[adapter.kind]
        raise ModelError(
            f"cannot load {adapter.source}: {first_line(error)}",
            hint=f"check that it is {kind} for this model" + ("" if adapter.path else ", and the network connection"),
        ) from error


def load_controlnets(pipe: Any, controlnets: Sequence[Adapter]) -> Any:
    """Return the ControlNet, or the list of several ones, in the dtype of the pipeline."""
    import diffusers

    from anyaccel.upstream.diffusers_internals import read_dtype_argument

    models = []
    for controlnet in controlnets:
        source = str(controlnet.path or controlnet.source)
        with _naming(controlnet):
            config = diffusers.ControlNetModel.load_config(source)
            kind: Any = getattr(diffusers, str(config.get("_class_name")), None)
            if kind is None or "ControlNet" not in kind.__name__:
                raise ModelError(
                    f"{controlnet.source} is a {config.get('_class_name')}, not a ControlNet",
                    hint="pass the folder or Hub ID of a ControlNet to --control-model",
                )
            options = {read_dtype_argument(): pipe.dtype, "use_safetensors": True}
            models.append(kind.from_pretrained(source, **options))
    return models[0] if len(models) == 1 else models
