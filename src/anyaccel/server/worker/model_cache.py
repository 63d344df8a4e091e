"""The models that are in memory: one that is asked for comes in, and the one used longest ago leaves if it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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

_ROOM = 1.5
"""A model wants so many times its weights: what a picture needs besides is not known before."""
_LOOK_S = 0.05


class ModelCache:
    """Keeps models for as long as there is room; only those that nobody uses leave."""

    def __init__(self, settings: ServerSettings, load: Callable[[ServedName], ServedModel]) -> None:
        self.settings, self.load = settings, load
        self.models: dict[str, ServedModel] = {}
        self.users: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        """What each took when it was in memory."""
        self.opened: OpenDevice | None = None
        self.lock = threading.RLock()
        self.loading = threading.Lock()
        self.making_room = False

    @contextmanager
    def using(self, name: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[ServedModel]:
        """A model, which stays while the block runs; whoever is stopped does not wait for it."""
        model = self._take(name, is_stopped)
        try:
            yield model
        finally:
            with self.lock:
                self.users[name] -= 1

    def _take(self, name: str, is_stopped: Callable[[], bool]) -> ServedModel:
        with self.lock:
            found = self.models.get(name)
            if found is not None and not self.making_room:
                self.users[name] = self.users.get(name, 0) + 1
                return found
        # One comes in at a time. While it waits for room, nobody begins with another: it would wait for ever.
        while not self.loading.acquire(timeout=_LOOK_S):
            if is_stopped():
                raise StoppedError
        try:
            return self._bring_in(name, is_stopped)
        finally:
            self.making_room = False
            self.loading.release()

    def _bring_in(self, name: str, is_stopped: Callable[[], bool]) -> ServedModel:
        with self.lock:
            model = self.models.get(name)
        if model is None:
            served = next((one for one in self.settings.models if one.name == name), None)
            if served is None:
                raise UsageError(f"the model {name} is no longer served", hint="ask for one of /v1/models")
            self.making_room = True
            self._make_room(served, is_stopped)
            model = self.load(served)
            release_unreachable()
            ignore_existing_objects()  # a collection among them would delay every request
        with self.lock:
            self.models[name] = model
            self.users[name] = self.users.get(name, 0) + 1
            self.sizes[name] = _weigh(model)
            placement = find_placement(model.pipe)
            self.opened = placement.opened if placement is not None else None
            return model

    def _make_room(self, served: ServedName, is_stopped: Callable[[], bool]) -> None:
        while self.models and not self._has_room(served):
            if is_stopped():
                raise StoppedError
            with self.lock:
                idle = [name for name in self.models if not self.users.get(name)]
                oldest = min(idle, key=lambda name: self.models[name].last_used, default=None)
                if oldest is not None:
                    self.models.pop(oldest).close()
            if oldest is None:  # all are in use: whoever ends first makes room
                time.sleep(_LOOK_S)
                continue
            release_unreachable(also_ignored=True)
            if self.opened is not None:
                try:
                    self.opened.driver.empty_cache()
                except (AnyaccelError, RuntimeError):
                    continue

    def _has_room(self, served: ServedName) -> bool:
        most = self.settings.max_models
        if most is not None and len(self.models) >= most:
            return False
        need = self.sizes.get(served.name) or _weigh_files(served)
        if self.opened is None or need is None:
            return True
        try:
            free = self.opened.driver.memory(self.opened.index).free_bytes
        except NotMeasurableError:
            return True
        return need * _ROOM <= free


def _weigh(model: ServedModel) -> int:
    tensors = {
        id(one): one for part in find_models(model.pipe).values() for one in (*part.parameters(), *part.buffers())
    }
    return sum(one.numel() * one.element_size() for one in tensors.values())


def _weigh_files(served: ServedName) -> int | None:
    """The weights in a folder, as they lie there; None for what is not on this machine yet."""
    folder = Path(resolve_model(served.model).source)
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) if folder.is_dir() else None
