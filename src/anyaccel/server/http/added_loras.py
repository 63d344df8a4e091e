"""LoRA adapters that clients added at run time, stored in the data folder, so that they survive a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from anyaccel.errors import UsageError
from anyaccel.server.worker.lora_folder import check_lora, find_lora, list_loras
from anyaccel.server.worker.messages import ModelFacts
from anyaccel.storage.atomic_write import atomic_write

__all__ = ["AddedLoras"]


class AddedLoras:
    """Names of the added LoRAs of each model. The worker loads a LoRA when a call uses it for the first time."""

    def __init__(self, folder: Path | None, file: Path) -> None:
        self.folder, self.file = folder, file
        self.lock = threading.Lock()
        self.names: dict[str, list[str]] = _read(file) if folder is not None else {}

    def list_available(self) -> list[str]:
        """Return the names of the files in the folder, which can be added."""
        return [] if self.folder is None else list_loras(self.folder)

    def add(self, model: str, name: str) -> None:
        """Add a LoRA to a model; raise `UsageError` if its file does not exist or is not a LoRA."""
        if self.folder is None:
            raise UsageError("this service adds no LoRAs at run time", hint="start it with --lora-dir FOLDER")
        check_lora(find_lora(self.folder, name))
        with self.lock:
            self._store(model, [*(other for other in self.names.get(model, []) if other != name), name])

    def remove(self, model: str, name: str) -> bool:
        """Remove a LoRA from a model; return whether it was added before."""
        with self.lock:
            names = self.names.get(model, [])
            if name not in names:
                return False
            self._store(model, [other for other in names if other != name])
            return True

    def merge(self, models: Mapping[str, ModelFacts]) -> dict[str, ModelFacts]:
        """Return the properties of the models with their added LoRAs."""
        with self.lock:
            return {
                name: replace(facts, loras=tuple(dict.fromkeys((*facts.loras, *self.names.get(name, ())))))
                for name, facts in models.items()
            }

    def _store(self, model: str, names: list[str]) -> None:
        changed = {**self.names, model: names}
        atomic_write(self.file, json.dumps(changed).encode())
        self.names = changed


def _read(file: Path) -> dict[str, list[str]]:
    try:
        stored = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {error}", hint="delete the file, and add the LoRAs again") from error
    return {str(model): [str(name) for name in names] for model, names in stored.items()}
