"""One model over several devices: which way it is split, by what the model, the device and diffusers allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from anyaccel.backends.sheet import Distributed, Sheet
from anyaccel.errors import UsageError
from anyaccel.planning.decision import Decision
from anyaccel.planning.facts import ComponentFacts, PipelineFacts
from anyaccel.planning.options import PlacementOptions, read_parallel

__all__ = ["ALONE", "TOGETHER", "Ranks", "Split", "SplitStrategy", "choose_parallel", "command_line", "weigh_rank"]

SplitStrategy: TypeAlias = Literal["context", "tensor", "cfg"]
"""What is split: the sequence, the weights, or the two halves of classifier-free guidance."""

_HALVES = 2
_WORDS: dict[SplitStrategy, str] = {"context": "context-parallel", "tensor": "tensor-parallel", "cfg": "guidance"}
_MASKS = "its masks have a row for each head, and diffusers 0.42 does not share those out"
_UNSHARED: dict[tuple[SplitStrategy, str], str] = {
    ("context", "LTXVideoTransformer3DModel"): _MASKS,
    ("context", "LTX2VideoTransformer3DModel"): _MASKS,
    ("cfg", "StableDiffusionSAGPipeline"): "it reads what attention does with the whole batch",
    (
        "context",
        "Flux2KleinKVPipeline",
    ): "its model joins a reference's tokens inside, and diffusers 0.42 does not share those out",
}
"""Splits that fail for a model or a pipeline, each with the reason; a test runs them."""
TOGETHER = "parallel: all ranks must do the same, and what is timed or recorded on one is not"
"""Why a plan for several devices leaves things out."""


@dataclass(frozen=True)
class Split:
    """One model over so many processes, a device each."""

    strategy: SplitStrategy
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}:{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that there are, and what diffusers does for them."""

    count: int | None = 1
    """None where nothing is run, and any count may be asked about."""
    tensor_types: tuple[str, ...] = ()
    """The devices, as torch names them, on which diffusers splits weights."""
    fits_alone: bool | None = None
    """Whether the weights fit on one device; None where that is not known."""


ALONE: Decision[Split | None] = Decision(None, "one device runs it all; parallel= takes several")


def choose_parallel(
    sheet: Sheet, facts: PipelineFacts, options: PlacementOptions, ranks: Ranks
) -> Decision[Split | None]:
    """Whether and how the models that run at every step are split; what cannot be done is an error with its reason."""
    if options.parallel is None:
        return ALONE
    strategy, asked = read_parallel(options.parallel)
    if strategy == "auto" and ranks.count == 1:
        return Decision(None, f"this is one process; several are started by {command_line(_HALVES)}")
    _refuse_what_ranks_do_apart(options)
    if strategy == "auto":
        return _choose_by_itself(sheet, facts, ranks)
    count = (_HALVES if strategy == "cfg" else asked) or ranks.count or _HALVES
    if count != (ranks.count or count) or count < _HALVES:
        count = max(count, _HALVES)
        raise UsageError(
            f"parallel={options.parallel!r} takes {count} processes, a device each, and there "
            f"{'is one' if ranks.count == 1 else f'are {ranks.count}'}",
            hint=f"start the program with {command_line(count)}",
        )
    split = Split(_as_strategy(strategy), count)
    refusal = _find_refusal(split, sheet, facts, ranks)
    if refusal is not None:
        raise UsageError(f"parallel={options.parallel!r}: {refusal[0]}", hint=refusal[1])
    _refuse_weights_elsewhere(split, options)
    return Decision(split, f"asked for; {_say_gain(split, facts)}")


def command_line(count: int) -> str:
    """How a program is started so many times: `torchrun --nproc-per-node 2 program.py`."""
    return f"torchrun --nproc-per-node {count} program.py"


def weigh_rank(component: ComponentFacts, split: Split | None) -> int:
    """How many numbers of a model's weights one rank holds."""
    if split is None or split.strategy != "tensor" or not component.denoises:
        return component.parameters
    return component.parameters - component.sharded + component.sharded // split.ranks


def _as_strategy(word: str) -> SplitStrategy:
    return next(strategy for strategy in _WORDS if strategy == word)


