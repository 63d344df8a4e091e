"""Progress, cancellation and previews for a running pipeline call.

Every denoising pipeline calls its scheduler's `step`, but not every pipeline supports callbacks. A lightweight copy of
a pipeline has its own scheduler, so an override of that scheduler's `step` observes exactly one call.
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

__all__ = ["StepObserver", "decode_estimate", "estimate_clean", "observing_steps"]

_FLOW = "flow_prediction"


@dataclass
class StepObserver:
    """Callbacks for the denoising steps of one image."""

    on_step: Callable[[int, int], None]
    on_preview: Callable[[Image.Image], None] | None = None
    preview_fractions: tuple[float, ...] = ()
    """Fractions of the steps after which a preview is sent, in ascending order."""
    is_stopped: Callable[[], bool] = lambda: False
    steps_done: int = 0
    previews_sent: int = 0

    def restart(self) -> None:
        """Reset the step count to 0; previews that were already sent are not sent again."""
        self.steps_done = 0

    def is_preview_due(self, total: int) -> bool:
        """Return whether a preview is due after the next step, given `total` steps."""
        has_previews = self.on_preview is not None and self.previews_sent < len(self.preview_fractions)
        return has_previews and (self.steps_done + 1) / total >= self.preview_fractions[self.previews_sent]


@contextmanager
def observing_steps(pipe: Any, observer: StepObserver, size: tuple[int, int]) -> Iterator[None]:
    """Report each scheduler step of a pipeline to an observer inside the `with` block.

    The pipeline's scheduler must not be used by another call at the same time. `size` is the width and
    height of the image.
    """
    components = find_components(pipe).values()
    schedulers = [component for component in components if hasattr(component, "step") and hasattr(component, "config")]
    with ExitStack() as stack:
        for scheduler in schedulers:
            stack.enter_context(override_method(scheduler, "step", _ObservedStep(pipe, observer, size)))
        yield


class _ObservedStep:
    """Override of a scheduler's `step` that notifies an observer and raises if the call was cancelled."""

    def __init__(self, pipe: Any, observer: StepObserver, size: tuple[int, int]) -> None:
        self.pipe, self.observer, self.size = pipe, observer, size

    def __call__(self, scheduler: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        observer = self.observer
        if observer.is_stopped():
            raise StoppedError
        total = max(1, len(getattr(scheduler, "timesteps", ())))
        preview_due = observer.is_preview_due(total)
        # Before the step, which advances the scheduler's step index: the estimate needs the current sigma.
        clean = _estimate_from_step(scheduler, args, kwargs) if preview_due else None
        result = run(*args, **kwargs)
        observer.steps_done += 1
        observer.on_step(min(observer.steps_done, total), total)
        if preview_due:
            observer.previews_sent += 1
            image = None if clean is None else decode_estimate(self.pipe, clean, self.size)
            if image is not None and observer.on_preview is not None:
                observer.on_preview(image)
        return result


def _estimate_from_step(scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    names = ("model_output", "timestep", "sample")
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    if not all(name in values for name in names):
        return None
    try:
        return estimate_clean(scheduler, values["model_output"], values["timestep"], values["sample"])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # an unsupported scheduler: the image is generated without previews


def estimate_clean(scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor) -> torch.Tensor | None:
    """Estimate the clean latents from a model output; return None for an unsupported prediction type."""
    prediction = str(getattr(scheduler.config, "prediction_type", _FLOW))
    if prediction == "sample":
        return output
    sample, output = sample.float(), output.float()
    if output.shape[1] == 2 * sample.shape[1]:  # the second half is the predicted variance
        output = output[:, : sample.shape[1]]
    if "FlowMatch" in type(scheduler).__name__ or prediction == _FLOW:
        return sample - _sigma_at(scheduler, timestep) * output
    if getattr(scheduler, "sigmas", None) is not None:
        sigma = _sigma_at(scheduler, timestep)
        scales = read_alpha_sigma(scheduler, sigma)
        if scales is not None:
            return _solve(prediction, sample, output, *scales)
        # Euler and similar schedulers hold unscaled samples; `scale_model_input` divides by sqrt(sigma^2 + 1).
        norm = (sigma**2 + 1) ** 0.5
        return _solve(prediction, sample / norm, output, 1 / norm, sigma / norm)
    alpha_cumprod = float(scheduler.alphas_cumprod[int(timestep)])
    return _solve(prediction, sample, output, alpha_cumprod**0.5, (1 - alpha_cumprod) ** 0.5)


def _solve(
    prediction: str, sample: torch.Tensor, output: torch.Tensor, alpha: float, sigma: float
) -> torch.Tensor | None:
    """Solve sample = alpha * clean + sigma * noise for the clean latents.

    Returns None for an unsupported prediction type.
    """
    if prediction == "epsilon":
        return (sample - sigma * output) / max(alpha, 1e-3)
    return alpha * sample - sigma * output if prediction == "v_prediction" else None


def _sigma_at(scheduler: Any, timestep: Any) -> float:
    index = scheduler.step_index
    if index is None:  # the scheduler sets it in its first step
        timesteps = [float(value) for value in scheduler.timesteps]
        index = min(range(len(timesteps)), key=lambda position: abs(timesteps[position] - float(timestep)))
    return float(scheduler.sigmas[index])


def decode_estimate(pipe: Any, clean: torch.Tensor, size: tuple[int, int]) -> Image.Image | None:
    """Decode estimated latents to a preview image; return None if their layout is not supported."""
    try:
        with torch.no_grad():
            return _decode(pipe, clean, size)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _decode(pipe: Any, clean: torch.Tensor, size: tuple[int, int]) -> Image.Image | None:
    vae = getattr(pipe, "vae", None)
    if vae is None:  # a pixel-space pipeline
        return _to_image(clean) if clean.dim() == 4 and clean.shape[1] in (1, 3) else None
    width, height = size
    if clean.dim() == 3:  # packed latents, as in Flux
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
