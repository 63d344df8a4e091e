"""Activation of a virtual accelerator by the context manager or by an environment variable."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import anyaccel
from anyaccel.emulator.accelerator import VirtualAccelerator
from anyaccel.emulator.autoload import autoload
from anyaccel.emulator.run_forked import run_forked
from anyaccel.errors import LimitError, LimitTypeError, UnknownDeviceError, UsageError, VirtualDeviceError
from anyaccel.units import parse_size
from tests.conftest import RunCli, inherit_environment, run_in_fork

DEVICES = ["mps", "hpu", "neuron", "npu", "xpu", "mlu"]


def run_program(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = inherit_environment()
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def fork_program(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a fork where torch is already imported; call `autoload` as `import torch` would."""

    def work() -> None:
        autoload()
        exec(compile(textwrap.dedent(code), "<string>", "exec"), {"__name__": "__main__"})

    return run_in_fork(work, ["-c"], environment)


@pytest.mark.parametrize(
    ("device", "run"),
    [(device, run_program if device == "mps" else fork_program) for device in DEVICES],
)
def test_environment_variable_gives_any_program_the_device(device: str, run: RunCli, tmp_path: Path) -> None:
    """MPS, a device type that torch knows, runs in a new interpreter; the others run in a fork, which is faster."""
    ledger = tmp_path / "ledger.json"
    code = f"""
        import torch
        x = torch.ones(2, 3, device="{device}:1")
        assert torch.{device}.is_available() and torch.accelerator.device_count() == 2
        print(x.device, (x @ x.T).sum().item(), torch.device(1))
    """
    done = run(code, ANYACCEL_VIRTUAL=f"{device},count=2", ANYACCEL_VIRTUAL_LEDGER=str(ledger))
    assert done.stdout == f"{device}:1 12.0 {device}:1\n", done.stderr
    rows = json.loads(ledger.read_text())
    assert [(row["limit"], row["effect"], row["count"]) for row in rows] == [("host_round_trip", "slow", 1)]
    assert set(rows[0]) == {"limit", "effect", "operation", "file", "line", "count", "step"}


def test_ledger_names_lines_of_code_without_a_file() -> None:
    start = "import anyaccel, torch\nwith anyaccel.virtual('mps') as v:\n"
    code = f"{start}    torch.ones(2, device='mps').double()\nprint(v.ledger)"
    assert fork_program(code).stdout.rstrip().endswith("<string>:3")


@pytest.mark.long
@pytest.mark.parametrize("run", [fork_program, pytest.param(run_program, marks=pytest.mark.slow)])
def test_plain_diffusers_runs_with_the_variable_and_writes_a_ledger(run: RunCli, tmp_path: Path) -> None:
    """The script imports only torch and diffusers. Slow in a new interpreter, which has to import them."""
    ledger = tmp_path / "ledger.json"
    code = """
        import torch
        from diffusers import DDIMScheduler, DDPMPipeline, UNet2DModel
        unet = UNet2DModel(sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
                           block_out_channels=(8, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                           up_block_types=("AttnUpBlock2D", "UpBlock2D"))
        pipe = DDPMPipeline(unet.eval(), DDIMScheduler()).to("neuron")
        pipe.set_progress_bar_config(disable=True)
        print(pipe(num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0)).images.shape)
    """
    done = run(code, ANYACCEL_VIRTUAL="neuron", ANYACCEL_VIRTUAL_LEDGER=str(ledger), HF_HUB_OFFLINE="1")
    assert done.stdout.endswith("(1, 8, 8, 3)\n"), done.stderr
    rows = json.loads(ledger.read_text())
    assert any(row["file"].startswith("diffusers/") for row in rows)
    assert {row["step"] for row in rows} & {None, 0, 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nueron", "unknown device 'nueron' (from ANYACCEL_VIRTUAL); hint: did you mean neuron?"),
        (
            "neuron,strit",
            "(from ANYACCEL_VIRTUAL): unknown option 'strit'; hint: supported options: count=N",
        ),
        ("neuron:", "'' is neither a device index nor a memory size"),
        ("neuron,count=0", "must be between 1 and 999"),
        ("neuron:2", "set ANYACCEL_VIRTUAL=neuron,count=2 to create 2 devices"),
        ("neuron:2", "then select the last one with neuron:1"),
        ("neuron:0", "includes a device index"),
        ("hpu,memory=lots", "'lots' is not a valid memory size"),
        ("cuda", "cuda is not available as a virtual device; hint: use one of"),
        ("mps,strict,strict", "duplicate option strict"),
        ("mps,memory=1GiB,memory=2GiB", "duplicate option memory"),
        ("mps,memory=1e99GiB", "is not a valid memory size"),
    ],
)
def test_malformed_variable_prints_one_line(value: str, message: str) -> None:
    """One value is tested in a new interpreter, where an exception would make `import torch` print a long traceback."""
    run = run_program if value == "nueron" else fork_program
    done = run("import torch; print('not reached')", ANYACCEL_VIRTUAL=value)
    assert done.returncode == 2
    assert done.stderr.startswith("anyaccel: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("path", "reason"), [("no/such/folder/ledger.json", "is in a folder that does not exist"), (".", "is a folder")]
)
def test_unwritable_ledger_path_fails_at_startup(path: str, reason: str) -> None:
    done = fork_program("import torch; print('not reached')", ANYACCEL_VIRTUAL="neuron", ANYACCEL_VIRTUAL_LEDGER=path)
    assert done.returncode == 2
    assert f"ANYACCEL_VIRTUAL_LEDGER={path!r} {reason}" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_child_process_writes_its_own_ledger(tmp_path: Path) -> None:
    """The path is resolved at the start, even if the program changes its working directory.

    Only the child is a new interpreter.
    """
    code = """
        import os, subprocess, sys, torch
        os.chdir("/")
        torch.ones(2, device="mps").double()
        subprocess.run([sys.executable, "-W", "ignore", "-c", "import torch; torch.ones(2, device='mps').tolist()"])
    """
    done = fork_program(code, ANYACCEL_VIRTUAL="mps", ANYACCEL_VIRTUAL_LEDGER=str(tmp_path / "ledger.json"))
    assert done.returncode == 0, done.stderr
    limits = {path.name: [row["limit"] for row in json.loads(path.read_text())] for path in tmp_path.iterdir()}
    assert limits.pop("ledger.json") == ["dtypes.float64"]
    assert list(limits.values()) == [["host_round_trip"]]


