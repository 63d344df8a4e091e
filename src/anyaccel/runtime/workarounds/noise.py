"""Noise that is drawn on the CPU, so it is the same on every device.

Noise from a seed, or without a generator, is drawn in float32 and cast. A generator passed by the caller
draws in the dtype that the pipeline requests, as in diffusers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from anyaccel.backends.device_type_checks import is_host, is_on
from anyaccel.runtime.workarounds.dtypes import replace_dtype
from anyaccel.runtime.workarounds.host_transfer import CopyFunction
from anyaccel.runtime.workarounds.out_argument import write_out
from anyaccel.upstream.torch_internals import tree_map
from anyaccel.upstream.torch_random import (
    BY_SHAPE,
    FROM_VALUES,
    IN_PLACE,
    INITIALIZERS,
    INTEGERS,
    LIKE,
    WITHOUT_GENERATOR,
)

__all__ = [
    "NoiseSource",
    "NotPerImageError",
    "PerImageNoise",
    "make_generators",
    "make_handlers",
    "use_noise_source",
]

# Why not on the device: Neuron has no generator (https://github.com/huggingface/diffusers/pull/13289), `torch.randn` is
# "broken on HPU" (https://github.com/huggingface/optimum-habana, scheduling_euler_ancestral_discrete.py), and every
# device draws other values than the CPU for the same seed.
# Why float32: torch before 2.13 draws other values in half precision than in float32
# (https://github.com/huggingface/diffusers/issues/11056), and the tails of bfloat16 draws are cut off
# (https://github.com/pytorch/pytorch/issues/166853).

Tensor = torch.Tensor
# Draws a tensor of a shape from a generator.
Draw = Callable[[tuple[int, ...], torch.Generator | None], Tensor]
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_INDEX_FUNCTIONS = (torch.multinomial, Tensor.multinomial)
# Arguments that do not change the values drawn on the CPU in a given dtype.
_PLACEMENT_OPTIONS = ("generator", "device", "dtype", "out", "requires_grad", "pin_memory")


class NotPerImageError(Exception):
    """A draw for several images with seeds that cannot be attributed to one of the images."""


class NoiseSource:
    """A noise source that draws from the pipeline's generator, or from torch's default CPU generator."""

    def draw(self, function: str, draw: Draw, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Call `draw` with the shape and the generator, and return the resulting tensor."""
        return draw(shape, generator)

    def owns(self, generator: torch.Generator) -> bool:
        """Return whether this source created the generator from a seed, rather than the caller passing it."""
        return False

    def check_finished(self) -> None:
        """Raise if the finished call did not draw all the noise that it should draw."""


class PerImageNoise(NoiseSource):
    """A noise source that draws each image's noise from that image's own generator."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)
        self.drawn: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in generators]

    def owns(self, generator: torch.Generator) -> bool:
        """Return whether a generator belongs to one of the images."""
        return any(generator is own for own in self.generators)

    def draw(self, function: str, draw: Draw, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Draw from the image's generator.

        Raise `NotPerImageError` for a draw without a generator in a call for several images.
        """
        if generator is None:
            if len(self.generators) > 1:
                raise NotPerImageError(f"{function} of shape {shape} has no generator")
            generator = self.generators[0]
        for own, drawn in zip(self.generators, self.drawn, strict=True):
            if own is generator:
                drawn.append((function, shape))
        return draw(shape, generator)

    def check_finished(self) -> None:
        """Raise `NotPerImageError` if one image drew other noise than the others, for example for all of them."""
        if any(drawn != self.drawn[0] for drawn in self.drawn):
            raise NotPerImageError("one image's generator drew for the other images")


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
    handlers: dict[Any, Any] = dict.fromkeys((*BY_SHAPE, *INTEGERS), drawing.create)
    handlers |= dict.fromkeys(LIKE, drawing.like)
    handlers |= dict.fromkeys(IN_PLACE, drawing.in_place)
    handlers |= dict.fromkeys(INITIALIZERS, drawing.initialize)
    handlers |= dict.fromkeys(FROM_VALUES, drawing.from_values)
    handlers |= dict.fromkeys(WITHOUT_GENERATOR, drawing.without_generator)
    return handlers


