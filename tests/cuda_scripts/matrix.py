"""CUDA programs on virtual devices: each runs in its own process and is compared with the result on the CPU."""

import ast
import contextlib
import io
import multiprocessing
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

__all__ = [
    "DEVICES",
    "PROGRAMS",
    "UNSUPPORTED",
    "ProgramOutcome",
    "compare",
    "find_program",
    "preload",
    "run_on",
    "run_reference",
]

DEVICES = ("mps", "hpu", "neuron", "xpu", "npu", "mlu")
FOLDER = Path(__file__).parent / "programs"
PROGRAMS = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))

UNSUPPORTED = {
    "cuda_graph": "CUDAGraph cannot be mapped",
    "triton_kernel": "triton is a compiler for CUDA kernels",
}
"""Programs that only CUDA can run, with part of the error message."""
WITHOUT_REFERENCE = {
    "autocast": "autocast casts different operations on the CPU",
    "mixed_precision": "autocast casts different operations on the CPU",
}
HALF = {"text_to_image_half", "half_then_move", "available", "flux", "video"}
"""Programs in half precision, compared with a larger tolerance."""
TOLERANCE, HALF_TOLERANCE, PIXEL = 1e-3, 0.05, 1 / 255

Results = dict[str, Any]
_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class ProgramOutcome:
    """The result of a program on a device."""

    program: str
    device: str
    status: int
    results: Results
    """The files it wrote: images as values from 0 to 1, arrays unchanged."""
    stderr: str


def preload() -> None:
    """Import the modules of all programs once, before processes are forked."""
    for name in PROGRAMS:
        imports = [node for node in ast.parse(find_program(name).read_text()).body if isinstance(node, _IMPORTS)]
        if name in UNSUPPORTED:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # import-time warnings of libraries
            exec(compile(ast.Module(list(imports), []), name, "exec"), {})


def find_program(name: str) -> Path:
    """Return the file of a program."""
    return FOLDER / f"{name}.py"


def run_on(device: str, name: str, models: Path) -> ProgramOutcome:
    """Run a program like `anyaccel run --device virtual:DEVICE`, in a forked process."""

    def work(output: Path) -> int:
        from anyaccel.cuda_scripts.run_script import run_script

        return run_script(str(find_program(name)), [str(models), str(output)], f"virtual:{device}", verbose=True)

    return _run_in_fork(name, device, work)


def run_reference(name: str, models: Path) -> ProgramOutcome:
    """Run a program with plain diffusers on the CPU, with its device replaced in the source text."""
    text = find_program(name).read_text()
    text = text.replace('"cuda"', '"cpu"').replace('"cuda:0"', '"cpu"').replace(".cuda(", ".cpu(")
    text = text.replace("device=0", 'device="cpu"').replace('{"": 0}', '{"": "cpu"}').replace(".cpu(0)", ".cpu()")
    text = text.replace(".pin_memory().cpu(non_blocking=True)", "").replace(', device_map="balanced"', "")
    text = text.replace("torch.cuda.is_bf16_supported()", "True").replace("with torch.cuda.device(0), ", "if ")
    text = text.replace("if torch.cuda.stream(stream):", "if True:")
    text = re.sub(r"pipe\.enable_group_offload\((.|\n)*?\n\)", "", text)
    text = "\n".join(line for line in text.splitlines() if not re.search(_CUDA_ONLY_LINES, line))

    def work(output: Path) -> int:
        sys.argv = [name, str(models), str(output)]
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
        return 0

    return _run_in_fork(name, "cpu", work)


_CUDA_ONLY_LINES = (
    r"torch\.cuda\.(?!is_available)|offload\(|xformers|assert .*is_cuda|assert device ==|torch\.compile"
    r"|elapsed_time|\.record\(|properties|free, total|^stream\.|record_stream"
)
"""Lines that only query the device, wait for it or save memory, and that fail on a CPU."""


def _run_in_fork(name: str, device: str, work: Callable[[Path], int]) -> ProgramOutcome:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        worker = context.Process(target=_work, args=(sender, Path(folder), work), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            worker.start()
        sender.close()
        try:
            status, stderr = receiver.recv()
        except EOFError:
            status, stderr = 3, "the process died"
        worker.join()
        results = {path.name: _read(path) for path in sorted(Path(folder).iterdir()) if path.suffix in _READERS}
    return ProgramOutcome(name, device, status, results, stderr)


def _work(sender: Any, output: Path, work: Callable[[Path], int]) -> None:
    """Run in the forked process; send the exit status and stderr to the parent."""
    warnings.simplefilter("ignore")
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = work(output)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - the parent gets the traceback
            traceback.print_exc()
            status = 3
    sender.send((status, stderr.getvalue()))
    sender.close()


_READERS: dict[str, Callable[[Path], Any]] = {
    ".png": lambda path: np.asarray(Image.open(path), dtype=np.float32) / 255,
    ".npy": lambda path: np.load(path),
}


def _read(path: Path) -> Any:
    return _READERS[path.suffix](path)


def compare(outcome: ProgramOutcome, reference: ProgramOutcome | None) -> str:
    """Return a description of the problem with an outcome; an empty string if there is none."""
    if outcome.program in UNSUPPORTED:
        has_reason = UNSUPPORTED[outcome.program] in outcome.stderr and f"{outcome.program}.py:" in outcome.stderr
        return "" if outcome.status == 1 and has_reason else "failed without the expected reason"
    if outcome.status:
        return _last_line(outcome.stderr)
    if not outcome.results:
        return "no output files"
    for name, result in outcome.results.items():
        if not np.isfinite(result).all():
            return f"{name} contains NaN or Inf"
    return "" if reference is None else _differ(outcome, reference)


def _differ(outcome: ProgramOutcome, reference: ProgramOutcome) -> str:
    if reference.status or outcome.results.keys() != reference.results.keys():
        return f"the reference did not run: {_last_line(reference.stderr)}"
    tolerance = HALF_TOLERANCE if outcome.program in HALF else TOLERANCE
    for name, result in outcome.results.items():
        difference = float(np.abs(result - reference.results[name]).max())
        if difference > tolerance + (PIXEL if name.endswith(".png") else 0.0):
            return f"{name} differs by {difference:.2g} from the CPU's"
    return ""


def _last_line(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("anyaccel:")]
    return lines[-1][:300] if lines else "no output"
