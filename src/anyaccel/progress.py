"""Progress events for image generation and batch runs.

`generate`, `warm` and `batch` display them (`cli/progress.py`). The library API shows the diffusers progress bars; the
chart, `check`, `bench`, `verify` and the service have their own callbacks and events.
"""

from __future__ import annotations

__all__ = ["ProgressListener", "StoppedError"]


class StoppedError(Exception):
    """Raised inside a run to stop it because its result is no longer needed."""


class ProgressListener:
    """Progress listener that ignores all events; subclasses override the methods for the events they display.

    An exception raised by a method stops the run.
    """

    def on_phase(self, text: str) -> None:
        """Called when a phase begins, such as loading a model."""

    def on_component(self, done: int, total: int, name: str) -> None:
        """Called when `done` components are loaded; `name` is the next one, or empty after the last."""

    def on_step(self, done: int, total: int | None) -> None:
        """Called after `done` denoising steps; pipelines with several stages restart at 0."""

    def on_start(self, done: int, total: int) -> None:
        """Called when a batch run begins; an earlier run finished `done` of its `total` rows."""

    def on_row(self, done: int, total: int, text: str) -> None:
        """Called after `done` rows; `text` contains the rate and the failure count."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user."""

    def on_warning(self, text: str) -> None:
        """Called when an operation failed but the run continues."""
