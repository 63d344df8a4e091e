"""Aliases of pipeline methods, with the names that vendors use."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

from anyaccel.runtime.call.warmup import warm_up

__all__ = ["VendorAliases"]


class VendorAliases:
    """Pipeline methods with the names used in the diffusers pull request for AWS Neuron.

    See https://github.com/huggingface/diffusers/pull/13289.
    """

    def enable_neuron_compile(
        self,
        model_names: Sequence[str] | str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        fullgraph: bool = True,
    ) -> None:
        """Compile models like `enable_compile`, but with `fullgraph=True` by default."""
        self.enable_compile(model_names, cache_dir, fullgraph)  # type: ignore[attr-defined]

    def neuron_warmup(self, *args: Any, **kwargs: Any) -> None:
        """Run one step with the given call arguments: `neuron_warmup("warmup", height=512, width=512)`."""
        # The pull request passes arguments by position, `warm_up` expects names.
        names = list(inspect.signature(self.__call__).parameters)  # type: ignore[operator]
        warm_up(self, None, {**dict(zip(names, args, strict=False)), **kwargs})
