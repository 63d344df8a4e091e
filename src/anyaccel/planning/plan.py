"""Plans: all decisions for running one pipeline on one device, with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from anyaccel.backends.claim import Quirk
from anyaccel.backends.quirks import FLOAT32_ATTENTION
from anyaccel.backends.sheet import Sheet
from anyaccel.planning.attention import AttentionRule, choose_attention
from anyaccel.planning.compiler import CompileRule, choose_compiler, choose_mode
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import choose_component_dtypes, choose_dtype, choose_replacements
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.images_per_call import choose_images_per_call
from anyaccel.planning.memory import Forecast, MemoryRule
from anyaccel.planning.noise import choose_noise
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions
from anyaccel.planning.parallel import RANKS_MUST_AGREE, SINGLE_DEVICE, Ranks, Split, choose_parallel
from anyaccel.planning.plan_text import describe_plan
from anyaccel.planning.quality_levels import StepSkipping, choose_quantization, choose_step_skipping
from anyaccel.planning.run_report import RunReport
from anyaccel.planning.scheduler_location import choose_scheduler_location
from anyaccel.planning.speedups import (
    CompilePolicy,
    choose_capture,
    choose_channels_last,
    choose_compile_policy,
    choose_fusions,
)
from anyaccel.planning.weight_formats import choose_weights
from anyaccel.planning.weight_kernels import choose_dequantized
from anyaccel.planning.workarounds import choose_workarounds

__all__ = ["NO_MEMORY", "Plan", "make_plan", "without_rank_local_choices", "without_speedups"]

# Placing replaces it: the rule depends on the memory of the device.
NO_MEMORY = Decision(MemoryRule(), "the image size is not known yet")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for running a pipeline on a device; `print(plan)` shows them with their reasons."""

    pipeline: str
    device: str
    """`neuron:0`."""
    title: str
    """`AWS Neuron (Trainium, Inferentia)`."""
    virtual: bool
    """Whether the device is virtual, so the plan says nothing about real hardware."""

    # `print(plan)` and the JSON output list decisions in this order.
    mode: Decision[str]
    dtype: Decision[str]
    component_dtypes: Decision[tuple[tuple[str, str], ...]]
    replacements: Decision[tuple[tuple[str, str], ...]]
    noise: Decision[str]
    scheduler: Decision[str]
    attention: Decision[AttentionRule]
    images_per_call: Decision[int | None]
    parallel: Decision[Split | None] = SINGLE_DEVICE
    memory: Decision[MemoryRule] = NO_MEMORY
    workarounds: Decision[tuple[str, ...]]
    bf16_attention: Decision[bool]
    compiler: Decision[CompileRule]
    compile_policy: Decision[CompilePolicy]
    channels_last: Decision[bool]
    fusions: Decision[tuple[str, ...]]
    capture: Decision[bool]
    quantization: Decision[str]
    weights: Decision[tuple[tuple[str, str], ...]]
    dequantized: Decision[tuple[tuple[str, str], ...]]
    step_skipping: Decision[StepSkipping | None]
    check_finite: Decision[bool]
    forecast: Forecast | None = None
    """The predicted memory of a call, if it was computed."""
    # Outside of equality and hash, so a plan stays comparable while its report changes.
    report: RunReport = field(default_factory=RunReport, compare=False, repr=False)
    """Outcomes since the plan was created; the only mutable part."""

    @property
    def memory_in_use(self) -> Decision[MemoryRule]:
        """The memory settings used by the last call, or the planned settings before the first call."""
        return self.report.memory or self.memory

    def decisions(self) -> Iterator[tuple[str, Decision[Any]]]:
        """Yield the name and the `Decision` object for each decision in the plan."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Decision):
                yield entry.name, value

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a JSON-compatible dict."""
        forecast = self.forecast.to_dict() if self.forecast else {}
        return {
            "pipeline": self.pipeline,
            "device": self.device,
            "title": self.title,
            "virtual": self.virtual,
            "decisions": _list(self.decisions()),
            "report": _list(self.report.entries()),
            **forecast,
        }

    def __str__(self) -> str:
        return "\n".join(describe_plan(self))


