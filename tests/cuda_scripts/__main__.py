"""Run programs on devices and print a table.

Usage: `python -m tests.cuda_scripts [--json FILE] [--devices mps,…] [PROGRAM…]`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from tests.cuda_scripts.matrix import (
    DEVICES,
    PROGRAMS,
    UNSUPPORTED,
    WITHOUT_REFERENCE,
    compare,
    preload,
    run_on,
    run_reference,
)
from tests.cuda_scripts.models import make_models


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="*", default=PROGRAMS)
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--errors", action="store_true", help="Print the output of each failure.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    devices = arguments.devices.split(",")
    models = arguments.models or make_models(Path(tempfile.mkdtemp()))
    rows, start = [], time.time()
    print(f"{'program':26}" + "".join(f"{device:8}" for device in devices) + "   on virtual devices")
    for program in arguments.programs:
        reference = None
        if program not in WITHOUT_REFERENCE and program not in UNSUPPORTED:
            reference = run_reference(program, models)
        line, problems = f"{program:26}", []
        for device in devices:
            outcome = run_on(device, program, models)
            problem = compare(outcome, reference)
            state = "failed" if problem else "refused" if program in UNSUPPORTED else "ran"
            compared = reference is not None and not problem
            rows.append({"program": program, "device": device, "state": state, "compared": compared, "why": problem})
            line += f"{state:8}"
            if problem:
                problems.append(f"    {device}: {problem}")
                if arguments.errors:
                    print(outcome.stderr)
        print("\n".join([line, *problems]), flush=True)
    ran = sum(row["state"] == "ran" for row in rows)
    refused = sum(row["state"] == "refused" for row in rows)
    share, elapsed_s = ran / len(rows), time.time() - start
    print(
        f"{ran} of {len(rows)} ran unmodified ({share:.0%}), {refused} were rejected with a reason; {elapsed_s:.0f} s"
    )
    if arguments.json:
        summary = {"ran": ran, "refused": refused, "of": len(rows), "virtual": True, "rows": rows}
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
