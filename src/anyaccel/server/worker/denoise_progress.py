"""Looking on while a picture is made: how far it is, whether it is to stop, and what it looks like so far.

Every pipeline that denoises asks a scheduler for each step, and a light copy's scheduler is its own: what is put in the
place of its `step` sees them all, whether the pipeline has callbacks or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from anyaccel.progress import StoppedError
from anyaccel.runtime.introspection import find_components
from anyaccel.runtime.workarounds.method_override import override_method
from anyaccel.upstream.diffusers_internals import read_alpha_sigma, unpack_latents

__all__ = ["Watcher", "decode_estimate", "estimate_clean", "watching_steps"]

_FLOW = "flow_prediction"


@dataclass
class Watcher:
    """Is told of each step; `previews` are the shares of the way at which a picture is wanted."""

    on_step: Callable[[int, int], None]
    on_preview: Callable[[Image.Image], None] | None = None
    previews: tuple[float, ...] = ()
    is_stopped: Callable[[], bool] = lambda: False
    done: int = 0
    shown: int = 0

    def begin_again(self) -> None:
        """The picture is made anew; previews that were shown are not shown again."""
        self.done = 0

    def is_due(self, total: int) -> bool:
        """Whether a preview is wanted of the step that comes next."""
        wanted = self.on_preview is not None and self.shown < len(self.previews)
        return wanted and (self.done + 1) / total >= self.previews[self.shown]


@contextmanager
def watching_steps(pipe: Any, watcher: Watcher, size: tuple[int, int]) -> Iterator[None]:
    """While the block runs, the watcher is told of every step that a pipeline's scheduler takes.

    The pipeline is a light copy, whose scheduler nobody else uses.
    """
    schedulers = [part for part in find_components(pipe).values() if hasattr(part, "step") and hasattr(part, "config")]
    with ExitStack() as stack:
        for scheduler in schedulers:
            stack.enter_context(override_method(scheduler, "step", _WatchedStep(pipe, watcher, size)))
        yield


class _WatchedStep:
    """Wraps a scheduler's `step`: reports it to the watcher, and stops before it if the watcher is stopped."""

    def __init__(self, pipe: Any, watcher: Watcher, size: tuple[int, int]) -> None:
        self.pipe, self.watcher, self.size = pipe, watcher, size

    def __call__(self, scheduler: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watcher = self.watcher
        if watcher.is_stopped():
            raise StoppedError
        total = max(1, len(getattr(scheduler, "timesteps", ())))
        due = watcher.is_due(total)
        clean = _estimate_from(scheduler, args, kwargs) if due else None
        result = run(*args, **kwargs)
        watcher.done += 1
        watcher.on_step(min(watcher.done, total), total)
        if due:
            watcher.shown += 1
            picture = None if clean is None else decode_estimate(self.pipe, clean, self.size)
            if picture is not None and watcher.on_preview is not None:
                watcher.on_preview(picture)
        return result


def _estimate_from(scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    names = ("model_output", "timestep", "sample")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not all(name in given for name in names):
        return None
    try:
        return estimate_clean(scheduler, given["model_output"], given["timestep"], given["sample"])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # a scheduler of another kind: the picture is made without previews


def estimate_clean(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor) -> torch.Tensor | None:
    """What a model believes the end to be like, from what it said of one step; None where nobody knows how."""
    kind = str(getattr(scheduler.config, "prediction_type", _FLOW))
    if kind == "sample":
        return output
    sample, output = sample.float(), output.float()
    if output.shape[1] == 2 * sample.shape[1]:  # it tells its variance too
        output = output[:, : sample.shape[1]]
    if "FlowMatch" in type(scheduler).__name__ or kind == _FLOW:
        return sample - _sigma_of(scheduler, timestep) * output
    if getattr(scheduler, "sigmas", None) is not None:
        sigma = _sigma_of(scheduler, timestep)
        scales = read_alpha_sigma(scheduler, sigma)
        if scales is not None:
            return _solve(kind, sample, output, *scales)
        # The sample is scaled before it goes into the model.
        whole = (sigma**2 + 1) ** 0.5
        return _solve(kind, sample / whole, output, 1 / whole, sigma / whole)
    share = float(scheduler.alphas_cumprod[int(timestep)])
    return _solve(kind, sample, output, share**0.5, (1 - share) ** 0.5)


def _solve(kind: str, sample: torch.Tensor, output: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor | None:
    """The clean picture x in sample = alpha x + sigma noise."""
    if kind == "epsilon":
        return (sample - sigma * output) / max(alpha, 1e-3)
    return alpha * sample - sigma * output if kind == "v_prediction" else None


def _sigma_of(scheduler: Any, timestep: Any) -> float:
    index = scheduler.step_index
    if index is None:
        times = [float(time) for time in scheduler.timesteps]
        index = min(range(len(times)), key=lambda place: abs(times[place] - float(timestep)))
    return float(scheduler.sigmas[index])


def decode_estimate(pipe: Any, clean: torch.Tensor, size: tuple[int, int]) -> Image.Image | None:
    """A picture from an estimate, as the pipeline would decode it at its end; None where nobody knows how."""
    try:
        with torch.no_grad():
            return _decode(pipe, clean, size)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _decode(pipe: Any, clean: torch.Tensor, size: tuple[int, int]) -> Image.Image | None:
    vae = getattr(pipe, "vae", None)
    if vae is None:
        return _to_image(clean) if clean.dim() == 4 and clean.shape[1] in (1, 3) else None
    width, height = size
    if clean.dim() == 3:
        clean = unpack_latents(pipe, clean, height, width)
    if clean.dim() != 4:
        return None
    config = vae.config
    scaled = clean / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
    return _to_image(vae.decode(scaled.to(vae.dtype), return_dict=False)[0])


def _to_image(pixels: torch.Tensor) -> Image.Image:
    values = (pixels[0].float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).cpu()
    array = values.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
