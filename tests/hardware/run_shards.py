"""Run the invalidation tests in parallel processes on one device: `python -m tests.hardware.run_shards 12`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent / "test_invalidation.py"


def main() -> int:
    """Run the shards, print the output of each, and return how many failed."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=3",
        str(TESTS),
        *sys.argv[2:],
    ]
    with tempfile.TemporaryDirectory() as folder:
        # A new compile cache, and one compiler thread per process: the processes already use all cores.
        environment = {**os.environ, "ANYACCEL_CACHE": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        files = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115 - closed below
        shards = [
            subprocess.Popen(
                command, env={**environment, "TEST_SHARD": f"{shard}/{count}"}, stdout=file, stderr=subprocess.STDOUT
            )
            for shard, file in enumerate(files)
        ]
        # 5: the shard has no tests.
        failures = sum(shard.wait() not in (0, 5) for shard in shards)
        for file in files:
            file.seek(0)
            print(file.read())
            file.close()
    print(f"{failures} of {count} shards failed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
