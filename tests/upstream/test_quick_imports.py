"""Quick imports for tracing: unused packages are skipped, and the list of packages is that of Python."""

import importlib.metadata
import subprocess
import sys

from anyaccel.upstream.quick_imports import list_packages, quick_package_lists

PROGRAM = """
import sys
from anyaccel.upstream.quick_imports import import_for_tracing

import_for_tracing()
from diffusers import FluxPipeline, StableDiffusionPipeline, WanPipeline
from diffusers.loaders.lora_base import LoraBaseMixin
from transformers import CLIPTextModel, UMT5EncoderModel

for name in ("peft.tuners", "torch._dynamo.symbolic_convert"):
    assert name not in sys.modules, name
print("done")
"""


def test_unused_packages_are_not_imported() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert process.stdout == "done\n", process.stderr


def test_packages_are_those_that_python_lists() -> None:
    before = importlib.metadata.packages_distributions
    packages = {name: sorted(distributions) for name, distributions in before().items()}
    assert {name: sorted(distributions) for name, distributions in list_packages().items()} == packages
    with quick_package_lists():
        assert importlib.metadata.packages_distributions() is importlib.metadata.packages_distributions()
    assert importlib.metadata.packages_distributions is before
