"""Noise that is drawn on the CPU, so it is the same on every device.

Noise from a seed, or without a generator, is drawn in float32 and cast. A generator passed by the caller
draws in the dtype that the pipeline requests, as in diffusers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.runtime.workarounds.host_transfer import CopyFunction

__all__ = ["BatchSliceNoise", "NoiseSource", "PerImageNoise", "make_generators", "make_handlers", "use_noise_source"]

# Why not on the device: Neuron has no generator (https://github.com/huggingface/diffusers/pull/13289), `torch.randn` is
# "broken on HPU" (https://github.com/huggingface/optimum-habana, scheduling_euler_ancestral_discrete.py), and every
# device draws other values than the CPU for the same seed.
# Why float32: torch before 2.13 draws other values in half precision than in float32
# (https://github.com/huggingface/diffusers/issues/11056), and the tails of bfloat16 draws are cut off
# (https://github.com/pytorch/pytorch/issues/166853).

Tensor = torch.Tensor
# Draws a CPU tensor of a shape from a generator.
Draw = Callable[[tuple[int, ...], torch.Generator | None], Tensor]
_IN_PLACE = (
    Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_, Tensor.bernoulli_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.geometric_,
)  # fmt: skip
_FROM_VALUES = (torch.multinomial, Tensor.multinomial, torch.bernoulli, Tensor.bernoulli, torch.normal, torch.poisson)
_BY_SHAPE = (torch.randn, torch.rand)
_LIKE = {torch.randn_like: torch.randn, torch.rand_like: torch.rand}
_HALF_DTYPES = (torch.float16, torch.bfloat16)


class NoiseSource:
    """A noise source that draws from the pipeline's generator, or from torch's default CPU generator."""

    def draw(self, draw: Draw, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Call `draw` with the shape and the generator, and return the resulting tensor."""
        return draw(shape, generator)

    def owns(self, generator: torch.Generator) -> bool:
        """Return whether this source created the generator from a seed, rather than the caller passing it."""
        return False


class PerImageNoise(NoiseSource):
    """A noise source that draws each image's rows from that image's own generator."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)

    def owns(self, generator: torch.Generator) -> bool:
        """Return whether a generator belongs to one of the images."""
        return any(generator is own for own in self.generators)

    def draw(self, draw: Draw, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw from `generator` if it is set; otherwise draw each image's rows from its own generator."""
        count = len(self.generators)
        # A tensor that cannot be divided among the images is drawn by the first one's generator.
        if generator is not None or count == 1 or not shape or shape[0] % count:
            return draw(shape, generator or self.generators[0])
        rows = shape[0] // count
        return torch.cat([draw((rows, *shape[1:]), own) for own in self.generators])


class BatchSliceNoise(NoiseSource):
    """A noise source that draws for a whole batch and returns only the rows for the images in this call.

    A split batch receives the same noise as an unsplit one.
    """

    def __init__(self, generator: torch.Generator, batch: int, first: int, images: int = 1) -> None:
        self.generator, self.batch, self.first, self.images = generator, batch, first, images

    def draw(self, draw: Draw, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw noise for the whole batch and return the rows for this call's images."""
        if not shape or shape[0] % self.images:
            return draw(shape, generator or self.generator)
        rows = shape[0] // self.images
        batch = draw((rows * self.batch, *shape[1:]), generator or self.generator)
        return batch[self.first * rows : (self.first + self.images) * rows].clone()


_ACTIVE = threading.local()
_DEFAULT_SOURCE = NoiseSource()


@contextmanager
def use_noise_source(source: NoiseSource) -> Iterator[None]:
    """Draw this thread's noise from the given source inside the `with` block."""
    before = getattr(_ACTIVE, "source", None)
    _ACTIVE.source = source
    try:
        yield
    finally:
        _ACTIVE.source = before


def _current_source() -> NoiseSource:
    return getattr(_ACTIVE, "source", None) or _DEFAULT_SOURCE


def make_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one CPU generator per seed."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def make_handlers(
    device: torch.device, replacements: dict[torch.dtype, torch.dtype], copy: CopyFunction = Tensor.to
) -> dict[Any, Any]:
    """Return handlers that run torch's random functions on the CPU; `copy` moves results to the device."""
    drawing = _CpuDrawing(device, replacements, copy)
    handlers: dict[Any, Any] = dict.fromkeys(_BY_SHAPE, drawing.by_shape)
    handlers |= dict.fromkeys(_LIKE, drawing.like)
    handlers |= dict.fromkeys(_IN_PLACE, drawing.in_place)
    handlers |= dict.fromkeys(_FROM_VALUES, drawing.from_values)
    handlers |= {
        torch.randint: drawing.integers,
        torch.randperm: drawing.integers,
        torch.randint_like: drawing.integers_like,
    }
    return handlers


