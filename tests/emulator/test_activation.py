"""Turning a virtual accelerator on: by the context manager, and by the environment for any program."""

import json
import os
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
from tests.conftest import RunCli, run_in_fork

DEVICES = ["mps", "hpu", "neuron", "npu", "xpu", "mlu"]


def run_program(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def fork_program(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The same in a fork in which torch is imported: what its import would call of ours is called first."""

    def work() -> None:
        autoload()
        exec(compile(textwrap.dedent(code), "<string>", "exec"), {"__name__": "__main__"})

    return run_in_fork(work, ["-c"], environment)


@pytest.mark.parametrize(
    ("device", "run"),
    [(device, run_program if device == "mps" else fork_program) for device in DEVICES],
)
def test_any_program_gets_the_device_by_the_environment_alone(device: str, run: RunCli, tmp_path: Path) -> None:
    """One that torch knows with a start of Python, the others without; the test below starts one that it does not."""
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


def test_a_program_without_a_file_has_lines_too() -> None:
    start = "import anyaccel, torch\nwith anyaccel.virtual('mps') as v:\n"
    code = f"{start}    torch.ones(2, device='mps').double()\nprint(v.ledger)"
    assert fork_program(code).stdout.rstrip().endswith("<string>:3")


@pytest.mark.long
def test_plain_diffusers_runs_under_the_variable_and_leaves_a_ledger(tmp_path: Path) -> None:
    """The script knows diffusers alone."""
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
    done = run_program(code, ANYACCEL_VIRTUAL="neuron", ANYACCEL_VIRTUAL_LEDGER=str(ledger), HF_HUB_OFFLINE="1")
    assert done.stdout.endswith("(1, 8, 8, 3)\n"), done.stderr
    rows = json.loads(ledger.read_text())
    assert any(row["file"].startswith("diffusers/") for row in rows)
    assert {row["step"] for row in rows} & {None, 0, 1}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nueron", "unknown device 'nueron' (from ANYACCEL_VIRTUAL); hint: did you mean neuron?"),
        (
            "neuron,strit",
            "(from ANYACCEL_VIRTUAL): unknown option 'strit'; hint: options: count=N",
        ),
        ("neuron:", "'' is neither an index nor a memory size"),
        ("neuron,count=0", "must be from 1 to 999"),
        ("neuron:2", "write ANYACCEL_VIRTUAL=neuron,count=2; elsewhere, use virtual:neuron,count=2"),
        ("neuron:2", "and neuron:1 for the last one"),
        ("neuron:0", "names a device by its index"),
        ("hpu,memory=lots", "'lots' is not a valid memory size"),
        ("cuda", "there is no virtual cuda; hint: take one of"),
        ("mps,strict,strict", "duplicate option strict"),
        ("mps,memory=1GiB,memory=2GiB", "duplicate option memory"),
        ("mps,memory=1e99GiB", "is not a valid memory size"),
    ],
)
def test_a_malformed_variable_is_one_line_of_ours(value: str, words: str) -> None:
    """One of them with a start of Python, where torch's import would make a page of it."""
    run = run_program if value == "nueron" else fork_program
    done = run("import torch; print('not reached')", ANYACCEL_VIRTUAL=value)
    assert done.returncode == 2
    assert done.stderr.startswith("anyaccel: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("path", ["no/such/folder/ledger.json", "."])
def test_a_ledger_that_cannot_be_written_is_said_at_once(path: str) -> None:
    done = fork_program("import torch; print('not reached')", ANYACCEL_VIRTUAL="neuron", ANYACCEL_VIRTUAL_LEDGER=path)
    assert done.returncode == 2
    assert "is no file that can be written" in done.stderr
    assert done.stdout == ""


@pytest.mark.long
def test_a_program_that_a_program_starts_has_a_ledger_of_its_own(tmp_path: Path) -> None:
    """And the path is where it was at the start, wherever the program goes."""
    code = """
        import os, subprocess, sys, torch
        os.chdir("/")
        torch.ones(2, device="mps").double()
        subprocess.run([sys.executable, "-W", "ignore", "-c", "import torch; torch.ones(2, device='mps').tolist()"])
    """
    done = run_program(code, ANYACCEL_VIRTUAL="mps", ANYACCEL_VIRTUAL_LEDGER=str(tmp_path / "ledger.json"))
    assert done.returncode == 0, done.stderr
    limits = {path.name: [row["limit"] for row in json.loads(path.read_text())] for path in tmp_path.iterdir()}
    assert limits.pop("ledger.json") == ["dtypes.float64"]
    assert list(limits.values()) == [["host_round_trip"]]


def test_without_the_variable_torch_loads_nothing_of_ours_but_a_few_lines() -> None:
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('anyaccel')))"
    done = run_program(code)
    assert done.stdout == "['anyaccel', 'anyaccel.emulator', 'anyaccel.emulator.autoload']\n"


def test_leaving_the_context_ends_the_enforcement_and_keeps_the_name() -> None:
    def use(accelerator: VirtualAccelerator) -> tuple[int, int, str]:
        x = torch.ones(2, device="mps")
        x.double()
        inside = len(accelerator.ledger.rows("error"))
        accelerator.enforcing = False  # what leaving the context does
        x.double()
        return inside, len(accelerator.ledger.rows("error")), str(x.device)

    assert run_forked("mps", use, strict=False) == (1, 1, "mps:0")


def test_one_name_a_process_and_one_context_at_a_time() -> None:
    def ask_again(accelerator: VirtualAccelerator) -> list[str]:
        words = []
        for name in ("hpu", "neuron"):
            try:
                with anyaccel.virtual(name):
                    words.append("taken")
            except VirtualDeviceError as error:
                words.append(error.message)
        accelerator.enforcing = False
        with anyaccel.virtual("hpu", strict=True) as again:
            words.append(f"again: {again.strict}")
        return words

    assert run_forked("hpu", ask_again) == [
        "a virtual hpu is running already",
        "this process has a virtual hpu already, and a second name cannot be added",
        "again: True",
    ]


def test_a_slot_that_a_vendor_holds_is_refused_with_the_reason() -> None:
    code = """
        import torch
        torch.utils.rename_privateuse1_backend("npu")
        import anyaccel
        try:
            with anyaccel.virtual("neuron"): pass
        except anyaccel.AnyaccelError as error: print(error.message)
    """
    assert "'npu' holds it already" in fork_program(code).stdout


def test_the_real_device_wins_where_its_software_is_here() -> None:
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
    assert done.stderr.startswith("anyaccel: the real device is used: ")


def test_a_virtual_device_is_shown_as_virtual_and_works_like_a_device() -> None:
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


def test_strict_raises_what_the_device_raises() -> None:
    def ask_for_float64(accelerator: VirtualAccelerator) -> None:
        torch.ones(2, device=accelerator.device()).double()

    with pytest.raises(LimitTypeError, match=r"float64.*https://github.com/pytorch/pytorch/issues/122602"):
        run_forked("mps", ask_for_float64, strict=True)
    with pytest.raises(LimitError) as caught:
        run_forked("npu", ask_for_float64, strict=True)
    assert not isinstance(caught.value, TypeError)
    assert caught.value.hint


def test_errors_of_a_call() -> None:
    for arguments, kind in [
        ({"name": "toaster"}, UnknownDeviceError),
        ({"name": "cpu"}, UsageError),
        ({"name": "hpu", "count": 0}, UsageError),
        ({"name": "hpu", "count": "2"}, UsageError),
        ({"name": "hpu", "memory": float("inf")}, UsageError),
        ({"name": "hpu", "memory": "-1GiB"}, UsageError),
    ]:
        with pytest.raises(kind), anyaccel.virtual(**arguments):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("96GB", 96 * 10**9), ("1.5 MiB", 3 * 2**19), ("512", 512), ("2kb", 2000)]
)
def test_how_a_size_reads(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_product_settles_its_own_limits() -> None:
    def ask(accelerator: VirtualAccelerator) -> tuple[int | None, list[str]]:
        torch.ones(2, device=accelerator.device(), dtype=torch.float16)
        return accelerator.capacity_bytes, [row.limit for row in accelerator.ledger.rows()]

    assert run_forked("hpu", ask, memory="gaudi1") == (32 * 10**9, ["dtypes.float16"])
    assert run_forked("hpu", ask, memory="gaudi2") == (96 * 10**9, [])
