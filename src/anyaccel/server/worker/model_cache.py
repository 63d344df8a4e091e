"""Model cache that loads models on demand, and evicts the least recently used ones when memory is low."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from anyaccel.backends.device import OpenDevice
from anyaccel.errors import AnyaccelError, NotMeasurableError, UsageError
from anyaccel.generation.model_name import resolve_model
from anyaccel.processes.gc_control import ignore_existing_objects, release_unreachable
from anyaccel.progress import StoppedError
from anyaccel.runtime.introspection import find_models
from anyaccel.runtime.placement_state import find_placement
from anyaccel.server.settings import ServedName, ServerSettings
from anyaccel.server.worker.served_model import ServedModel

__all__ = ["ModelCache"]

_Key: TypeAlias = tuple[str, str]
# Estimated memory of a model as a multiple of its weights. Its activations are unknown before the first call.
_MEMORY_FACTOR = 1.5
_POLL_S = 0.05


class ModelCache:
    """Cache of loaded models, which evicts only models that are not in use."""

    def __init__(self, settings: ServerSettings, load: Callable[[ServedName, str], ServedModel]) -> None:
        self.settings, self.load = settings, load
        # By name and speed level.
        self.models: dict[_Key, ServedModel] = {}
        self.users: dict[_Key, int] = {}
        # Bytes of each model's weights, measured when it was last loaded. Kept after an eviction.
        self.sizes: dict[_Key, int] = {}
        self.opened: OpenDevice | None = None
        self.lock = threading.RLock()
        self.loading = threading.Lock()
        self.evicting = False

    @contextmanager
    def using(
        self, name: str, speed: str | None = None, is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[ServedModel]:
        """Load a model if necessary, and keep it in memory for the duration of the `with` block.

        The default of `speed` is the first level of the service. Raises `StoppedError` if `is_stopped` returns true
        during the wait for the model.
        """
        key = name, speed or self.settings.speeds[0]
        model = self._acquire(key, is_stopped)
        try:
            yield model
        finally:
            with self.lock:
                self.users[key] -= 1

    def _acquire(self, key: _Key, is_stopped: Callable[[], bool]) -> ServedModel:
        with self.lock:
            model = self.models.get(key)
            if model is not None and not self.evicting:
                self.users[key] = self.users.get(key, 0) + 1
                return model
        # One model loads at a time. While it waits for memory, no call starts on another model: a steady stream of
        # calls would keep that model in use and the new one waiting forever.
        while not self.loading.acquire(timeout=_POLL_S):
            if is_stopped():
                raise StoppedError
        try:
            return self._load(key, is_stopped)
        finally:
            self.evicting = False
            self.loading.release()

    def _load(self, key: _Key, is_stopped: Callable[[], bool]) -> ServedModel:
        name, speed = key
        with self.lock:
            model = self.models.get(key)
        if model is None:
            served = next((served for served in self.settings.models if served.name == name), None)
            if served is None or speed not in self.settings.speeds:
                raise UsageError(
                    f"model {name} is no longer served", hint="use one of the models that GET /v1/models lists"
                )
            self.evicting = True
            self._evict_until_fits(served, key, is_stopped)
            model = self.load(served, speed)
            release_unreachable()
            ignore_existing_objects()  # garbage collections would scan all objects of the model and delay requests
        with self.lock:
            self.models[key] = model
            self.users[key] = self.users.get(key, 0) + 1
            self.sizes[key] = _count_weight_bytes(model)
            placement = find_placement(model.pipe)
            self.opened = placement.opened if placement is not None else None
            return model

    def _evict_until_fits(self, served: ServedName, key: _Key, is_stopped: Callable[[], bool]) -> None:
        while self.models and not self._fits(served, key):
            if is_stopped():
                raise StoppedError
            with self.lock:
                idle = [other for other in self.models if not self.users.get(other)]
                oldest = min(idle, key=lambda other: self.models[other].last_used, default=None)
                if oldest is not None:
                    self.models.pop(oldest).close()
            if oldest is None:  # all models are in use: wait until one is idle
                time.sleep(_POLL_S)
                continue
            release_unreachable(also_ignored=True)
            if self.opened is not None:
                try:
                    self.opened.driver.empty_cache()
                except (AnyaccelError, RuntimeError):
                    continue

    def _fits(self, served: ServedName, key: _Key) -> bool:
        max_models = self.settings.max_models
        if max_models is not None and len(self.models) >= max_models:
            return False
        weight_bytes = self.sizes.get(key) or _count_file_bytes(served)
        if self.opened is None or weight_bytes is None:
            return True
        try:
            free_bytes = self.opened.driver.memory(self.opened.index).free_bytes
        except NotMeasurableError:
            return True
        return weight_bytes * _MEMORY_FACTOR <= free_bytes


def _count_weight_bytes(model: ServedModel) -> int:
    # By id, because components may share weights, which count once.
    tensors = {
        id(tensor): tensor
        for module in find_models(model.pipe).values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _count_file_bytes(served: ServedName) -> int | None:
    """Return the total size of a model's weight files in bytes, or None if they are not available locally."""
    folder = Path(resolve_model(served.model).source)
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) if folder.is_dir() else None
