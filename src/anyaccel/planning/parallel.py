"""Parallel inference: how to split one model across several devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from anyaccel.backends.sheet import Distributed, Sheet
from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import PlacementOptions, read_parallel

__all__ = [
    "RANKS_MUST_AGREE",
    "SINGLE_DEVICE",
    "Ranks",
    "Split",
    "SplitStrategy",
    "choose_parallel",
    "count_rank_bytes",
    "count_rank_parameters",
    "torchrun_command",
]

# What is split: the sequence, the weights, or the two branches of classifier-free guidance.
SplitStrategy: TypeAlias = Literal["context", "tensor", "cfg"]

_CFG_RANKS = 2
_PLAN_NAMES: dict[SplitStrategy, str] = {"context": "context-parallel", "tensor": "tensor-parallel", "cfg": "guidance"}
_HEAD_MASKS = "diffusers 0.42 cannot split its attention masks, which have one row per head"
# Splits that fail for a model or pipeline class, with the reason. tests/runtime checks that they still fail.
_KNOWN_FAILURES: dict[tuple[SplitStrategy, str], str] = {
    ("context", "LTXVideoTransformer3DModel"): _HEAD_MASKS,
    ("context", "LTX2VideoTransformer3DModel"): _HEAD_MASKS,
    ("cfg", "StableDiffusionSAGPipeline"): "self-attention guidance needs the attention maps of the whole batch",
    (
        "context",
        "Flux2KleinKVPipeline",
    ): "diffusers 0.42 cannot split the reference tokens that its model appends",
}
# Reason shown for decisions that are disabled with several ranks.
RANKS_MUST_AGREE = (
    "not available with parallel=: all ranks must run the same operations, but each rank would compile or capture "
    "graphs at a different time"
)


@dataclass(frozen=True)
class Split:
    """A split of one model across several processes, one process per device."""

    strategy: SplitStrategy
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}:{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of processes, and other facts that determine how a model can be split across devices."""

    count: int | None = 1
    """The number of processes; None if nothing will run and any count may be planned."""
    tensor_types: tuple[str, ...] = ()
    """The torch device types on which diffusers supports tensor parallelism."""
    fits_one_device: bool | None = None
    """Whether the weights fit on one device; None if unknown."""


SINGLE_DEVICE: Decision[Split | None] = Decision(
    None, "only one device is used; use parallel= to split the model across several devices"
)


def choose_parallel(
    sheet: Sheet, facts: PipelineFacts, options: PlacementOptions, ranks: Ranks
) -> Decision[Split | None]:
    """Return how to split the denoisers across devices, or None for no split.

    Raise UsageError if the requested split is not possible.
    """
    if options.parallel is None:
        return SINGLE_DEVICE
    strategy, requested = read_parallel(options.parallel)
    # "auto" works in any number of processes, so the same script can run with and without torchrun.
    if strategy == "auto" and ranks.count == 1:
        return Decision(None, f"only one process is running; start several with {torchrun_command(_CFG_RANKS)}")
    _reject_rank_local_options(options)
    if strategy == "auto":
        return _choose_split(sheet, facts, ranks)
    count = (_CFG_RANKS if strategy == "cfg" else requested) or ranks.count or _CFG_RANKS
    if count != (ranks.count or count) or count < _CFG_RANKS:
        count = max(count, _CFG_RANKS)
        raise UsageError(
            f"parallel={options.parallel!r} requires {count} processes, one per device, but "
            f"{'only one is' if ranks.count == 1 else f'{ranks.count} are'} running",
            hint=f"start the program with {torchrun_command(count)}",
        )
    split = Split(_as_strategy(strategy), count)
    problem = _find_problem(split, sheet, facts, ranks)
    if problem is not None:
        raise UsageError(f"parallel={options.parallel!r} is not available: {problem[0]}", hint=problem[1])
    _reject_offloading(split, options)
    return Decision(split, f"parallel={options.parallel!r} was requested; {_format_gain(split, facts)}")


def torchrun_command(count: int) -> str:
    """Return the torchrun command that starts a program in `count` processes."""
    return f"torchrun --nproc-per-node {count} program.py"


def count_rank_parameters(component: ComponentFacts, split: Split | None) -> int:
    """Return how many of a model's parameters one rank holds."""
    # Only tensor parallelism splits weights, and only those of denoisers.
    if split is None or split.strategy != "tensor" or not component.denoises:
        return component.parameters
    return component.parameters - component.sharded + component.sharded // split.ranks


def count_rank_bytes(component: ComponentFacts, split: Split | None, itemsize: int) -> int:
    """Return the size of the weights of a model that one rank holds."""
    return component.count_bytes(itemsize) - (component.parameters - count_rank_parameters(component, split)) * itemsize


def _as_strategy(name: str) -> SplitStrategy:
    return next(strategy for strategy in _PLAN_NAMES if strategy == name)


