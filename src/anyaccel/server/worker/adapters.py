"""LoRA adapters of a served model: those that it was loaded with, and those that are added at run time."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

from anyaccel.errors import AnyaccelError, UnknownLoraError, UsageError, first_line
from anyaccel.server.settings import ServerSettings
from anyaccel.server.worker.lora_folder import check_lora, find_lora

__all__ = ["LoraAdapters"]

# Adapters added at run time that stay in memory for each model; the least recently used ones are deleted.
_MAX_LOADED = 8


class LoraAdapters:
    """LoRA adapters of one pipeline, of which at most one is enabled.

    Its methods must not be called while a pipeline call is running.
    """

    def __init__(self, pipe: Any, settings: ServerSettings) -> None:
        self.pipe, self.folder = pipe, settings.lora_dir
        self.names = tuple(lora.name for lora in settings.loras)
        self._added: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Time and size of the file of each adapter that was added, by its name in the pipeline."""
        if not settings.loras:
            return
        self._check_support("omit --lora")
        for lora in settings.loras:
            pipe.load_lora_weights(lora.model, adapter_name=lora.name)
        # Adapters stay loaded but disabled: `enable` selects one per group of calls.
        pipe.disable_lora()

    def enable(self, name: str, scale: float) -> None:
        """Enable one adapter, and load it first if it was added at run time."""
        adapter = name if name in self.names else self._load(name)
        self.pipe.enable_lora()
        self.pipe.set_adapters([adapter], adapter_weights=[scale])

    def disable(self) -> None:
        """Disable all adapters."""
        if self.names or self._added:
            self.pipe.disable_lora()

    def _load(self, name: str) -> str:
        """Load an adapter from the folder unless it is loaded and unchanged; return its name in the pipeline."""
        if self.folder is None:
            raise UnknownLoraError(f"unknown LoRA {name!r:.60}", hint="start the service with --lora-dir")
        self._check_support("use a model that supports LoRA")
        file = find_lora(self.folder, name)
        status = file.stat()
        stamp = status.st_mtime_ns, status.st_size
        # The name of a file may contain dots, which the name of an adapter must not.
        adapter = f"added_{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        if self._added.get(adapter) != stamp:
            check_lora(file)
            self._delete(adapter)
            self._load_file(file, adapter)
        self._added[adapter] = stamp
        self._added.move_to_end(adapter)
        while len(self._added) > _MAX_LOADED:
            self._delete(next(iter(self._added)))
        return adapter

    def _load_file(self, file: Path, adapter: str) -> None:
        try:
            # Without `use_safetensors`, diffusers would fall back to pickled weights.
            self.pipe.load_lora_weights(
                str(file.parent), weight_name=file.name, adapter_name=adapter, use_safetensors=True
            )
        except AnyaccelError:
            raise
        except (OSError, ValueError, LookupError, AttributeError, RuntimeError, TypeError) as error:
            raise UsageError(
                f"cannot load the LoRA {file.stem}: {first_line(error)}",
                hint="use a LoRA that was trained for this model",
            ) from error
        finally:
            if self._has(adapter):
                self.pipe.disable_lora()

    def _delete(self, adapter: str) -> None:
        self._added.pop(adapter, None)
        if self._has(adapter):
            self.pipe.delete_adapters(adapter)

    def _has(self, adapter: str) -> bool:
        return any(adapter in names for names in self.pipe.get_list_adapters().values())

    def _check_support(self, hint: str) -> None:
        if not hasattr(self.pipe, "load_lora_weights"):
            raise UsageError(f"{type(self.pipe).__name__} does not support LoRA", hint=hint)
