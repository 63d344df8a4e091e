"""Whether half precision pays on this host: measured once, in a fraction of a second, and kept."""

from __future__ import annotations

import functools
import platform
import time

from anyaccel.storage.cache_dir import keep_fact, read_fact

__all__ = ["measure_half_precision"]

_SIZE = 256
_ROUNDS = 3
_PATIENCE_S = 0.25
"""A type that needs longer than this for one round has lost already."""


@functools.cache
def measure_half_precision() -> dict[str, float]:
    """The time of each half precision on the host as a share of float32's: `{"bfloat16": 0.6, "float16": 350.0}`.

    A matrix product and a convolution, which is what a denoiser spends its time on.
    """
    import torch

    key = f"{platform.machine()} {platform.processor()} torch {torch.__version__} threads {torch.get_num_threads()}"
    kept = read_fact("half_precision.json", key)
    if isinstance(kept, dict):
        return {str(name): float(share) for name, share in kept.items()}
    full = _time("float32")
    shares = {name: round(_time(name) / full, 3) for name in ("bfloat16", "float16")}
    keep_fact("half_precision.json", key, shares)
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
