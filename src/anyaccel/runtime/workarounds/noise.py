"""Noise: drawn on the host, so that it does not depend on the device.

What comes from a seed, or from the generator of the host where stock diffusers would use the device's, is drawn in
float32 and cast. A generator that the caller gives draws in the dtype that the pipeline names, as in stock diffusers:
torch before 2.13 draws other numbers in half precision than it rounds float32 to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.backends.torch_device import is_host, is_on
from anyaccel.runtime.workarounds.host_transfer import CopyFunction

__all__ = ["BatchSliceNoise", "NoiseSource", "PerImageNoise", "make_generators", "make_handlers", "use_noise_source"]

Tensor = torch.Tensor
Draw = Callable[[tuple[int, ...], torch.Generator | None], Tensor]
_IN_PLACE = (
    Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_, Tensor.bernoulli_, Tensor.cauchy_,
    Tensor.log_normal_, Tensor.geometric_,
)  # fmt: skip
_FROM_VALUES = (torch.multinomial, Tensor.multinomial, torch.bernoulli, Tensor.bernoulli, torch.normal, torch.poisson)
_BY_SHAPE = (torch.randn, torch.rand)
_LIKE = {torch.randn_like: torch.randn, torch.rand_like: torch.rand}
_NARROW = (torch.float16, torch.bfloat16)


class NoiseSource:
    """Where a draw that names no generator comes from: torch's own of the host, as `torch.manual_seed` left it."""

    def draw(self, draw: Draw, shape: tuple[int, ...], given: torch.Generator | None) -> Tensor:
        """Draw a shape, from the generator that the pipeline named if it did."""
        return draw(shape, given)

    def owns(self, generator: torch.Generator) -> bool:
        """Return whether a generator was made here from a seed, and not given by the caller."""
        return False


class PerImageNoise(NoiseSource):
    """One generator an image: what has a row an image is drawn row by row."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)

    def owns(self, generator: torch.Generator) -> bool:
        """Return whether a generator is that of an image."""
        return any(generator is own for own in self.generators)

    def draw(self, draw: Draw, shape: tuple[int, ...], given: torch.Generator | None) -> Tensor:
        """Draw from the named generator, else each image's row from its own."""
        count = len(self.generators)
        if given is not None or count == 1 or not shape or shape[0] % count:
            return draw(shape, given or self.generators[0])
        rows = shape[0] // count
        return torch.cat([draw((rows, *shape[1:]), generator) for generator in self.generators])


class BatchSliceNoise(NoiseSource):
    """One generator for a whole batch, of which this call makes some images: all is drawn, their rows are kept."""

    def __init__(self, generator: torch.Generator, batch: int, first: int, images: int = 1) -> None:
        self.generator, self.batch, self.first, self.images = generator, batch, first, images

    def draw(self, draw: Draw, shape: tuple[int, ...], given: torch.Generator | None) -> Tensor:
        """The rows that these images would have had in the whole batch."""
        if not shape or shape[0] % self.images:
            return draw(shape, given or self.generator)
        rows = shape[0] // self.images
        whole = draw((rows * self.batch, *shape[1:]), given or self.generator)
        return whole[self.first * rows : (self.first + self.images) * rows].clone()


_NOW = threading.local()
_TORCHS_OWN = NoiseSource()


@contextmanager
def use_noise_source(source: NoiseSource) -> Iterator[None]:
    """Draw from a source while the block runs."""
    before = getattr(_NOW, "source", None)
    _NOW.source = source
    try:
        yield
    finally:
        _NOW.source = before


def _current_source() -> NoiseSource:
    return getattr(_NOW, "source", None) or _TORCHS_OWN


def make_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """A generator of the host for each image."""
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]


def make_handlers(
    device: torch.device, replacements: dict[torch.dtype, torch.dtype], send: CopyFunction = Tensor.to
) -> dict[Any, Any]:
    """Handlers for every function of torch's that draws; `send` takes what was drawn to where it is wanted."""
    drawing = _Drawing(device, replacements, send)
    handlers: dict[Any, Any] = dict.fromkeys(_BY_SHAPE, drawing.by_shape)
    handlers |= dict.fromkeys(_LIKE, drawing.like)
    handlers |= dict.fromkeys(_IN_PLACE, drawing.in_place)
    handlers |= dict.fromkeys(_FROM_VALUES, drawing.from_values)
    handlers |= {torch.randint: drawing.whole, torch.randperm: drawing.whole, torch.randint_like: drawing.like_whole}
    return handlers


