"""A sheet held against a device: virtual ones, which do what their sheets say, and the host under false sheets."""

from dataclasses import replace

import pytest
import torch

import anyaccel
from anyaccel.backends.claim import DtypeLimit, Unknown
from anyaccel.backends.evidence import Finding
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
    seen = verify(f"virtual:{device}", pipelines=["ddpm"])
    assert seen.virtual
    assert seen.device_name.startswith("virtual ")
    assert seen.holds
    assert {one.verdict for one in seen.findings} == {"agrees", "not tried"}
    agreed = {one.claim: one.seen for one in seen.findings if one.verdict == "agrees"}
    assert limits.items() <= agreed.items()
    assert all(one.detail for one in seen.findings if one.verdict == "not tried"), "it says why"
    assert [one.right for one in seen.pipelines] == [True]


def test_a_virtual_device_answers_no_open_question() -> None:
    seen = verify("virtual:mlu", pipelines=[])
    open_questions = [one for one in seen.findings if one.expected == "not known"]
    assert open_questions
    assert all(one.verdict == "not tried" for one in open_questions)


def probe_host(name: str, claim: DtypeLimit | Unknown) -> Finding:
    bench = make_probe_context("cpu", quick=True)
    return probe(replace(bench, sheet=bench.sheet.with_claims({name: claim})), name)


def test_a_sheet_that_is_wrong_is_contradicted() -> None:
    said = DtypeLimit(says="It raises.", source="https://example.org", evidence="documented", effect="error", hint="-")
    found = probe_host("dtypes.float64", said)
    assert (found.expected, found.seen, found.verdict) == ("error", "yes", "contradicts")
    elsewhere = probe_host("dtypes.float64", replace(said, only_on=("another",)))
    assert (elsewhere.verdict, elsewhere.seen) == ("not tried", "")


def test_an_open_question_is_answered() -> None:
    found = probe_host("random_numbers", Unknown(says="Nothing was found."))
    assert (found.expected, found.seen, found.verdict) == ("not known", "yes", "new")


def test_an_operation_that_a_busy_device_has_no_memory_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(device: object, kind: object) -> torch.Tensor:
        raise RuntimeError("NPU out of memory. Tried to allocate 2 GiB")

    monkeypatch.setitem(probe_operations._CALLS, "baddbmm", run_out)
    bench = make_probe_context("cpu", quick=True)
    [limit] = [one for one in anyaccel.sheet("mps").operations if one.operations == ("baddbmm",)]
    sheet = replace(bench.sheet, operations=(limit,))
    found = probe(replace(bench, sheet=sheet), "operations.baddbmm_reads_ignored_input")
    assert (found.verdict, found.seen) == ("not tried", "")
    assert "the memory did not suffice" in found.detail


def test_every_claim_about_behaviour_has_a_probe() -> None:
    names = {name.split(".")[0] for name, _ in anyaccel.sheet("mps").claims()}
    left_out = names - {name.split(".")[0] for name in find_claims(anyaccel.sheet("mps"))}
    about_memory = {"fused_attention", "memory", "quantized_weights"}  # python -m benchmarks.memory measures those
    assert left_out == {"default_dtypes", "distributed", "requirements", "variables"} | about_memory


def test_a_process_that_dies_loses_one_finding() -> None:
    with ProbeWorker("cpu", quick=True) as prober:
        with pytest.raises(ProbeWorkerDiedError, match=r"died with status 1: .*no-such-claim"):
            prober.probe_claim("no-such-claim")
        assert prober.probe_claim("dtypes.int64").verdict == "agrees"


def test_folders_of_the_machine_stay_out_of_the_words() -> None:
    error = RuntimeError("no /home/anna/work/model.py here, see https://example.org/a/b\nand more")
    assert describe_error(error) == "RuntimeError: no model.py here, see https://example.org/a/b"


@pytest.mark.parametrize(("device", "options"), [("cpu", {"pipelines": ["fluxx"]}), ("cpu", {"jobs": 0})])
def test_a_wrong_call_is_told_at_once(device: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="hint: "):
        verify(device, **options)  # type: ignore[arg-type]


@NEEDS_RECIPES
@pytest.mark.parametrize(("recipe", "least", "most"), [("stable-diffusion", 1e-7, 1e-4), ("kandinsky-2-1", 1e-3, 1.0)])
def test_what_rounding_alone_may_do_is_measured(recipe: str, least: float, most: float) -> None:
    """A quantising decoder jumps between codes; a plain one hardly moves, so that nothing wrong is excused there."""
    chosen = recipes()[recipe]
    assert least < measure_sensitivity(chosen, run(chosen, chosen.make())) < most
