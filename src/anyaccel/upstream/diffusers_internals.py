"""Private details of diffusers. Seen in diffusers 0.42.1. Paths below are relative to the package."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMPONENTS_BAR",
    "GROUP_OFFLOADING",
    "HOOK_ATTRIBUTE",
    "PIPELINE_HOOKS",
    "PREFETCH_HOOKS",
    "SKIPPED_LAYERS",
    "allow_uneven_shares",
    "casts_components",
    "find_denoising_step",
    "find_renamed_class",
    "has_hook",
    "is_argument_error",
    "is_uneven_share",
    "make_tensor_parallel_config",
    "name_dtype_argument",
    "read_alpha_sigma",
    "read_float32_modules",
    "read_never_offloaded",
    "read_parallel_plan",
    "read_progress_bar_config",
    "read_repeated_blocks",
    "read_step_count",
    "read_tensor_parallel_devices",
    "supports_group_offloading",
    "unpack_latents",
    "use_mesh",
    "use_progress_bars",
]

HOOK_ATTRIBUTE = "_diffusers_hook"
"""Where a module holds its `HookRegistry` (hooks/hooks.py)."""
GROUP_OFFLOADING = "group_offloading"
"""The name of the hook of group offloading, whose group has `offload_` (hooks/group_offloading.py)."""
PREFETCH_HOOKS = ("layer_execution_tracker", "lazy_prefetch_group_offloading")
"""The hooks that find the order of the layers in the first forward, to fetch the next one ahead."""
SKIPPED_LAYERS = "It seems like some layers were not executed"
"""The start of its warning about layers that the first forward left out; they are fetched when they run."""
PIPELINE_HOOKS = "_all_hooks"
"""Where a pipeline holds the hooks of its offloading (pipelines/pipeline_utils.py)."""
COMPONENTS_BAR = "Loading pipeline components"
"""The start of the text beside the progress bar of `from_pretrained` (pipelines/pipeline_utils.py)."""
_UNEVEN = "must be divisible by mesh size"
"""Part of the assertion of `EquipartitionSharder.shard` (hooks/context_parallel.py)."""


def has_hook(attributes: Mapping[str, Any]) -> bool:
    """Return whether a module with this `__dict__` has a hook: `cache_context` adds an empty registry."""
    registry = attributes.get(HOOK_ATTRIBUTE)
    return registry is not None and bool(registry.hooks)


def is_argument_error(error: BaseException) -> bool:
    """Return whether a pipeline's own `check_inputs` raised the error (every pipelines/*/pipeline_*.py)."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_code.co_name == "check_inputs"


def find_denoising_step(frame: FrameType) -> int | None:
    """Return the step of the denoising loop that a frame of `__call__` is in; None outside of the loop.

    The loop of every pipeline is `for i, t in enumerate(timesteps)` (pipelines/*/pipeline_*.py). In a loop over `t`
    that does not count in `i` the step is 0.
    """
    if frame.f_locals.get("self") is None or "t" not in frame.f_locals:
        return None
    if not any(first <= frame.f_lineno <= last for first, last in _find_loops(frame.f_code)):
        return None
    step = frame.f_locals.get("i")
    return step if isinstance(step, int) else 0


@lru_cache(maxsize=1024)
def _find_loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return the first and last line of the body of each loop over `t`; none where the source is not available."""
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, IndentationError):
        return ()
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and "t" in _read_names(node.target)]
    return tuple((loop.body[0].lineno + start - 1, (loop.end_lineno or 0) + start - 1) for loop in loops)


def _read_names(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def read_float32_modules(model: Any) -> tuple[str, ...]:
    """Return the names of modules that stay in float32: `_keep_in_fp32_modules` (models/modeling_utils.py)."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())


def read_repeated_blocks(model: Any) -> frozenset[str]:
    """Return the classes of a model's repeated blocks: `_repeated_blocks` (models/modeling_utils.py)."""
    return frozenset(getattr(model, "_repeated_blocks", None) or ())


def read_parallel_plan(model: Any, way: str) -> Mapping[str, Any]:
    """Return how a model is split by "context" (`_cp_plan`) or "tensor" (`_tp_plan`); models/modeling_utils.py."""
    return getattr(model, {"context": "_cp_plan", "tensor": "_tp_plan"}[way], None) or {}


def read_tensor_parallel_devices() -> tuple[str, ...]:
    """Return the device types on which weights can be split (hooks/tensor_parallel.py)."""
    return tuple(importlib.import_module("diffusers.hooks.tensor_parallel")._SUPPORTED_TP_DEVICES)


