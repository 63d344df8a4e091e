"""Host memory for loading the weights of an explained model, from the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from anyaccel.backends.sheet import Sheet
from anyaccel.planning.loading_memory import LoadingForecast, predict_loading
from anyaccel.planning.memory import MemoryRule
from anyaccel.planning.options import PlacementOptions
from anyaccel.runtime.weight_files.sizes import read_weights

__all__ = ["forecast_loading"]


def forecast_loading(
    folders: Mapping[str, Path],
    dtype: torch.dtype,
    sheet: Sheet,
    rule: MemoryRule | None,
    options: PlacementOptions,
) -> LoadingForecast | None:
    """Return the host memory for `from_pretrained(folder, device=…)`; None if it cannot be predicted.

    That is the case if the folder does not have all files, and for weights that are quantized while they are loaded.
    `folders` are those of the components with weights.
    """
    files = read_weights(folders, dtype)
    if not folders or len(files) < len(folders) or options.weights is not None:
        return None
    resident = rule is not None and rule.residence == "resident"
    moved = resident and not sheet.is_host and options.parallel is None
    return predict_loading(files, one_at_a_time=moved)