class _CpuDrawing:
    """Handlers that draw on the CPU and copy the result to the requested device."""

    def __init__(self, device: torch.device, replacements: dict[torch.dtype, torch.dtype], copy: CopyFunction) -> None:
        self.device, self.replacements, self.copy = device, replacements, copy

    def _is_device_generator(self, generator: Any, target: torch.device) -> bool:
        """Return whether the caller passed a generator on the target device; if so, torch draws there itself."""
        return generator is not None and not is_host(generator.device) and is_on(generator.device, target.type)

    def _finish(self, drawn: Tensor, dtype: torch.dtype, target: torch.device, kwargs: dict[str, Any]) -> Tensor:
        dtype = self.replacements.get(dtype, dtype) if target.type == self.device.type else dtype
        result = drawn.to(dtype)
        result = result if is_host(target) else self.copy(result, target)
        return result.requires_grad_() if kwargs.get("requires_grad") else result

    def by_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.randn(shape, …)` or `torch.rand(shape, …)` on the CPU and copy the result to the device."""
        target = torch.device(kwargs.get("device") or torch.get_default_device())
        generator = kwargs.get("generator")
        if "out" in kwargs or self._is_device_generator(generator, target):
            return func(*args, **kwargs)
        sizes = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        draw = _make_draw(func, _choose_draw_dtype(dtype, generator))
        drawn = _current_source().draw(draw, tuple(sizes), generator)
        return self._finish(drawn, dtype, target, kwargs)

    def like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.randn_like` or `torch.rand_like` on the CPU and copy the result to the device."""
        template = args[0] if args else kwargs["input"]
        target, generator = torch.device(kwargs.get("device") or template.device), kwargs.get("generator")
        if self._is_device_generator(generator, target):
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or template.dtype
        draw = _make_draw(_LIKE[func], _choose_draw_dtype(dtype, generator))
        drawn = _current_source().draw(draw, tuple(template.shape), generator)
        return self._finish(drawn, dtype, target, kwargs)

    def integers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.randint` or `torch.randperm` on the CPU and copy the result to the device."""
        target = torch.device(kwargs.get("device") or torch.get_default_device())
        generator = kwargs.get("generator")
        if self._is_device_generator(generator, target):
            return func(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in ("device", "generator")}

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = func(*args, generator=generator, device="cpu", **options)
            return drawn

        # An empty shape: integers are not divided among the images.
        drawn = _current_source().draw(draw, (), generator)
        return self._finish(drawn, drawn.dtype, target, kwargs)

    def integers_like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.randint_like` on the CPU and copy the result to the device."""
        target = torch.device(kwargs.get("device") or args[0].device)
        template = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
        drawn = func(template, *args[1:], **{name: value for name, value in kwargs.items() if name != "device"})
        return self._finish(drawn, drawn.dtype, target, kwargs)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.normal_()` and similar methods: draw on the CPU and copy the values into the tensor."""
        target, generator = args[0], kwargs.get("generator")
        if self._is_device_generator(generator, target.device):
            return func(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name != "generator"}
        dtype = _choose_draw_dtype(target.dtype, generator)

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            template = torch.empty(shape, dtype=dtype, device="cpu")
            drawn: Tensor = func(template, *args[1:], generator=generator, **options)
            return drawn

        return target.copy_(_current_source().draw(draw, tuple(target.shape), generator))

    def from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.multinomial(weights, …)` and similar functions on CPU copies of their tensors."""
        generator = kwargs.get("generator")
        target = next((value.device for value in args if isinstance(value, Tensor)), self.device)
        if self._is_device_generator(generator, target):
            return func(*args, **kwargs)
        cpu_args = [value.cpu() if isinstance(value, Tensor) else value for value in args]
        options = {name: value for name, value in kwargs.items() if name not in ("generator", "device")}
        if not any(isinstance(value, Tensor) for value in args):  # `torch.normal(0.0, 1.0, size)`
            target = torch.device(kwargs.get("device") or torch.get_default_device())
            options["device"] = torch.device("cpu")

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = func(*cpu_args, generator=generator, **options)
            return drawn

        return _current_source().draw(draw, (), generator).to(kwargs.get("device") or target)


def _choose_draw_dtype(dtype: torch.dtype, generator: torch.Generator | None) -> torch.dtype:
    """Return the dtype for drawing: float32 for half precision, unless the caller passed a generator."""
    is_callers = generator is not None and not _current_source().owns(generator)
    return torch.float32 if dtype in _HALF_DTYPES and not is_callers else dtype


def _make_draw(func: Any, dtype: torch.dtype) -> Draw:
    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        drawn: Tensor = func(shape, generator=generator, dtype=dtype, device="cpu")
        return drawn

    return draw
