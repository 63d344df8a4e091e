"""Results of usages, one JSON object per usage and variant."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.differential.observation import Observation, compare, observe, observe_here
from tests.differential.open_differences import OPEN
from tests.differential.session import USAGES, VARIANTS, Usage, Variant

__all__ = ["STATUSES", "Result", "run_usage"]

STATUSES = ("same", "close", "rejected", "skipped", "open", "different")
"""Same bits; same within the tolerance; rejected with the expected error; not applicable; known difference; new one."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Comparison of one usage and variant with stock diffusers."""

    usage: str
    variant: str
    status: str
    difference: float = 0.0
    """Largest difference, relative to the range of the stock result."""
    text: str = ""
    """The differences, the error, or the reason for skipping."""
    notes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Time of the placed run, without the stock run."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set."""
        return {name: value for name, value in asdict(self).items() if value or name in ("usage", "variant", "status")}


def run_usage(name: str, variants: list[str], *, here: bool = False) -> list[Result]:
    """Run a usage with stock diffusers and in each variant; with `here`, in this process instead of forks."""
    usage = USAGES[name]
    stock: dict[str, Observation] = {}
    results = []
    for variant in (VARIANTS[variant] for variant in variants):
        if variant.name in usage.skip:
            results.append(Result(usage=name, variant=variant.name, status="skipped", text=usage.skip[variant.name]))
            continue
        run = observe_here if here else observe
        try:
            if variant.stock_device not in stock:
                stock[variant.stock_device] = run(usage, variant, placed=False)
            results.append(_judge(usage, variant, stock[variant.stock_device], run(usage, variant, placed=True)))
        except Exception as error:  # noqa: BLE001 - a process that died or hung is a result
            text = f"{type(error).__name__}: {error}"
            results.append(Result(usage=name, variant=variant.name, status="different", text=text[:500]))
    return results


def _judge(usage: Usage, variant: Variant, expected: Observation, actual: Observation) -> Result:
    def result(status: str, difference: float = 0.0, text: str = "") -> Result:
        return Result(
            usage=usage.name, variant=variant.name, status=status, difference=float(f"{difference:.1e}"), text=text,
            notes=actual.notes, seconds=round(actual.seconds, 1),
        )  # fmt: skip

    if bool(expected.error) != usage.fails:
        return result("different", text=f"stock diffusers: {expected.error or 'no error'}")
    if variant.name in usage.rejected:
        status = "rejected" if usage.rejected[variant.name] in actual.error else "different"
        return result(status, text=actual.error or "no error")
    if variant.served and actual.requests == 0 and not actual.error:
        return result("skipped", text="makes no request")
    allowed = max(usage.tolerance, variant.tolerance, usage.compiled_tolerance if variant.options.get("compile") else 0)
    comparison = compare(expected, actual, allowed)
    if not comparison.lines:
        return result("close" if comparison.difference else "same", comparison.difference)
    text = "; ".join(comparison.lines)
    reason = OPEN.get(variant.name, {}).get(usage.name)
    return result("open" if reason else "different", comparison.difference, f"{reason}: {text}" if reason else text)
