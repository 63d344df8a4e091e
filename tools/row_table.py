"""Write `src/anyaccel/runtime/placement/row_table.json`: run `python tools/row_table.py --processes 2`.

All recipes run with several images in stock diffusers. The tool records how the size of each argument of a denoiser or
ControlNet depends on the number of rows. It then runs the same model calls with fewer rows at a time and compares
the outputs. The table contains the classes for which all of them were equal up to rounding, with the attention
processors that the models had, and the autoencoders that were equal with `enable_slicing`.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from anyaccel.tracing.meta_module import map_tensors

__all__ = ["classify", "main", "merge"]

TABLE = Path(__file__).parent.parent / "src" / "anyaccel" / "runtime" / "placement" / "row_table.json"
# Relative to the largest value: some tiny models with random weights divide by small numbers.
_TOLERANCE = 1e-3
_COUNTS = (2, 3, 4)
_PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt", "num_audios_per_prompt")
# Chunks of one and of two rows.
_LIMITS = (1, 2)
# Processors that users select with methods of diffusers, for models that otherwise have another one.
_OTHER_PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor")


def main() -> None:
    """Write the table, or with `--part` the observations for a part of the recipes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part is not None:
        options.out.write_text(json.dumps(_observe(options.part, options.processes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{part}.json" for part in range(options.processes)]
        command = [sys.executable, __file__, "--processes", str(options.processes)]
        running = [
            subprocess.Popen([*command, "--part", str(part), "--out", str(file)]) for part, file in enumerate(files)
        ]
        if any(process.wait() for process in running):
            raise SystemExit("a process failed")
        observed = [json.loads(file.read_text()) for file in files]
    TABLE.write_text(json.dumps(merge(observed), indent=1) + "\n")


class _Observations:
    """Sizes of arguments, and results of comparisons, by model class."""

    def __init__(self) -> None:
        self.shapes: dict[str, dict[str, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
        """Class, path, group: pairs of the number of rows and a shape. A group is a recipe and a way to call it."""
        self.joins_lists: dict[str, bool] = {}
        self.comparisons: list[dict[str, Any]] = []
        self.vaes: list[dict[str, Any]] = []
        self.group = ""

    def add(self, kind: str, path: str, rows: int, shape: Any) -> None:
        """Add the shape of an argument."""
        entries = self.shapes[kind][path].setdefault(self.group, [])
        if [rows, shape] not in entries:
            entries.append([rows, shape])


def _observe(part: int, parts: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from anyaccel.recipes import recipes

    observations = _Observations()
    for name in sorted(recipes())[part::parts]:
        _observe_recipe(name, observations)
    # Again, now that all arguments are classified: a shape can be that of rows by chance.
    for name in sorted({c["group"].partition(" ")[0] for c in observations.comparisons if c["difference"]}):
        observations.comparisons = [c for c in observations.comparisons if c["group"].partition(" ")[0] != name]
        _observe_recipe(name, observations)
    return vars(observations)


def _observe_recipe(name: str, observations: _Observations) -> None:
    from anyaccel.recipes import recipes

    pipe: Any = recipes()[name].make()
    # A second pipeline for the VAEs with slicing: weight norm prevents deep copies.
    recorders = _install_recorders(pipe, recipes()[name].make(), observations)
    for way, call in _make_calls(pipe, recipes()[name].call):
        observations.group = f"{name} {way}"
        for recorder in recorders:
            recorder.calls = 0
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                pipe(**call)
        except Exception as error:  # noqa: BLE001 - stock diffusers rejects some batches with any error
            print(f"{name} {way}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
    print(name, file=sys.stderr, flush=True)


def _find_models(pipe: Any) -> list[torch.nn.Module]:
    from anyaccel.runtime.introspection import read_facts

    models = [pipe.components[name] for name in read_facts(pipe).denoisers]
    return [part for model in models for part in (getattr(model, "nets", None) or [model])]


def _make_calls(pipe: Any, make: Callable[[], dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield calls for several images: more images per prompt, more prompts, more input images."""
    accepts, plain = inspect.signature(type(pipe).__call__).parameters, make()
    names = [name for name in (*_PER_PROMPT, "batch_size") if name in accepts]
    for count in _COUNTS:
        if names:
            yield names[0], {**make(), names[0]: count}
    prompt = plain.get("prompt")
    if not isinstance(prompt, str):
        repeated = [name for name in ("class_labels", "image", "image_embeds", "image_embeddings") if name in plain]
        for count in _COUNTS if repeated else ():
            call = make()
            yield "inputs", call | {name: _repeat(call[name], count) for name in repeated}
        return
    for count in _COUNTS:
        yield "prompts", {**make(), "prompt": [prompt] * count, **_repeat_negative(plain, count)}
    for count in _COUNTS:
        longer = [f"{prompt} with many other words"] + [prompt] * (count - 1)
        yield "lengths", {**make(), "prompt": longer, **_repeat_negative(plain, count)}


def _repeat_negative(call: dict[str, Any], count: int) -> dict[str, Any]:
    negative = call.get("negative_prompt")
    return {"negative_prompt": [negative] * count} if isinstance(negative, str) else {}


def _repeat(value: Any, count: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.repeat_interleave(count, dim=0)
    return (value if isinstance(value, list) else [value]) * count


def _install_recorders(pipe: Any, other: Any, observations: _Observations) -> list[_Recorder]:
    from anyaccel.forward_overrides import Slot, set_override

    recorders = [_Recorder(observations, model) for model in _find_models(pipe)]
    for recorder in recorders:
        set_override(recorder.model, Slot.RECORDING, recorder)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module) and hasattr(component, "use_slicing"):
            sliced: Any = other.components[name]
            sliced.enable_slicing()
            for method in ("encode", "decode"):
                vars(component)[method] = _compare_slicing(component, sliced, method, observations)
    return recorders


def _compare_slicing(vae: Any, sliced: Any, method: str, observations: _Observations) -> Callable[..., Any]:
    """Return a method of an autoencoder that also runs a copy with slicing, and compares the results."""
    original, other = getattr(vae, method), getattr(sliced, method)

    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        result = original(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and len(args[0]) > 1:
            draws = not torch.equal(before, torch.get_rng_state())
            try:
                with torch.random.fork_rng(devices=[]):
                    difference = (
                        "it draws random numbers" if draws else _find_difference(result, other(*args, **kwargs))
                    )
            except Exception as error:  # noqa: BLE001 - any error means that slicing does not work
                difference = repr(error)[:200]
            observations.vaes.append(
                {
                    "class": type(vae).__name__, "method": method, "group": observations.group,
                    "difference": difference, "processors": _list_processors(vae),
                }
            )  # fmt: skip
        return result

    return run


class _Recorder:
    """Override of a model's forward that records and compares its first calls."""

    def __init__(self, observations: _Observations, model: torch.nn.Module) -> None:
        self.observations, self.model, self.calls = observations, model, 0
        self.kind = type(model).__name__

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model and, in its first two calls, compare the output with that of fewer rows."""
        self.calls += 1
        if self.calls > 2:
            return forward(*args, **kwargs)
        named = self._name_arguments(args, kwargs)
        rows = _count(next(iter(named.values())))
        before = torch.get_rng_state()
        # Some models remove items from the lists that they are called with.
        copied_args, copied_kwargs = map_tensors((args, kwargs), lambda tensor: tensor)
        output = forward(*copied_args, **copied_kwargs)
        for name, value in named.items():  # after the call, which fails for sizes that stock diffusers does not support
            self._add(name, value, rows)
        if rows > 1:
            draws = not torch.equal(before, torch.get_rng_state())
            self._compare(forward, args, kwargs, output, "it draws random numbers" if draws else "")
        return output

    def _name_arguments(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments by name, in the order of the signature."""
        names = list(inspect.signature(type(self.model).forward).parameters)[1:]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: named[name] for name in sorted(named, key=names.index)}

    def _add(self, path: str, value: Any, rows: int) -> None:
        if isinstance(value, torch.Tensor):
            self.observations.add(self.kind, path, rows, list(value.shape))
        elif isinstance(value, dict):
            for name, item in value.items():
                self._add(f"{path}.{name}", item, rows)
        elif isinstance(value, list | tuple):
            self.observations.add(self.kind, path, rows, len(value))
            for item in value:
                self._add(f"{path}[]", item, rows)

    def _compare(self, forward: Any, args: Any, kwargs: Any, output: Any, difference: str) -> None:
        from anyaccel.runtime.placement.row_arguments import NotSplittableError, RowRules, join_outputs, split_arguments

        kinds = classify(self.observations.shapes[self.kind])
        processors = _list_processors(self.model)
        named = self._name_arguments(args, kwargs)
        arguments = [name for name, value in named.items() if value is not None]
        for limit in _LIMITS:
            rules = RowRules({path: tuple(found) for path, found in kinds.items()}, joins_lists=False)
            try:
                chunks = split_arguments(self.model, rules, args, kwargs, limit)
            except NotSplittableError:
                return  # not classified yet
            try:
                outputs = [forward(*chunk_args, **chunk_kwargs) for chunk_args, chunk_kwargs in chunks]
                differences = {
                    lists: _find_difference(output, join_outputs(outputs, joins_lists=lists)) for lists in (False, True)
                }
                lists = bool(differences[False]) and not differences[True]
                self.observations.joins_lists[self.kind] = lists or self.observations.joins_lists.get(self.kind, False)
                found = difference or differences[lists]
            except Exception as error:  # noqa: BLE001 - the model cannot run fewer rows
                found = repr(error)[:200]
            self.observations.comparisons.append(
                {
                    "class": self.kind, "group": self.observations.group, "limit": limit, "processors": processors,
                    "arguments": arguments, "difference": found,
                }
            )  # fmt: skip


def _list_processors(model: torch.nn.Module) -> list[str]:
    processors = (getattr(layer, "processor", None) for layer in model.modules())
    return sorted({type(processor).__name__ for processor in processors if processor is not None})


def _count(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else 1
    return len(value) if isinstance(value, list) else 1


def _collect(found: list[Any], tensor: Any) -> Any:
    found.append(tensor)
    return tensor


def _find_difference(expected: Any, actual: Any) -> str:
    """Describe how two outputs differ; return an empty string if they differ only by rounding errors."""
    tensors: tuple[list[Any], list[Any]] = ([], [])
    for value, found in zip((expected, actual), tensors, strict=True):
        map_tensors(value, functools.partial(_collect, found))
    if len(tensors[0]) != len(tensors[1]):
        return f"{len(tensors[1])} tensors instead of {len(tensors[0])}"
    for one, other in zip(*tensors, strict=True):
        if one.shape != other.shape:
            return f"shape {tuple(other.shape)} instead of {tuple(one.shape)}"
        difference = float((one.float() - other.float()).abs().max()) if one.numel() else 0.0
        if not difference <= _TOLERANCE * max(1e-3, float(one.float().abs().max())):
            return f"differs by {difference:.2g}"
    return ""


def classify(shapes: dict[str, dict[str, list[Any]]]) -> dict[str, list[str]]:
    """Return the kinds of each argument of a model class, as in `RowRules`.

    Only calls that differ in nothing but the number of rows show how an argument depends on it. An argument that
    cannot be classified is left out.
    """
    kinds: dict[str, list[str]] = {}
    for path, groups in shapes.items():
        found = {kind for entries in groups.values() for kind in _list_kinds(entries)}
        if "conflict" in found or (any(kind.startswith("shared") for kind in found) and found & {"rows", "repeated"}):
            continue
        if found and not any(path.startswith(f"{outer}[]") and kinds[outer] == ["list"] for outer in kinds):
            kinds[path] = sorted(found)
    return kinds


def _list_kinds(entries: list[Any]) -> list[str]:
    """Return the kinds of an argument in one group of calls; none if all calls had the same number of rows."""
    # A pipeline may call the model with one row of text for all images, and with one row per image.
    ones = [entry for entry in entries if entry[0] > 1 and isinstance(entry[1], list) and entry[1][:1] == [1]]
    others = [entry for entry in entries if entry not in ones]
    return [_classify(part) for part in (ones, others) if len({rows for rows, _ in part}) > 1]


def _classify(entries: list[Any]) -> str:
    """Return the kind of an argument in one group of calls."""
    if all(isinstance(shape, int) for _, shape in entries):
        if all(length == rows for rows, length in entries):
            return "list"
        return "items" if len({length for _, length in entries}) == 1 else "conflict"
    if any(isinstance(shape, int) for _, shape in entries):
        return "conflict"
    if all(not shape for _, shape in entries):
        return "scalar"
    if any(not shape for _, shape in entries):
        return "conflict"
    if all(shape[0] == rows for rows, shape in entries):
        return "rows"
    if all(shape[0] == 1 for _, shape in entries):
        return "one"
    if all(shape[0] % rows == 0 for rows, shape in entries) and len({shape[0] // rows for rows, shape in entries}) == 1:
        return "repeated"
    if all(len(shape) > 1 and shape[1] == rows for rows, shape in entries):
        return "columns"
    dimensions = {len(shape) for _, shape in entries}
    same = len({shape[0] for _, shape in entries}) == 1 or _vary_at_equal_rows(entries)
    return f"shared{dimensions.pop()}" if same and len(dimensions) == 1 else "conflict"


def _vary_at_equal_rows(entries: list[Any]) -> bool:
    """Return whether the same sizes occur with every number of rows: a list of tensors of different sizes."""
    sizes = defaultdict(set)
    for rows, shape in entries:
        sizes[rows].add(shape[0])
    return len({frozenset(found) for found in sizes.values()}) == 1


def _find_rejected_arguments(equal: list[Any], different: list[Any]) -> dict[str, set[str]]:
    """Return, by model class, the arguments that occur only in recipes with differences."""
    failing = {(c["class"], c["group"].partition(" ")[0]) for c in different}
    rejected: dict[str, set[str]] = defaultdict(set)
    for comparison in different:
        rejected[comparison["class"]] |= set(comparison["arguments"])
    for comparison in equal:
        if (comparison["class"], comparison["group"].partition(" ")[0]) not in failing:
            rejected[comparison["class"]] -= set(comparison["arguments"])
    return rejected


def merge(observed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table for the observations of several processes."""
    shapes: dict[str, dict[str, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(dict))
    for part in observed:
        for kind, paths in part["shapes"].items():
            for path, groups in paths.items():
                shapes[kind][path] |= groups
    comparisons = [comparison for part in observed for comparison in part["comparisons"]]
    lists = {kind for part in observed for kind, joins in part["joins_lists"].items() if joins}
    equal = [comparison for comparison in comparisons if not comparison["difference"]]
    vaes = [comparison for part in observed for comparison in part["vaes"]]
    equal_vaes = [comparison for comparison in vaes if not comparison["difference"]]
    processors = {name for comparison in (*equal, *equal_vaes) for name in comparison["processors"]}
    # A call that differs because of its attention processors says nothing about the model.
    different = [c for c in comparisons if c["difference"] and set(c["processors"]) <= processors]
    rejected = _find_rejected_arguments(equal, different)
    # An argument of every call cannot be left out.
    failed = {
        c["class"]: c
        for c in different
        if rejected[c["class"]].isdisjoint(c["arguments"]) or next(iter(shapes[c["class"]])) in rejected[c["class"]]
    }
    kinds = {kind: classify(paths) for kind, paths in shapes.items()}
    counted = {kind for kind, paths in shapes.items() if next(iter(paths)) in kinds[kind]}
    verified = {comparison["class"] for comparison in equal if comparison["class"] in counted} - failed.keys()
    sliced = {c["class"] for c in vaes if c["method"] == "decode"} - {c["class"] for c in vaes if c["difference"]}
    for name, comparison in sorted(failed.items()):
        print(f"not verified: {name}: {comparison}", file=sys.stderr)
    for vae in {c["class"]: c for c in vaes if c["difference"]}.values():
        print(f"not sliced: {vae}", file=sys.stderr)
    unseen = sorted(shapes.keys() - verified - failed.keys())
    print(f"{len(verified)} classes verified; not compared: {unseen}", file=sys.stderr)
    return {
        "models": {
            kind: {
                "joins_lists": kind in lists,
                "arguments": {
                    path: found
                    for path, found in kinds[kind].items()
                    if re.split(r"[.\[]", path)[0] not in rejected[kind]
                },
            }
            for kind in sorted(verified)
        },
        "processors": sorted(processors | set(_OTHER_PROCESSORS)),
        "vaes": sorted(sliced),
    }


if __name__ == "__main__":
    main()