class _CpuDrawing:
    """Handlers that draw on the CPU and copy the result to the requested device."""

    def __init__(self, device: torch.device, replacements: dict[torch.dtype, torch.dtype], copy: CopyFunction) -> None:
        self.device, self.replacements, self.copy = device, replacements, copy

    def _choose_device(self, generator: Any, target: torch.device) -> torch.device:
        """Return the device to draw on: the CPU, or the target device if the caller passed a generator of it."""
        on_target = generator is not None and not is_host(generator.device) and is_on(generator.device, target.type)
        return target if on_target else torch.device("cpu")

    def _finish(self, drawn: Tensor, dtype: torch.dtype, target: torch.device, kwargs: dict[str, Any]) -> Tensor:
        if kwargs.get("out") is not None:
            return write_out(drawn, kwargs["out"])
        result = drawn.to(dtype)
        if target.type == self.device.type:
            result = replace_dtype(result, self.replacements)
        result = result if is_host(target) or not is_host(result.device) else self.copy(result, target)
        return result.requires_grad_() if kwargs.get("requires_grad") else result

    def create(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.randn`, `torch.rand`, `torch.randint` or `torch.randperm` on the CPU and copy the result."""
        generator, out = kwargs.get("generator"), kwargs.get("out")
        if out is None:
            target = torch.device(kwargs.get("device") or torch.get_default_device())
            dtype = kwargs.get("dtype") or (torch.int64 if func in INTEGERS else torch.get_default_dtype())
        else:
            target, dtype = out.device, out.dtype
        device = self._choose_device(generator, target)
        draw_dtype = dtype if func in INTEGERS else _choose_draw_dtype(dtype, generator)
        options = {name: value for name, value in kwargs.items() if name not in _PLACEMENT_OPTIONS}

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            layout = {"dtype": draw_dtype, "device": device}
            place = layout if out is None else {"out": _make_same_strides(out, **layout)}
            drawn: Tensor = func(*args, generator=generator, **options, **place)
            return drawn

        drawn = _current_source().draw(func.__name__, draw, _find_size(func, args, kwargs), generator)
        return self._finish(drawn, dtype, target, kwargs)

    def like(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.randn_like`, `torch.rand_like` or `torch.randint_like` on the CPU and copy the result."""
        template, *bounds = args if args else (kwargs["input"],)
        bounds += [kwargs[name] for name in ("low", "high") if name in kwargs]
        target, generator = torch.device(kwargs.get("device") or template.device), kwargs.get("generator")
        dtype = kwargs.get("dtype") or template.dtype
        fill: Any = LIKE[func]
        options: dict[str, Any] = {"device": self._choose_device(generator, target)}
        if kwargs.get("memory_format") is not None:
            options["memory_format"] = kwargs["memory_format"]
        layout = _make_same_strides(template, dtype=_choose_fill_dtype(fill, dtype, generator), device="meta")

        # `randn_like` accepts a generator only in recent versions of torch.
        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = fill(torch.empty_like(layout, **options), *bounds, generator=generator)
            return drawn

        drawn = _current_source().draw(func.__name__, draw, tuple(template.shape), generator)
        return self._finish(drawn, dtype, target, kwargs)

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `tensor.normal_()` and similar methods: draw on the CPU and copy the values into the tensor."""
        target, generator = args[0], kwargs.get("generator")
        device = self._choose_device(generator, target.device)
        dtype = _choose_fill_dtype(func, target.dtype, generator)
        parameters = [_move(value, device) for value in args[1:]]
        options = {name: _move(value, device) for name, value in kwargs.items() if name != "generator"}

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            template = _make_same_strides(target, dtype=dtype, device=device)
            drawn: Tensor = func(template, *parameters, generator=generator, **options)
            return drawn

        return target.copy_(_current_source().draw(func.__name__, draw, tuple(target.shape), generator))

    def initialize(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.nn.init.normal_(tensor)` and similar functions, which pass all arguments by name."""
        options = dict(kwargs)
        target = args[0] if args else options.pop("tensor")
        if target.is_meta:  # peft creates layers without memory before it loads their weights
            return target
        with torch.no_grad():
            return self.in_place(func, (target, *args[1:]), options)

    def from_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.multinomial(weights, …)` and similar functions on CPU copies of their tensors."""
        values = [value for value in args if not isinstance(value, torch.Generator)]
        generator = kwargs.get("generator") or next(
            (value for value in args if isinstance(value, torch.Generator)), None
        )
        options = {name: value for name, value in kwargs.items() if name not in _PLACEMENT_OPTIONS}
        tensors = [value for value in (*values, *options.values()) if isinstance(value, Tensor)]
        out, dtype = kwargs.get("out"), kwargs.get("dtype") or torch.get_default_dtype()
        devices = [tensor.device for tensor in (tensors if out is None else [out])]
        if not devices:  # `torch.normal(0.0, 1.0, size)`
            devices = [torch.device(kwargs.get("device") or torch.get_default_device())]
        target = next((device for device in devices if not is_host(device)), devices[0])
        device = self._choose_device(generator, target)
        values = [_move(value, device) for value in values]
        options = {name: _move(value, device) for name, value in options.items()}
        shape = _find_shape(func, values, options)
        if out is not None:
            # An int32 tensor can replace an int64 tensor of the user.
            out_dtype = torch.int64 if func in _INDEX_FUNCTIONS else out.dtype
            options["out"] = _make_same_strides(out, dtype=out_dtype, device=device)
        elif not tensors:
            options |= {"device": device, "dtype": _choose_draw_dtype(dtype, generator)}

        def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            drawn: Tensor = func(*values, generator=generator, **options)
            return drawn

        drawn = _current_source().draw(func.__name__, draw, shape, generator)
        return self._finish(drawn, drawn.dtype if tensors else dtype, target, kwargs)

    def without_generator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `torch.nn.functional.dropout` and similar functions on CPU copies of their tensors."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        target = next((tensor.device for tensor in tensors if is_on(tensor.device, self.device.type)), None)
        if target is None or is_host(target) or not _is_training(args, kwargs):
            return func(*args, **kwargs)
        cpu = torch.device("cpu")
        result = func(*(_move(value, cpu) for value in args), **{name: _move(kwargs[name], cpu) for name in kwargs})
        if kwargs.get("inplace") or func.__name__.endswith("_"):
            return args[0].copy_(result)
        return tree_map(
            lambda value: replace_dtype(value, self.replacements).to(target) if isinstance(value, Tensor) else value,
            result,
        )


def _is_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a dropout draws random numbers; true for all other functions."""
    flags = [value for value in args if isinstance(value, bool)]
    training = kwargs.get("training", kwargs.get("train", flags[0] if flags else True))
    return bool(training) and kwargs.get("p") != 0


def _move(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _make_same_strides(tensor: Tensor, **options: Any) -> Tensor:
    """Return an empty tensor with the strides of another tensor: torch's draws depend on them."""
    return torch.empty_strided(tensor.shape, tensor.stride(), **options)


def _find_size(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the result of `torch.randn` and similar functions."""
    if func is torch.randperm:
        return (args[0] if args else kwargs["n"],)
    if "size" in kwargs:
        return tuple(kwargs["size"])
    return tuple(args[-1] if args and isinstance(args[-1], Sequence) else args)


def _find_shape(func: Any, values: Sequence[Any], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the result of a function that draws from the values of tensors."""
    tensors = [tuple(value.shape) for value in (*values, *options.values()) if isinstance(value, Tensor)]
    if func in _INDEX_FUNCTIONS:
        return (*tensors[0][:-1], values[1] if len(values) > 1 else options["num_samples"])
    if tensors:
        return tuple(torch.broadcast_shapes(*tensors))
    return tuple(options["size"] if "size" in options else values[2])


def _choose_fill_dtype(fill: Any, dtype: torch.dtype, generator: torch.Generator | None) -> torch.dtype:
    """Return the dtype for drawing with an in-place method: the range of random integers depends on their dtype."""
    return dtype if fill is Tensor.random_ else _choose_draw_dtype(dtype, generator)


def _choose_draw_dtype(dtype: torch.dtype, generator: torch.Generator | None) -> torch.dtype:
    """Return the dtype for drawing: float32 for half precision, unless the caller passed a generator."""
    is_callers = generator is not None and not _current_source().owns(generator)
    return torch.float32 if dtype in _HALF_DTYPES and not is_callers else dtype