def _choose_split(sheet: Sheet, facts: PipelineFacts, ranks: Ranks) -> Decision[Split | None]:
    """Return the first possible split: context, tensor or CFG parallelism, tried in this order.

    Tensor parallelism is tried first if the weights do not fit on one device. The value is None if no
    split is possible.
    """
    count = ranks.count or _CFG_RANKS
    # Tensor parallelism is the only split that saves weight memory.
    order: list[SplitStrategy] = ["context", "tensor", "cfg"]
    if ranks.fits_one_device is False:
        order = ["tensor", "context", "cfg"]
    rejected: list[str] = []
    for strategy in order:
        split = Split(strategy, count)
        problem = _find_problem(split, sheet, facts, ranks)
        if problem is None:
            reason = "; ".join([_format_gain(split, facts), *rejected])
            return Decision(split, reason)
        rejected.append(f"parallel={strategy!r} is not available: {problem[0]}")
    return Decision(None, "; ".join(["every rank runs the complete model", *rejected]))


def _find_problem(split: Split, sheet: Sheet, facts: PipelineFacts, ranks: Ranks) -> tuple[str, str] | None:
    """Return why a split is not possible and a hint for the user, or None if the split is possible."""
    models = [component for component in facts.components if component.denoises]
    if not models:
        return f"{facts.pipeline} has no denoising model to split", "omit parallel"
    if not isinstance(sheet.distributed, Distributed):
        return f"no torch.distributed backend is known for {sheet.title}", "omit parallel"
    # Failures are listed by pipeline class or by model class.
    for name in (facts.pipeline, *(model.kind for model in models)):
        if (split.strategy, name) in _KNOWN_FAILURES:
            reason = _KNOWN_FAILURES[split.strategy, name]
            return (
                f"{name} does not support {split.strategy} parallelism, because {reason}",
                "omit parallel, or use parallel='auto'",
            )
    if split.strategy == "cfg":
        reason = f"guidance has two branches, one per process, but {split.ranks} processes are running"
        return None if split.ranks == _CFG_RANKS else (reason, f"start the program with {torchrun_command(_CFG_RANKS)}")
    if split.strategy == "tensor" and sheet.torch_name not in ranks.tensor_types:
        reason = (
            f"diffusers supports tensor parallelism only on {', '.join(ranks.tensor_types)}, not on {sheet.torch_name}"
        )
        if not ranks.tensor_types:
            reason = "the installed diffusers does not support tensor parallelism"
        return reason, "try parallel='context', which splits the sequence instead of the weights"
    for model in models:
        problem = _find_model_problem(model, split)
        if problem is not None:
            return problem
    return None


def _find_model_problem(model: ComponentFacts, split: Split) -> tuple[str, str] | None:
    if split.strategy not in model.splits:
        other = next((strategy for strategy in model.splits if strategy != split.strategy), "cfg")
        return (
            f"diffusers has no {_PLAN_NAMES[split.strategy]} plan for {model.kind}",
            f"try parallel={other!r} instead",
        )
    if (model.quantized or model.weight_libraries) and split.strategy == "tensor":
        return f"the weights of {model.name} are quantized and cannot be split", "load the model without quantization"
    # diffusers' Ulysses attention and its tensor plans both split the heads evenly over the ranks.
    if model.heads and model.heads % split.ranks:
        fewer = max(count for count in range(1, split.ranks) if model.heads % count == 0)
        hint = f"use parallel='{split.strategy}:{fewer}' with {fewer} processes" if fewer > 1 else "omit parallel"
        return (
            f"{model.kind} has {model.heads} attention heads, and {model.heads} is not divisible by {split.ranks}",
            hint,
        )
    return None


def _reject_rank_local_options(options: PlacementOptions) -> None:
    """Raise UsageError for options that could make ranks run different operations and deadlock."""
    for name in ("compile", "capture"):
        if getattr(options, name) is True:
            raise UsageError(
                f"{name}=True is not supported with parallel={options.parallel!r}", hint=f"omit {name} or parallel"
            )
    if options.speed != "exact":
        raise UsageError(
            f"speed={options.speed!r} is not supported with parallel={options.parallel!r}",
            hint="omit parallel, or use speed='exact'",
        )


def _reject_offloading(split: Split, options: PlacementOptions) -> None:
    # Sharded weights must stay on the device of their rank.
    if split.strategy == "tensor" and options.memory not in (None, "resident"):
        raise UsageError(
            f"memory={options.memory!r} is not supported with parallel={options.parallel!r}: split weights cannot be "
            "offloaded",
            hint="omit memory; each rank holds only its share of the weights",
        )


def _format_gain(split: Split, facts: PipelineFacts) -> str:
    if split.strategy == "cfg":
        return "each rank runs one guidance branch if the pipeline batches the branches; every rank holds all weights"
    if split.strategy == "context":
        return f"each rank processes 1/{split.ranks} of the sequence; every rank holds all weights"
    models = [component for component in facts.components if component.denoises]
    shares = [
        f"each rank holds {_format_count(count_rank_parameters(model, split))} of {_format_count(model.parameters)} "
        f"parameters of {model.name}"
        for model in models
    ]
    return ", ".join(shares)


def _format_count(count: int) -> str:
    """Format a parameter count for display, such as `11.9 billion` or `3,520`."""
    return f"{count / 1e9:.1f} billion" if count >= 1e8 else f"{count:,}"