def _list(decisions: Iterable[tuple[str, Decision[Any]]]) -> list[dict[str, str]]:
    return [{"name": name, "value": str(decision), "reason": decision.reason} for name, decision in decisions]


def make_plan(
    sheet: Sheet,
    facts: PipelineFacts,
    options: PlacementOptions,
    *,
    device: str,
    virtual: bool = False,
    dtype: Decision[str] | None = None,
    environment: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
) -> Plan:
    """Return the plan for running a pipeline on one device, or on one rank of a parallel run.

    `dtype` overrides the dtype decision, for callers that choose a dtype before loading the weights.
    """
    # Attention limits in bytes depend on the dtype, and workarounds on both: keep this order.
    dtype = dtype or choose_dtype(sheet, facts, options)
    replacements = choose_replacements(sheet)
    attention = choose_attention(sheet, options, FLOATING_BYTES.get(dtype.value, 2))
    workarounds = choose_workarounds(sheet, replacements.value, attention.value)
    plan = Plan(
        pipeline=facts.pipeline,
        device=device,
        title=sheet.title,
        virtual=virtual,
        mode=choose_mode(sheet, options, environment or {}),
        dtype=dtype,
        component_dtypes=choose_component_dtypes(sheet, facts, dtype.value, options),
        replacements=replacements,
        noise=choose_noise(sheet),
        scheduler=choose_scheduler_location(sheet, options),
        attention=attention,
        images_per_call=choose_images_per_call(sheet, options),
        parallel=choose_parallel(sheet, facts, options, ranks or Ranks()),
        workarounds=workarounds,
        bf16_attention=_choose_bf16_attention(sheet, options, dtype.value),
        compiler=choose_compiler(sheet),
        compile_policy=choose_compile_policy(sheet, facts, options, workarounds.value),
        channels_last=choose_channels_last(sheet, options),
        fusions=choose_fusions(sheet, options),
        capture=choose_capture(sheet, options),
        quantization=choose_quantization(sheet, options, dtype.value),
        weights=choose_weights(facts, options),
        dequantized=choose_dequantized(sheet, facts, virtual=virtual),
        step_skipping=choose_step_skipping(options),
        check_finite=_choose_check_finite(options),
    )
    return plan if plan.parallel.value is None else without_rank_local_choices(plan)


def without_rank_local_choices(plan: Plan) -> Plan:
    """Return a copy of the plan with compilation and graph capture disabled.

    If these differed between ranks, the ranks would run different collectives and deadlock.
    """
    # A rank that compiles earlier than the others, or replays a graph, would run different collectives and deadlock.
    return replace(
        plan,
        compile_policy=Decision(CompilePolicy("never"), RANKS_MUST_AGREE),
        capture=Decision(False, RANKS_MUST_AGREE),
    )


def without_speedups(plan: Plan) -> Plan:
    """Return a copy of the plan for a memory mode in which weights move: its models are neither compiled nor captured.

    See `apply_speedups` in runtime/speed.
    """
    reason = "the weights move during the call"
    return replace(plan, compile_policy=Decision(CompilePolicy("never"), reason), capture=Decision(False, reason))


def _choose_check_finite(options: PlacementOptions) -> Decision[bool]:
    if not options.check_finite:
        return Decision(False, "check_finite=False was requested")
    return Decision(True, "the output is checked for NaN and Inf once, after the last step")


def _choose_bf16_attention(sheet: Sheet, options: PlacementOptions, dtype: str) -> Decision[bool]:
    quirk = _find_quirk(sheet, FLOAT32_ATTENTION)
    if quirk is None:
        return Decision(False, "attention does not fall back to float32 on this device")
    if not options.sdp_on_bf16:
        return Decision(False, "sdp_on_bf16=False was requested")
    if dtype != "bfloat16":
        return Decision(False, f"applies only to bfloat16, but the pipeline runs in {dtype}")
    return Decision(True, quirk.says)


def _find_quirk(sheet: Sheet, name: str) -> Quirk | None:
    """Return the quirk with this name if it applies unconditionally, else None."""
    # A quirk with an open condition may not apply to this device.
    return next((quirk for quirk in sheet.quirks if quirk.name == name and not quirk.conditional), None)