def test_without_the_variable_torch_imports_only_autoload() -> None:
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('anyaccel')))"
    done = run_program(code)
    assert done.stdout == "['anyaccel', 'anyaccel.emulator', 'anyaccel.emulator.autoload']\n"


def test_leaving_the_context_stops_enforcement_and_keeps_the_device() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[int, int, str]:
        x = torch.ones(2, device="mps")
        x.double()
        inside = len(accelerator.ledger.rows("error"))
        accelerator.enforcing = False  # as the context manager does on exit
        x.double()
        return inside, len(accelerator.ledger.rows("error")), str(x.device)

    assert run_forked("mps", use, strict=False) == (1, 1, "mps:0")


def test_one_device_type_per_process_and_one_context_at_a_time() -> None:
    def start_again(accelerator: VirtualAccelerator) -> list[str]:
        outcomes = []
        for name in ("hpu", "neuron"):
            try:
                with anyaccel.virtual(name):
                    outcomes.append("started")
            except VirtualDeviceError as error:
                outcomes.append(error.message)
        accelerator.enforcing = False
        with anyaccel.virtual("hpu", strict=True) as again:
            outcomes.append(f"again: {again.strict}")
        return outcomes

    assert run_forked("hpu", start_again) == [
        "a virtual hpu device is already active",
        "this process already has a virtual hpu device, and torch cannot unregister a device type",
        "again: True",
    ]


def test_registered_vendor_device_is_an_error() -> None:
    code = """
        import torch
        torch.utils.rename_privateuse1_backend("npu")
        import anyaccel
        try:
            with anyaccel.virtual("neuron"): pass
        except anyaccel.AnyaccelError as error: print(error.message)
    """
    assert "'npu' is already registered" in fork_program(code).stdout


def test_real_device_takes_precedence() -> None:
    code = """
        import torch
        torch.utils.rename_privateuse1_backend("neuron")
        import os
        os.environ["ANYACCEL_VIRTUAL"] = "neuron"
        from anyaccel.emulator.autoload import autoload
        autoload()
        print("the program goes on")
    """
    done = fork_program(code)
    assert done.stdout == "the program goes on\n"
    assert done.stderr.startswith("anyaccel: using the real device: ")


def test_virtual_device_is_listed_as_virtual_and_can_be_opened() -> None:
    code = """
        import anyaccel, torch
        device = next(device for device in anyaccel.devices() if device.name == "neuron")
        print(device.available, device.virtual, device.reason, device.count)
        opened = anyaccel.open_device("neuron:1")
        print(opened.torch_device, anyaccel.device_count("neuron"), anyaccel.memory("neuron").total_bytes)
        anyaccel.manual_seed("neuron", 7)
        print(anyaccel.randn((2,), device="neuron").device, anyaccel.adjust_dtype("float64", "neuron"))
    """
    done = fork_program(code, ANYACCEL_VIRTUAL="neuron,count=2,memory=1GiB,strict")
    assert done.stdout.splitlines() == [
        "True True virtual: 2 on the CPU, enforcing the documented limits 2",
        "neuron:1 2 1073741824",
        "neuron:0 torch.float32",
    ], done.stderr


def test_strict_raises_the_error_of_the_device() -> None:
    def use_float64(accelerator: VirtualAccelerator) -> None:
        torch.ones(2, device=accelerator.device()).double()

    with pytest.raises(LimitTypeError, match=r"float64.*https://github.com/pytorch/pytorch/issues/122602"):
        run_forked("mps", use_float64, strict=True)
    with pytest.raises(LimitError) as caught:
        run_forked("npu", use_float64, strict=True)
    assert not isinstance(caught.value, TypeError)
    assert caught.value.hint


def test_invalid_arguments_raise() -> None:
    for arguments, error_class in [
        ({"name": "toaster"}, UnknownDeviceError),
        ({"name": "cpu"}, UsageError),
        ({"name": "hpu", "count": 0}, UsageError),
        ({"name": "hpu", "count": "2"}, UsageError),
        ({"name": "hpu", "memory": float("inf")}, UsageError),
        ({"name": "hpu", "memory": "-1GiB"}, UsageError),
    ]:
        with pytest.raises(error_class), anyaccel.virtual(**arguments):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("96GB", 96 * 10**9), ("1.5 MiB", 3 * 2**19), ("512", 512), ("2kb", 2000)]
)
def test_memory_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_product_decides_conditional_limits() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[int | None, list[str]]:
        torch.ones(2, device=accelerator.device(), dtype=torch.float16)
        return accelerator.capacity_bytes, [row.limit for row in accelerator.ledger.rows()]

    assert run_forked("hpu", use, memory="gaudi1") == (32 * 10**9, ["dtypes.float16"])
    assert run_forked("hpu", use, memory="gaudi2") == (96 * 10**9, [])
