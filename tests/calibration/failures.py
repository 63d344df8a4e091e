"""All public failures, by device."""

from __future__ import annotations

from tests.calibration import (
    failures_intel,
    failures_mps,
    failures_neuron,
    failures_npu_mlu,
    failures_schedulers,
)

__all__ = ["FAILURES"]

FAILURES = tuple(
    sorted(
        (
            *failures_mps.CASES,
            *failures_schedulers.CASES,
            *failures_neuron.CASES,
            *failures_intel.CASES,
            *failures_npu_mlu.CASES,
        ),
        key=lambda case: case.name,
    )
)
