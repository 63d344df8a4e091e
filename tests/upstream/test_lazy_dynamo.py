"""Lazy import of `torch._dynamo`: not imported by diffusers and transformers, and complete when it is used."""

import subprocess
import sys

PROGRAM = """
import sys
from anyaccel.upstream.lazy_dynamo import import_dynamo_lazily

import_dynamo_lazily()
import torch
from diffusers import FluxPipeline, StableDiffusionPipeline
from diffusers.utils.torch_utils import is_compiled_module, maybe_allow_in_graph
from transformers import CLIPTextModel, T5EncoderModel

model = torch.nn.Linear(2, 2)
assert not is_compiled_module(model)
assert maybe_allow_in_graph(torch.nn.Linear) is torch.nn.Linear
assert "torch._dynamo.symbolic_convert" not in sys.modules, "a library uses more than the decorators"
lazy = torch._dynamo
compiled = torch.compile(model, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
assert is_compiled_module(compiled)
assert torch._dynamo is lazy
assert lazy.symbolic_convert is sys.modules["torch._dynamo.symbolic_convert"]
torch._dynamo.reset()
print("done")
"""


def test_dynamo_is_imported_when_it_is_needed() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert process.stdout == "done\n", process.stderr


def test_imported_dynamo_is_kept() -> None:
    import torch._dynamo

    from anyaccel.upstream.lazy_dynamo import import_dynamo_lazily

    before = sys.modules["torch._dynamo"]
    import_dynamo_lazily()
    assert sys.modules["torch._dynamo"] is before
    assert torch._dynamo is before
