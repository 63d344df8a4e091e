"""Safety checkers for pipelines whose constructor requires one."""

from __future__ import annotations

from typing import Any

__all__ = ["CosmosSafetyChecker"]


class CosmosSafetyChecker:
    """Checker with the methods of `cosmos_guardrail.CosmosSafetyChecker` that accepts every prompt and video.

    The Cosmos pipelines refuse to run without a checker. The real one downloads models with billions of
    parameters, and tiny pipelines with random weights generate only noise.
    """

    def check_text_safety(self, prompt: str) -> bool:
        """Return True."""
        return True

    def check_video_safety(self, frames: Any) -> Any:
        """Return the frames unchanged."""
        return frames

    def to(self, device: Any = None, dtype: Any = None) -> CosmosSafetyChecker:
        """Return the checker, which has no weights to move."""
        return self