class _Drawing:
    def __init__(self, device: torch.device, replacements: dict[torch.dtype, torch.dtype], send: CopyFunction) -> None:
        self.device, self.replacements, self.send = device, replacements, send

    def _is_drawn_there(self, generator: Any, place: torch.device) -> bool:
        """Whether the caller's own generator lives where the numbers are wanted, and so draws them itself."""
        return generator is not None and not is_host(generator.device) and is_on(generator.device, place.type)

    def _finish(self, drawn: Tensor, dtype: torch.dtype, place: torch.device, kwargs: dict[str, Any]) -> Tensor:
        dtype = self.replacements.get(dtype, dtype) if place.type == self.device.type else dtype
        finished = drawn.to(dtype)
        finished = finished if is_host(place) else self.send(finished, place)
        return finished.requires_grad_() if kwargs.get("requires_grad") else finished

    def by_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.randn(shape, …)` and `torch.rand(shape, …)`."""
        place = torch.device(kwargs.get("device") or torch.get_default_device())
        given = kwargs.get("generator")
        if "out" in kwargs or self._is_drawn_there(given, place):
            return func(*args, **kwargs)
        sizes = kwargs.get("size", args[0] if args and isinstance(args[0], Sequence) else args)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        drawn = _current_source().draw(_draw_by(func, _choose_dtype(dtype, given)), tuple(sizes), given)
        return self._finish(drawn, dtype, place, kwargs)

    def like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.randn_like(tensor)`."""
        model = args[0] if args else kwargs["input"]
        place, given = torch.device(kwargs.get("device") or model.device), kwargs.get("generator")
        if self._is_drawn_there(given, place):
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or model.dtype
        drawn = _current_source().draw(_draw_by(_LIKE[func], _choose_dtype(dtype, given)), tuple(model.shape), given)
        return self._finish(drawn, dtype, place, kwargs)

    def whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.randint` and `torch.randperm`: drawn by the first image's generator."""
        place = torch.device(kwargs.get("device") or torch.get_default_device())
        given = kwargs.get("generator")
        if self._is_drawn_there(given, place):
            return func(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "generator")}

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = func(*args, generator=generator, device="cpu", **rest)
            return drawn

        drawn = _current_source().draw(draw, (), given)
        return self._finish(drawn, drawn.dtype, place, kwargs)

    def like_whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.randint_like(tensor, …)`."""
        place = torch.device(kwargs.get("device") or args[0].device)
        host = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
        drawn = func(host, *args[1:], **{name: value for name, value in kwargs.items() if name != "device"})
        return self._finish(drawn, drawn.dtype, place, kwargs)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`tensor.normal_()` and its like: drawn on the host and copied."""
        target, given = args[0], kwargs.get("generator")
        if self._is_drawn_there(given, target.device):
            return func(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "generator"}
        kind = _choose_dtype(target.dtype, given)

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = func(torch.empty(shape, dtype=kind, device="cpu"), *args[1:], generator=generator, **rest)
            return drawn

        return target.copy_(_current_source().draw(draw, tuple(target.shape), given))

    def from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`torch.multinomial(chances, …)` and its like: the chances are read on the host."""
        given = kwargs.get("generator")
        place = next((value.device for value in args if isinstance(value, Tensor)), self.device)
        if self._is_drawn_there(given, place):
            return func(*args, **kwargs)
        host = [value.cpu() if isinstance(value, Tensor) else value for value in args]
        rest = {name: value for name, value in kwargs.items() if name not in ("generator", "device")}
        if not any(isinstance(value, Tensor) for value in args):  # nothing to be like: `torch.normal(0.0, 1.0, size)`
            place = torch.device(kwargs.get("device") or torch.get_default_device())
            rest["device"] = torch.device("cpu")

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = func(*host, generator=generator, **rest)
            return drawn

        return _current_source().draw(draw, (), given).to(kwargs.get("device") or place)


def _choose_dtype(dtype: torch.dtype, given: torch.Generator | None) -> torch.dtype:
    """Return the dtype to draw in, for one that a pipeline names."""
    is_callers = given is not None and not _current_source().owns(given)
    return torch.float32 if dtype in _NARROW and not is_callers else dtype


def _draw_by(func: Any, dtype: torch.dtype) -> Draw:
    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        drawn: Tensor = func(shape, generator=generator, dtype=dtype, device="cpu")
        return drawn

    return draw
