"""Every recipe makes a real pipeline that runs here, and gives the same picture twice."""

import subprocess
import sys
from typing import Any

import numpy
import pytest

from anyaccel.processes.forked_call import call_in_fork
from anyaccel.recipes import NOT_COVERED, Recipe, recipes, run
from tests.conftest import NEEDS_RECIPES, Kept

RECIPES = recipes()

pytestmark = [
    NEEDS_RECIPES,
    # torch's Tensor.__array__ takes no `copy`, and diffusers' schedulers call numpy.array(tensor).
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
    # Chroma's own transformer uses the deprecated name of a class of FLUX.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    # The autoencoder of Stable Audio and the vocoders are built with the older of torch's two weight norms.
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"),
    # Mochi asks for autocast to float32, which torch has not on a CPU and then leaves out.
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    # Importing AudioLDM 2 imports VITS, which transformers compiles as it is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # Text2Video-Zero calls two functions of torch in their older way.
    pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning"),
    pytest.mark.filterwarnings("ignore:Default grid_sample and affine_grid behavior has changed:UserWarning"),
    # RePaint calls its own deprecated function.
    pytest.mark.filterwarnings("ignore:The preprocess method is deprecated:FutureWarning"),
    # PRX inherits from the deprecated name of a class.
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning"),
    # The pipeline of T2I-Adapter calls its own deprecated method.
    pytest.mark.filterwarnings("ignore:The decode_latents method is deprecated:FutureWarning"),
]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_recipe_makes_a_pipeline_that_gives_the_same_twice(recipe: Recipe, kept: Kept) -> None:
    import torch

    before = torch.get_rng_state()
    pipe: Any = recipe.make()
    assert torch.equal(before, torch.get_rng_state())
    check_pipeline(pipe, recipe)
    first = generate_image(recipe, pipe)
    assert first.dtype == numpy.float32
    assert numpy.isfinite(first).all()
    assert first.std() > 1e-3
    again = kept.find(f"picture-{recipe.name}")  # of another pipeline in another process, which the chart made
    if again is None:
        again = generate_image(recipe, recipe.make())
        kept.keep(f"picture-{recipe.name}", again)
    numpy.testing.assert_array_equal(again, first)


def generate_image(recipe: Recipe, pipe: Any) -> Any:
    """What the pipeline makes, which takes none of torch's own draws; gradients are for another process."""
    import torch

    def make() -> Any:
        before = torch.get_rng_state()
        made = run(recipe, pipe)
        assert torch.equal(before, torch.get_rng_state())
        return made

    return call_in_fork(make) if recipe.name == "attend-and-excite" else make()


def check_pipeline(pipe: Any, recipe: Recipe) -> None:
    """It is of the class that the recipe names, float32, and for inference."""
    import torch

    assert type(pipe).__name__ == recipe.pipeline
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert modules
    for module in modules:
        assert not any(child.training for child in module.modules())
        assert {parameter.dtype for parameter in module.parameters()} <= {torch.float32}


def test_names_are_in_kebab_case_and_families_are_too() -> None:
    for recipe in RECIPES.values():
        for name in (recipe.name, recipe.family):
            assert name.replace("-", "").isalnum()
            assert name == name.lower()


def test_a_pipeline_is_covered_or_not() -> None:
    import diffusers

    covered = {recipe.pipeline for recipe in RECIPES.values()}
    assert covered & NOT_COVERED.keys() == set()
    for name, reason in NOT_COVERED.items():
        assert hasattr(diffusers, name)
        assert reason


def test_the_list_of_recipes_loads_no_torch() -> None:
    code = (
        "import sys; from anyaccel.recipes import recipes; assert recipes(); "
        "print({'torch', 'diffusers', 'transformers', 'numpy', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
