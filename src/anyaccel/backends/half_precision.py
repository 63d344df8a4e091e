"""Whether half precision pays on this host: measured once, in a fraction of a second, and kept."""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "find_cache_folder", "measure_half_precision"]

CACHE_VARIABLE = "ANYACCEL_CACHE"
_SIZE = 256
_ROUNDS = 3
_PATIENCE_S = 0.25
"""A type that needs longer than this for one round has lost already."""


def find_cache_folder() -> Path:
    """The folder for what is kept between runs: `ANYACCEL_CACHE`, or one in the user's own cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anyaccel"


@functools.cache
def measure_half_precision() -> dict[str, float]:
    """The time of each half precision on the host as a share of float32's: `{"bfloat16": 0.6, "float16": 350.0}`.

    A matrix product and a convolution, which is what a denoiser spends its time on.
    """
    import torch

    key = f"{platform.machine()} {platform.processor()} torch {torch.__version__} threads {torch.get_num_threads()}"
    path = find_cache_folder() / "half_precision.json"
    kept = _read(path)
    if isinstance(kept.get(key), dict):
        return {str(name): float(share) for name, share in kept[key].items()}
    full = _time("float32")
    shares = {name: round(_time(name) / full, 3) for name in ("bfloat16", "float16")}
    _keep(path, {**kept, key: shares})
    return shares


def _time(dtype: str) -> float:
    """Seconds for one round, the best of a few."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    left = torch.ones(_SIZE, _SIZE, dtype=kind)
    image, kernel = torch.ones(1, 32, 32, 32, dtype=kind), torch.ones(32, 32, 3, 3, dtype=kind)
    best = float("inf")
    with torch.no_grad():
        for _ in range(_ROUNDS + 1):  # the first one is warm-up, and counts only if it is the only one
            start = time.perf_counter()
            left @ left
            torch.nn.functional.conv2d(image, kernel)
            best = min(best, time.perf_counter() - start)
            if best > _PATIENCE_S:
                break
    return best


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _keep(path: Path, content: dict[str, dict[str, float]]) -> None:
    """Write whole or not at all; a folder that cannot be written costs the measurement at the next start."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(path)
    except OSError:
        return