def _choose_by_itself(sheet: Sheet, facts: PipelineFacts, ranks: Ranks) -> Decision[Split | None]:
    """Weights are split where they do not fit on one device, else the sequence, else the halves of guidance."""
    count = ranks.count or _HALVES
    order: list[SplitStrategy] = ["context", "tensor", "cfg"]
    if ranks.fits_alone is False:
        order = ["tensor", "context", "cfg"]
    against: list[str] = []
    for strategy in order:
        split = Split(strategy, count)
        refusal = _find_refusal(split, sheet, facts, ranks)
        if refusal is None:
            said = "; ".join([_say_gain(split, facts), *against])
            return Decision(split, said)
        against.append(f"no {strategy}: {refusal[0]}")
    return Decision(None, "; ".join(["every rank runs all of it", *against]))


def _find_refusal(split: Split, sheet: Sheet, facts: PipelineFacts, ranks: Ranks) -> tuple[str, str] | None:
    """Why a split cannot be had, and a way out."""
    models = [component for component in facts.components if component.denoises]
    if not models:
        return f"{facts.pipeline} has no model that runs at every step", "leave parallel out"
    if not isinstance(sheet.distributed, Distributed):
        return f"no backend of torch.distributed is known for {sheet.title}", "leave parallel out"
    for name in (facts.pipeline, *(model.kind for model in models)):
        if (split.strategy, name) in _UNSHARED:
            return f"{name} fails so: {_UNSHARED[split.strategy, name]}", "leave parallel out, or take parallel='auto'"
    if split.strategy == "cfg":
        words = f"guidance has two halves, and there are {split.ranks} processes"
        return None if split.ranks == _HALVES else (words, f"start {command_line(_HALVES)}")
    if split.strategy == "tensor" and sheet.torch_name not in ranks.tensor_types:
        known = ", ".join(ranks.tensor_types) or "no device"
        words = f"diffusers splits weights on {known}, and not on {sheet.torch_name}"
        return words, "parallel='context' splits the sequence instead, where the model has a plan for it"
    for model in models:
        found = _refuse_model(model, split)
        if found is not None:
            return found
    return None


def _refuse_model(model: ComponentFacts, split: Split) -> tuple[str, str] | None:
    if split.strategy not in model.splits:
        other = next((strategy for strategy in model.splits if strategy != split.strategy), "cfg")
        return f"diffusers has no {_WORDS[split.strategy]} plan for {model.kind}", f"parallel={other!r} may do"
    if model.quantized and split.strategy == "tensor":
        return f"the weights of {model.name} are quantized, and cannot be split", "load the model as it is"
    if model.heads and model.heads % split.ranks:
        fewer = max(count for count in range(1, split.ranks) if model.heads % count == 0)
        hint = f"parallel='{split.strategy}:{fewer}'" if fewer > 1 else "take another count of processes"
        return f"the {model.heads} attention heads of {model.kind} cannot be shared out to {split.ranks}", hint
    return None


def _refuse_what_ranks_do_apart(options: PlacementOptions) -> None:
    """What was asked for by name and cannot go with it."""
    for name in ("compile", "capture"):
        if getattr(options, name) is True:
            raise UsageError(f"{name}=True is not done on several devices", hint=f"leave {name} or parallel out")
    if options.speed != "exact":
        raise UsageError(
            f"speed={options.speed!r} is not done on several devices", hint="leave parallel out, or take speed='exact'"
        )


def _refuse_weights_elsewhere(split: Split, options: PlacementOptions) -> None:
    if split.strategy == "tensor" and options.memory not in (None, "resident"):
        raise UsageError(
            f"memory={options.memory!r} moves weights that parallel={options.parallel!r} has split",
            hint="leave memory out: a rank holds its share of the weights",
        )


def _say_gain(split: Split, facts: PipelineFacts) -> str:
    """What a split buys, in words."""
    if split.strategy == "cfg":
        return (
            "each rank takes one half of guidance, where a pipeline runs both as one batch; weights are whole on each"
        )
    if split.strategy == "context":
        return f"a rank takes 1/{split.ranks} of the sequence; weights are whole on each"
    models = [component for component in facts.components if component.denoises]
    said = [
        f"of {model.name}'s {_count(model.parameters)} weights a rank holds {_count(weigh_rank(model, split))}"
        for model in models
    ]
    return ", ".join(said)


def _count(number: int) -> str:
    """`11.9 billion`, `3,520`."""
    return f"{number / 1e9:.1f} billion" if number >= 1e8 else f"{number:,}"
