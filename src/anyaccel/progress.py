"""Progress events for image generation and batch runs.

The `generate`, `warm` and `batch` commands display them (`cli/progress.py`). The library API shows
the diffusers progress bars instead. Other commands and the HTTP service have their own callbacks
and events.
"""

from __future__ import annotations

__all__ = ["ProgressListener", "StoppedError"]


class StoppedError(Exception):
    """Raised to stop a run when its result is no longer needed."""


class ProgressListener:
    """Base class for progress listeners; its methods ignore all events.

    Subclasses override the methods for the events that they display. An exception raised by a method
    stops the run.
    """

    def on_phase(self, text: str) -> None:
        """Called when a phase begins, such as loading a model."""

    def on_component(self, done: int, total: int, name: str) -> None:
        """Called before each component is loaded, and after the last one.

        `done` of `total` components are loaded. `name` is the next component, or empty after the last one.
        """

    def on_layer(self, done: int, total: int, text: str) -> None:
        """Called before each layer of a model is quantized, and after the last one."""

    def on_step(self, done: int, total: int | None) -> None:
        """Called before the first denoising step and after each one; `total` is None if it is unknown.

        In a pipeline with several stages, `done` restarts at 0 in each stage.
        """

    def on_frame(self, done: int, total: int) -> None:
        """Called after each frame of a video that is written to a file."""

    def on_start(self, done: int, total: int) -> None:
        """Called when a batch run begins; `done` of its `total` rows were finished by an earlier run."""

    def on_row(self, done: int, total: int, text: str) -> None:
        """Called when `done` of `total` rows are finished; `text` contains the rate and the failure count."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user."""

    def on_warning(self, text: str) -> None:
        """Called with a warning for the user: an operation failed, but the run continues."""
