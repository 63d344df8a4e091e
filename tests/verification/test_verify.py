"""Verification of sheets, on virtual devices that match their sheets and on the CPU with wrong sheets."""

from dataclasses import replace

import pytest
import torch

import anyaccel
from anyaccel.backends.claim import DtypeLimit, Unknown
from anyaccel.backends.evidence_files import Finding
from anyaccel.errors import UsageError
from anyaccel.recipes import recipes, run
from anyaccel.verification import probe_operations
from anyaccel.verification.context import describe_error
from anyaccel.verification.probe_pipeline import measure_sensitivity
from anyaccel.verification.probe_worker import ProbeWorker, ProbeWorkerDiedError, make_probe_context
from anyaccel.verification.probes import find_claims, probe
from anyaccel.verification.verify import verify
from tests.conftest import NEEDS_RECIPES

MPS = {
    "dtypes.float64": "error",
    "dtypes.int64": "narrowed",
    "dtypes.complex128": "error",
    "dtypes.float8_e4m3fn": "error",
    "dtypes.float8_e5m2": "error",
    "host_round_trip": "slow",
    "operations.baddbmm_reads_ignored_input": "wrong",
    "operations.conv_transpose3d_half": "error",
    "operations.int_mm": "error",
}
HPU = {
    "dtypes.float64": "narrowed",
    "dtypes.int64": "narrowed",
    "dtypes.complex64": "error",
    "dtypes.complex128": "error",
    "data_dependent_shapes": "slow",
    "host_round_trip": "slow",
}


@NEEDS_RECIPES
@pytest.mark.parametrize(("device", "limits"), [("mps", MPS), ("hpu", HPU)])
def test_a_virtual_device_does_what_its_sheet_says(device: str, limits: dict[str, str]) -> None:
    verification = verify(f"virtual:{device}", pipelines=["ddpm"])
    assert verification.virtual
    assert verification.device_name.startswith("virtual ")
    assert verification.holds
    assert {finding.verdict for finding in verification.findings} == {"agrees", "not tried"}
    agreed = {finding.claim: finding.seen for finding in verification.findings if finding.verdict == "agrees"}
    assert limits.items() <= agreed.items()
    assert all(finding.detail for finding in verification.findings if finding.verdict == "not tried"), "no reason given"
    assert [finding.right for finding in verification.pipelines] == [True]


def test_a_virtual_device_does_not_answer_unknown_claims() -> None:
    verification = verify("virtual:mlu", pipelines=[])
    unknown = [finding for finding in verification.findings if finding.expected == "not known"]
    assert unknown
    assert all(finding.verdict == "not tried" for finding in unknown)


def probe_cpu(name: str, claim: DtypeLimit | Unknown) -> Finding:
    context = make_probe_context("cpu", quick=True)
    return probe(replace(context, sheet=context.sheet.with_claims({name: claim})), name)


def test_a_wrong_claim_is_contradicted() -> None:
    claim = DtypeLimit(says="It raises.", source="https://example.org", evidence="documented", effect="error", hint="-")
    finding = probe_cpu("dtypes.float64", claim)
    assert (finding.expected, finding.seen, finding.verdict) == ("error", "yes", "contradicts")
    elsewhere = probe_cpu("dtypes.float64", replace(claim, only_on=("another",)))
    assert (elsewhere.verdict, elsewhere.seen) == ("not tried", "")


def test_an_unknown_claim_is_answered() -> None:
    finding = probe_cpu("random_numbers", Unknown(says="Nothing was found."))
    assert (finding.expected, finding.seen, finding.verdict) == ("not known", "yes", "new")


def test_an_operation_without_enough_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(device: object, kind: object) -> torch.Tensor:
        raise RuntimeError("NPU out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(probe_operations._CALLS, "baddbmm", run_out)
    context = make_probe_context("cpu", quick=True)
    [limit] = [limit for limit in anyaccel.sheet("mps").operations if limit.operations == ("baddbmm",)]
    sheet = replace(context.sheet, operations=(limit,))
    finding = probe(replace(context, sheet=sheet), "operations.baddbmm_reads_ignored_input")
    assert (finding.verdict, finding.seen) == ("not tried", "")
    assert "out of memory: " in finding.detail


def test_every_claim_about_behavior_has_a_probe() -> None:
    names = {name.split(".")[0] for name, _ in anyaccel.sheet("mps").claims()}
    left_out = names - {name.split(".")[0] for name in find_claims(anyaccel.sheet("mps"))}
    about_memory = {"fused_attention", "memory", "quantized_weights"}  # measured by benchmarks.memory
    assert left_out == {"default_dtypes", "distributed", "installation", "requirements", "variables"} | about_memory


def test_a_dead_process_loses_one_finding() -> None:
    with ProbeWorker("cpu", quick=True) as worker:
        with pytest.raises(ProbeWorkerDiedError, match=r"exited with status 1: .*no-such-claim"):
            worker.probe_claim("no-such-claim")
        assert worker.probe_claim("dtypes.int64").verdict == "agrees"


def test_error_texts_do_not_contain_folders() -> None:
    error = RuntimeError("no /home/anna/work/model.py here, see https://example.org/a/b\nand more")
    assert describe_error(error) == "RuntimeError: no model.py here, see https://example.org/a/b"


@pytest.mark.parametrize(("device", "options"), [("cpu", {"pipelines": ["fluxx"]}), ("cpu", {"jobs": 0})])
def test_invalid_arguments_of_verify_raise(device: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="hint: "):
        verify(device, **options)  # type: ignore[arg-type]


@NEEDS_RECIPES
@pytest.mark.parametrize(("recipe", "least", "most"), [("stable-diffusion", 1e-7, 1e-4), ("kandinsky-2-1", 1e-3, 1.0)])
def test_sensitivity_to_rounding_is_measured(recipe: str, least: float, most: float) -> None:
    """Vector-quantizing decoders are sensitive to rounding; others barely change, so their tolerance is small."""
    chosen = recipes()[recipe]
    assert least < measure_sensitivity(chosen, run(chosen, chosen.make())) < most
