"""Progress of generating images and of batches: the events, whoever shows them.

The library API shows diffusers' own bars; `generate`, `warm` and `batch` show a rich display (`cli/progress.py`). The
chart, `check`, `bench` and `verify` report what they count by callbacks of their own, and the service sends its own
events to its clients.
"""

from __future__ import annotations

__all__ = ["ProgressListener", "StoppedError"]


class StoppedError(Exception):
    """Raised inside a run whose result is no longer needed."""


class ProgressListener:
    """Receives progress events and ignores them; subclasses override the ones they show.

    An exception that a method raises ends the work there.
    """

    def on_phase(self, text: str) -> None:
        """A phase begins, such as loading a model."""

    def on_component(self, done: int, total: int, name: str) -> None:
        """`done` of a model's components are loaded, and the named one is next; it is empty after the last."""

    def on_step(self, done: int, total: int | None) -> None:
        """`done` denoising steps are done; pipelines with several stages begin again at 0."""

    def on_start(self, done: int, total: int) -> None:
        """A run over rows begins; `done` of them are already done."""

    def on_row(self, done: int, total: int, text: str) -> None:
        """`done` rows are done; the text gives the rate and the failures."""

    def on_message(self, text: str) -> None:
        """Something that the user should know happened."""

    def on_warning(self, text: str) -> None:
        """Something went wrong, and the work continues."""
