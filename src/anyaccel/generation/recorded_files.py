"""Input files and adapters in the metadata, whose digests are verified before they are used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.generation.inputs import INPUT_OPTIONS, InputMedia

__all__ = [
    "check_recorded_files",
    "is_recorded_input",
    "list_adapters",
    "list_input_files",
    "record_adapters",
    "record_inputs",
]

# Argument of `anyaccel.generate` for each kind of adapter.
_ADAPTER_ARGUMENTS = {"lora": "lora", "ip_adapter": "ip_adapter", "controlnet": "controlnet"}
_ADAPTER_OPTIONS = {"lora": "--lora", "ip_adapter": "--ip-adapter", "controlnet": "--control-model"}


def is_recorded_input(value: Any) -> bool:
    """Return whether a call argument consists of input files, which have their own field in the metadata."""
    items = value if isinstance(value, list | tuple) else [value]
    return bool(items) and all(isinstance(item, InputMedia) and item.path is not None for item in items)


def record_inputs(call: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the metadata of the input files of a call."""
    return tuple(
        {"name": name, "kind": item.kind, "path": item.path, "sha256": item.sha256}
        for name, value in call.items()
        if is_recorded_input(value)
        for item in (value if isinstance(value, list | tuple) else [value])
    )


def record_adapters(adapters: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """Return the metadata of LoRAs, IP-Adapters and ControlNets."""
    return tuple(
        {"kind": item.kind, "source": item.source, "weight": item.weight, "sha256": item.sha256} for item in adapters
    )


def check_recorded_files(records: Iterable[Any]) -> None:
    """Raise ValueError if the metadata of an input file or an adapter is not valid."""
    for record in records:
        valid = isinstance(record, dict) and isinstance(record.get("kind"), str)
        if valid and "source" in record:
            valid = isinstance(record["source"], str) and isinstance(record.get("weight"), int | float)
            valid = valid and record["kind"] in _ADAPTER_ARGUMENTS
        elif valid:
            valid = all(isinstance(record.get(name), str) for name in ("name", "path", "sha256"))
        if not valid:
            raise ValueError(f"invalid input file or adapter {record!r:.60}")


def list_input_files(inputs: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the input files by argument; raise UsageError if one is missing or has changed.

    `kind` is what was generated: an image, a video or audio.
    """
    arguments: dict[str, list[str]] = {}
    for item in inputs:
        option = INPUT_OPTIONS.get(item["name"], item["name"])
        _verify(item["path"], item["sha256"], f"the input {item['path']} of the {kind}", option)
        arguments.setdefault(item["name"], []).append(item["path"])
    return {name: paths if len(paths) > 1 else paths[0] for name, paths in arguments.items()}


def list_adapters(adapters: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the adapters by argument of `anyaccel.generate`; raise UsageError if a local one is missing or changed."""
    arguments: dict[str, list[Any]] = {}
    for item in adapters:
        if item.get("sha256") is not None:
            subject = f"{item['source']}, with which the {kind} was generated,"
            _verify(item["source"], item["sha256"], subject, _ADAPTER_OPTIONS[item["kind"]])
        arguments.setdefault(_ADAPTER_ARGUMENTS[item["kind"]], []).append((item["source"], item["weight"]))
    return dict(arguments)


def _verify(path: str, sha256: str, subject: str, option: str) -> None:
    from anyaccel.generation.input_files import digest_file

    file = Path(path).expanduser()
    hint = f"restore the file, or pass another one with {option}"
    if not file.exists():
        raise UsageError(f"{subject} does not exist any more", hint=hint)
    if digest_file(file) != sha256:
        raise UsageError(f"{subject} has changed since then", hint=hint)
