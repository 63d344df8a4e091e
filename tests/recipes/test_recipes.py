"""Every recipe creates a real pipeline that runs on the CPU and generates the same image twice.

`make check` runs every sixth recipe, and `make test-slow` the others.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import NOT_COVERED, Recipe, recipes, run
from anyaccel.recipes.parts import tokenizer_backends, tokenizers
from tests.conftest import NEEDS_RECIPES, SharedCache

RECIPES = recipes()
BASE_CLASSES = ("DiffusionPipeline", "ModularPipeline")

pytestmark = [
    NEEDS_RECIPES,
    # torch's Tensor.__array__ does not accept `copy`, and diffusers' schedulers call numpy.array(tensor).
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
    # Chroma's transformer uses a deprecated alias of a FLUX class.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    # The Stable Audio autoencoder and the vocoders use torch's deprecated weight norm.
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
    # Mochi requests autocast to float32, which torch does not support on the CPU and disables.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # AudioLDM 2 imports VITS from transformers, which calls torch.jit.script at import time.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # Text2Video-Zero calls two torch functions without arguments that torch now expects.
    pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning"),
    pytest.mark.filterwarnings("ignore:Default grid_sample and affine_grid behavior has changed:UserWarning"),
    # RePaint calls its own deprecated method.
    pytest.mark.filterwarnings("ignore:The preprocess method is deprecated:FutureWarning"),
    # PRX inherits from a deprecated alias of a class.
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning"),
    # Helios's scheduler passes tensors to numpy.linspace.
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
    # AnyFlow-FAR, Kandinsky 6 and the diffusion decoder of LTX-2 use flex attention, which is slow without compilation.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # Nucleus-Image creates a linear layer without outputs.
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning"),
    # DiffusionGemma's model in transformers is decorated with torch.jit.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # The T2I-Adapter pipeline calls its own deprecated method.
    pytest.mark.filterwarnings("ignore:The decode_latents method is deprecated:FutureWarning"),
]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=pytest.mark.slow if number % 6 else ())
        for number, (name, recipe) in enumerate(RECIPES.items())
    ],
)
def test_a_recipe_makes_a_pipeline_that_gives_the_same_twice(recipe: Recipe, shared_cache: SharedCache) -> None:
    import torch

    before = torch.get_rng_state()
    pipe: Any = recipe.make()
    assert torch.equal(before, torch.get_rng_state())
    check_pipeline(pipe, recipe)
    first = generate_image(recipe, pipe)
    assert first.dtype == numpy.float32
    assert numpy.isfinite(first).all()
    assert first.std() > 1e-3
    again = shared_cache.find(f"image-{recipe.name}")  # from another process, cached by the chart tests
    if again is None:
        again = generate_image(recipe, recipe.make())
        shared_cache.keep(f"image-{recipe.name}", again)
    numpy.testing.assert_array_equal(again, first)


def generate_image(recipe: Recipe, pipe: Any) -> Any:
    """Return the output of a pipeline and check that the global random state does not change.

    Attend-and-Excite computes gradients, so it runs in a fork.
    """
    import torch

    def make() -> Any:
        before = torch.get_rng_state()
        output = run(recipe, pipe)
        assert torch.equal(before, torch.get_rng_state())
        return output

    return call_in_fork(make) if recipe.name == "attend-and-excite" else make()


def check_pipeline(pipe: Any, recipe: Recipe) -> None:
    """Check that the pipeline has the recipe's class, float32 weights, and modules in eval mode."""
    import torch

    assert type(pipe).__name__ == recipe.pipeline
    modules = [component for component in pipe.components.values() if isinstance(component, torch.nn.Module)]
    assert modules
    for module in modules:
        assert not any(child.training for child in module.modules())
        assert {parameter.dtype for parameter in module.parameters()} <= {torch.float32}


def test_names_are_in_kebab_case_and_families_are_too() -> None:
    for recipe in RECIPES.values():
        for name in (recipe.name, recipe.family):
            assert name.replace("-", "").isalnum()
            assert name == name.lower()


def test_every_pipeline_class_of_diffusers_has_a_recipe_or_a_reason() -> None:
    covered = {recipe.pipeline for recipe in RECIPES.values()}
    assert covered & NOT_COVERED.keys() == set()
    assert all(NOT_COVERED.values())
    current = set(list_current_classes())
    assert NOT_COVERED.keys() <= current
    assert current - covered - NOT_COVERED.keys() == set()


def list_current_classes() -> Iterator[str]:
    """Yield the pipeline classes that diffusers exports and that are not deprecated; also those without libraries."""
    import diffusers

    for name in dir(diffusers):
        if not name.endswith("Pipeline") or name in BASE_CLASSES:
            continue
        cls = getattr(diffusers, name)
        if ".deprecated." not in cls.__module__:
            yield name


def test_the_list_of_recipes_loads_no_torch() -> None:
    code = (
        "import sys; from anyaccel.recipes import recipes; assert recipes(); "
        "print({'torch', 'diffusers', 'transformers', 'numpy', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_tokenizers_of_transformers_4_have_the_backends_of_transformers_5() -> None:
    backends = json.loads(Path(tokenizer_backends.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    made = [getattr(tokenizers, name)() for name in tokenizers.__all__ if name.endswith("_tokenizer")]
    checked = {}
    for tokenizer in made:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        del state["model"]["vocab"]
        checked[type(tokenizer).__name__] = state | {"added_tokens": []}
    assert {name: checked[name] for name in backends} == backends