def make_tensor_parallel_config(ranks: int, mesh: Any) -> Any:
    """Return a `TensorParallelConfig`, which is not exported (models/_modeling_parallel.py)."""
    return importlib.import_module("diffusers.models._modeling_parallel").TensorParallelConfig(
        tp_degree=ranks, mesh=mesh
    )


@contextmanager
def use_mesh(model: Any, mesh: Any, device: Any) -> Iterator[None]:
    """Let `enable_parallelism` take a mesh and a device as they are, while the block runs.

    `_resolve_parallel_config` (models/modeling_utils.py) derives both from torch's accelerator and divides by the
    number of its devices, which is zero on a CPU.
    """
    import torch

    kinds = importlib.import_module("diffusers.models._modeling_parallel")

    def resolve(config: Any) -> Any:
        which = "context" if isinstance(config, kinds.ContextParallelConfig) else "tensor"
        resolved = kinds.ParallelConfig(**{f"{which}_parallel_config": config})
        resolved.setup(torch.distributed.get_rank(), torch.distributed.get_world_size(), device, mesh=mesh)
        model._parallel_config = resolved
        return resolved

    vars(model)["_resolve_parallel_config"] = resolve
    try:
        yield
    finally:
        del vars(model)["_resolve_parallel_config"]


def is_uneven_share(error: AssertionError) -> bool:
    """Return whether a sequence cannot be split into equal parts (hooks/context_parallel.py)."""
    return _UNEVEN in str(error)


def allow_uneven_shares(model: Any) -> None:
    """Let context parallelism split a sequence into parts of different lengths (models/_modeling_parallel.py)."""
    model._parallel_config.context_parallel_config.ulysses_anything = True


def name_dtype_argument() -> str:
    """Return the name of the dtype's argument: newer versions warn about `torch_dtype` (utils/deprecation_utils.py)."""
    deprecation = importlib.import_module("diffusers.utils.deprecation_utils")
    return "dtype" if hasattr(deprecation, "_resolve_dtype") else "torch_dtype"


def casts_components(kind: Any) -> bool:
    """Return whether `kind.from_pipe` casts components to float32 unless a dtype is given.

    Pipelines do, by way of `_get_signature_keys` (pipelines/pipeline_utils.py); the AutoPipeline classes do not.
    """
    return hasattr(kind, "_get_signature_keys")


def read_never_offloaded(pipe: Any) -> tuple[str, ...]:
    """Return the names of the models that offloading leaves on the device (pipelines/pipeline_utils.py)."""
    return tuple(getattr(pipe, "_exclude_from_cpu_offload", ()))


def supports_group_offloading(model: Any) -> bool:
    """Return whether a model's layers may be moved one by one; other libraries' may (models/modeling_utils.py)."""
    return bool(getattr(model, "_supports_group_offloading", True))


def read_step_count(pipe: Any) -> int | None:
    """Return the number of steps of the running call, where a pipeline notes it (`_num_timesteps`, pipelines/*/)."""
    count = getattr(pipe, "_num_timesteps", None)
    return count if isinstance(count, int) else None


def read_progress_bar_config(pipe: Any) -> dict[str, Any]:
    """Return what `set_progress_bar_config` was called with; empty if it was not (pipelines/pipeline_utils.py)."""
    return getattr(pipe, "_progress_bar_config", None) or {}


@contextmanager
def use_progress_bars(make_bar: Callable[..., Any]) -> Iterator[None]:
    """Let `make_bar` make the progress bars of `from_pretrained` during the block (utils/logging.py, `tqdm`)."""
    logging: Any = importlib.import_module("diffusers.utils.logging")
    before, logging.tqdm = logging.tqdm, make_bar
    try:
        yield
    finally:
        logging.tqdm = before


def read_alpha_sigma(scheduler: Any, sigma: float) -> tuple[float, float] | None:
    """Return alpha and sigma of a noise level, by multistep schedulers' `_sigma_to_alpha_sigma_t`; None for others."""
    import torch

    convert = getattr(scheduler, "_sigma_to_alpha_sigma_t", None)
    if convert is None:
        return None
    alpha, scaled = convert(torch.tensor(sigma))
    return float(alpha), float(scaled)


def unpack_latents(pipe: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return packed latents as images, by `_unpack_latents` (pipelines/flux/pipeline_flux.py); others as they are."""
    unpack: Callable[..., torch.Tensor] | None = getattr(pipe, "_unpack_latents", None)
    return latents if unpack is None else unpack(latents, height, width, pipe.vae_scale_factor)


def find_renamed_class(config: Mapping[str, Any], kind: type) -> type:
    """Return the class that replaces an older one for a model's config (models/model_loading_utils.py)."""
    loading: Any = importlib.import_module("diffusers.models.model_loading_utils")
    found: type = loading._fetch_remapped_cls_from_config(config, kind)
    return found
