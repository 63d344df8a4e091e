"""Comparison of split batches with stock diffusers for every recipe.

Run `python -m tests.runtime.row_split_sweep --processes 2 --out F.json`. The command prints a table of counts and lists
the recipes that differ.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL.Image import Image

import anyaccel
from anyaccel.recipes import recipes

__all__ = ["CASES", "Outcome", "compare_recipe"]

_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt", "num_audios_per_prompt")
# Largest difference relative to the largest value, which is 1 for images.
TOLERANCE = 1e-3
# These tiny models amplify rounding errors: changing all weights by the last bit changes images by up to 0.01.
_AMPLIFYING, _AMPLIFIED = ("kandinsky-2-", "wuerstchen"), 1e-2
CASES = ("images", "generators", "prompts", "prompts and images")
"""Two images with one generator, with a list of generators, of two prompts, and two images of each of two prompts."""

Outcome = dict[str, Any]


def make_call(name: str, pipe: Any, case: str) -> dict[str, Any] | None:
    """Return the arguments of a call for several images; None if the pipeline has no such call."""
    call: dict[str, Any] = recipes()[name].call() | {"return_dict": False}
    accepted = inspect.signature(type(pipe).__call__).parameters
    count = next((argument for argument in (*_COUNTS, "batch_size") if argument in accepted), None)
    images = 4 if case == "prompts and images" else 2
    if "prompts" in case:
        texts = [argument for argument, value in call.items() if "prompt" in argument and isinstance(value, str)]
        if not isinstance(call.get("prompt"), str):
            return None
        call |= {argument: [call[argument], f"{call[argument]} and a second one"] for argument in texts}
    if case != "prompts":
        if count is None:
            return None
        call |= {count: 2}
    if case != "images" and "generator" in accepted:
        call["generator"] = [torch.Generator().manual_seed(seed) for seed in range(images)]
    return call


def compare_recipe(name: str, cases: tuple[str, ...] = CASES) -> dict[str, Outcome]:
    """Return the outcome of each case: `skipped`, `equal`, `unsplit` or `different`, with details."""
    records = _Records()
    logger = logging.getLogger("anyaccel.runtime.call.run")
    logger.addHandler(records)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            pipe: Any = recipes()[name].make()
            stock = {case: _run(name, pipe, case) for case in cases}
            placed = anyaccel.place(pipe, "cpu", dtype=torch.float32, images_per_call=1)
            return {case: _compare(name, placed, case, stock[case], records) for case in cases}
    finally:
        logger.removeHandler(records)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().rpartition(" split: ")[2])


def _run(name: str, pipe: Any, case: str) -> Any:
    """Return the tensors of a call and the states of the generators, an error, or None."""
    call = make_call(name, pipe, case)
    if call is None:
        return None
    torch.manual_seed(3)
    try:
        with torch.no_grad():
            tensors = list(_flatten(pipe(**call)))
    except Exception as error:  # noqa: BLE001 - stock diffusers rejects some batches with any error
        return error
    passed = call.get("generator")
    generators = passed if isinstance(passed, list) else [passed] if passed is not None else []
    return tensors, [generator.get_state() for generator in (*generators, torch.default_generator)]


def _compare(name: str, placed: Any, case: str, stock: Any, records: _Records) -> Outcome:
    if stock is None or isinstance(stock, Exception):
        return {"status": "skipped", "reason": str(stock)[:200]}
    actual = _run(name, placed, case)
    reasons = list(records.messages)  # each reason is reported once per pipeline
    if isinstance(actual, Exception):
        return {"status": "different", "reason": f"{type(actual).__name__}: {actual}"[:300]}
    if [tensor.shape for tensor in stock[0]] != [tensor.shape for tensor in actual[0]]:
        return {"status": "different", "reason": "other shapes"}
    if any(not torch.equal(one, other) for one, other in zip(stock[1], actual[1], strict=True)):
        return {"status": "different", "reason": "other states of the generators"}
    difference = max(
        (
            float((one - other).abs().max() / other.abs().max().clamp_min(1.0))
            for one, other in zip(actual[0], stock[0], strict=True)
        ),
        default=0.0,
    )
    tolerance = _AMPLIFIED if name.startswith(_AMPLIFYING) else TOLERANCE
    status = "different" if not difference <= tolerance else "unsplit" if reasons else "equal"
    return {"status": status, "difference": difference, "reason": "; ".join(reasons)}


def _flatten(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, Image):
        yield torch.as_tensor(numpy.array(value)).float() / 255
    elif isinstance(value, torch.Tensor | numpy.ndarray):
        yield torch.as_tensor(value).float()


def main() -> None:
    """Run all recipes and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.names or sorted(recipes())
    outcomes: dict[str, dict[str, Outcome]] = {}
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=20) as pool:
        for name, outcome in zip(names, pool.imap(compare_recipe, names), strict=True):
            outcomes[name] = outcome
            print(name, {case: result["status"] for case, result in outcome.items()}, file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(json.dumps(outcomes, indent=1))
    for case in CASES:
        print(case, dict(Counter(outcome[case]["status"] for outcome in outcomes.values())))
    for name, outcome in outcomes.items():
        for case, result in outcome.items():
            if result["status"] in ("different", "unsplit"):
                print(f"{result['status']}: {name}, {case}: {result.get('difference')} {result['reason']}")


if __name__ == "__main__":
    main()
