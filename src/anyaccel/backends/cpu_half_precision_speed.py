"""A benchmark of half-precision speed on this CPU.

It takes a fraction of a second, and the result is cached on disk.
"""

from __future__ import annotations

import functools
import platform
import time

from anyaccel.storage.cache_dir import read_fact, store_fact

__all__ = ["SLOWDOWN_LIMIT", "measure_half_precision"]

# Users are warned about a half-precision dtype that takes more than this many times as long as float32.
SLOWDOWN_LIMIT = 4

_SIZE = 256
_ROUNDS = 3
# A dtype that takes longer than this for one round is far too slow, and is not measured again.
_TIMEOUT_S = 0.25


@functools.cache
def measure_half_precision() -> dict[str, float]:
    """Return the run time of each half-precision dtype on this CPU, relative to float32.

    For example, `{"bfloat16": 0.6, "float16": 350.0}` means that float16 takes 350 times as long.
    """
    import torch

    # Whether a CPU has fast half precision depends on its features and on torch's kernels.
    key = f"{platform.machine()} {platform.processor()} torch {torch.__version__} threads {torch.get_num_threads()}"
    cached = read_fact("half_precision.json", key)
    if isinstance(cached, dict):
        return {str(name): float(share) for name, share in cached.items()}
    full = _time("float32")
    shares = {name: round(_time(name) / full, 3) for name in ("bfloat16", "float16")}
    store_fact("half_precision.json", key, shares)
    return shares


def _time(dtype: str) -> float:
    """Return the shortest measured time in seconds for a matrix product and a convolution.

    These are the main operations of a denoiser.
    """
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtype)
    left = torch.ones(_SIZE, _SIZE, dtype=torch_dtype)
    image, kernel = torch.ones(1, 32, 32, 32, dtype=torch_dtype), torch.ones(32, 32, 3, 3, dtype=torch_dtype)
    best = float("inf")
    with torch.no_grad():
        for _ in range(_ROUNDS + 1):  # one more for the warm-up, which is slower and drops out of the minimum
            start = time.perf_counter()
            left @ left
            torch.nn.functional.conv2d(image, kernel)
            best = min(best, time.perf_counter() - start)
            if best > _TIMEOUT_S:
                break
    return best
