"""Private APIs of diffusers, as of diffusers 0.42.1. File paths are relative to its package."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "ATTENTION_LIBRARIES",
    "COMPONENTS_BAR",
    "GROUP_OFFLOADING",
    "HOOK_ATTRIBUTE",
    "PIPELINE_HOOKS",
    "PREFETCH_HOOKS",
    "SKIPPED_LAYERS",
    "STATELESS_HOOKS",
    "allow_uneven_shares",
    "casts_components",
    "find_denoising_step",
    "find_renamed_class",
    "find_slicing_obstacle",
    "has_custom_processors",
    "has_hook",
    "is_argument_error",
    "is_hook_forward",
    "is_uneven_share",
    "list_hooks",
    "make_tensor_parallel_config",
    "read_alpha_sigma",
    "read_attention_backends",
    "read_dtype_argument",
    "read_float32_modules",
    "read_layerwise_dtype",
    "read_module",
    "read_never_offloaded",
    "read_offload_order",
    "read_optional_components",
    "read_parallel_plan",
    "read_repeated_blocks",
    "read_step_count",
    "read_tensor_parallel_devices",
    "read_uncast_layers",
    "stop_layerwise_casting",
    "supports_group_offloading",
    "unpack_latents",
    "use_mesh",
    "use_progress_bars",
]

# Calls with which pipelines change their models.
_MODEL_CHANGE = re.compile(
    r"\bset_attn_processor\(|_set_pag_attn_processor\(|\bregister_forward_hook\(|\benable_fuser\(|_set_ar_attention\("
    r"|\bkv_cache\b"
)
_BASE_LIBRARIES = ("builtins", "typing", "abc", "huggingface_hub", "anyaccel")
# Libraries from which diffusers imports attention functions (models/attention_dispatch.py).
ATTENTION_LIBRARIES = frozenset(("flash_attn", "flash_attn_interface", "sageattention", "xformers"))
# Attribute of a module that contains its `HookRegistry` (hooks/hooks.py).
HOOK_ATTRIBUTE = "_diffusers_hook"
# Name of the group-offloading hook; its group has `offload_()` (hooks/group_offloading.py).
GROUP_OFFLOADING = "group_offloading"
# Hooks that record the order of layers in the first forward, for prefetching (hooks/group_offloading.py).
PREFETCH_HOOKS = ("layer_execution_tracker", "lazy_prefetch_group_offloading")
# Hooks that move or cast weights, and do not change or store what a layer computes (hooks/*.py).
STATELESS_HOOKS = (GROUP_OFFLOADING, *PREFETCH_HOOKS, "layerwise_casting", "peft_autocast_disable")
# Start of the warning about layers that the first forward did not run; they are loaded on demand.
SKIPPED_LAYERS = "It seems like some layers were not executed"
# Attribute of a pipeline that contains its offloading hooks (pipelines/pipeline_utils.py).
PIPELINE_HOOKS = "_all_hooks"
# Start of the progress-bar description of `from_pretrained` (pipelines/pipeline_utils.py).
COMPONENTS_BAR = "Loading pipeline components"
# Part of the assertion message of `EquipartitionSharder.shard` (hooks/context_parallel.py).
_NOT_DIVISIBLE = "must be divisible by mesh size"


def has_hook(attributes: Mapping[str, Any]) -> bool:
    """Return whether a module with the given `__dict__` has a diffusers hook (hooks/hooks.py)."""
    # An empty registry does not count: `cache_context` adds one to every denoiser.
    registry = attributes.get(HOOK_ATTRIBUTE)
    return registry is not None and bool(registry.hooks)


def is_hook_forward(forward: Any) -> bool:
    """Return whether a hook registry has created this `forward` (hooks/hooks.py, `HookRegistry.register_hook`)."""
    function = forward.func if isinstance(forward, functools.partial) else None
    return getattr(function, "__module__", None) == "diffusers.hooks.hooks"


def list_hooks(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the diffusers hooks of a module with the given `__dict__` (hooks/hooks.py)."""
    registry = attributes.get(HOOK_ATTRIBUTE)
    return () if registry is None else tuple(registry.hooks)


def read_layerwise_dtype(layer: Any) -> Any:
    """Return the dtype in which a layer computes with layerwise casting, or None (hooks/layerwise_casting.py)."""
    registry = vars(layer).get(HOOK_ATTRIBUTE)
    hook = None if registry is None else registry.hooks.get("layerwise_casting")
    return None if hook is None else hook.compute_dtype


def stop_layerwise_casting(layer: Any) -> Any:
    """Return the dtype in which a layer with layerwise casting computes, and stop casting; None if it has none.

    The hook cannot be removed (hooks/layerwise_casting.py, `deinitalize_hook`), so its functions are replaced.
    """
    dtype = read_layerwise_dtype(layer)
    if dtype is None:
        return None
    registry = vars(layer)[HOOK_ATTRIBUTE]
    if list(registry.hooks) == ["layerwise_casting"]:
        # A deep copy of a layer with a registry would run the original layer.
        del vars(layer)[HOOK_ATTRIBUTE], vars(layer)["forward"]
        return dtype
    reference = registry._fn_refs[registry._hook_order.index("layerwise_casting")]
    reference.pre_forward, reference.post_forward = _keep_arguments, _keep_output
    return dtype


def _keep_arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _keep_output(module: Any, output: Any) -> Any:
    return output


def read_module(registry: Any) -> Any:
    """Return the module of a hook registry (hooks/hooks.py)."""
    return registry._module_ref


def is_argument_error(error: BaseException) -> bool:
    """Return whether a pipeline raised the error for an argument (pipelines/*/pipeline_*.py).

    Pipelines check arguments in `check_inputs`, and the length of a list of generators in `prepare_latents`.
    """
    # Pipelines raise a plain ValueError or TypeError, so only the name of the raising function identifies it.
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    # Errors of a user's pipeline stay as they are: the user may catch them by their type.
    if innermost is None or type(error) not in (ValueError, TypeError) or not _is_from_diffusers(innermost.tb_frame):
        return False
    name = innermost.tb_frame.f_code.co_name
    return name == "check_inputs" or (name == "prepare_latents" and "list of generators" in str(error))


def _is_from_diffusers(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("diffusers.")


@lru_cache
def changes_models(pipeline_class: type) -> bool:
    """Return whether a pipeline may change its models during a call.

    Examples are perturbed-attention guidance, self-attention guidance and attend-and-excite. Other calls that
    use the same models concurrently would then have wrong results. A class without source may change them.
    """
    try:
        return any(_MODEL_CHANGE.search(source) for source in _list_sources(pipeline_class))
    except OSError:
        return True


def _list_sources(pipeline_class: type) -> Iterator[str]:
    """Yield the source of the modules of diffusers, and of the classes of users, that a pipeline class consists of."""
    for base in pipeline_class.__mro__:
        library = base.__module__.partition(".")[0]
        if base.__module__.startswith("diffusers.pipelines.") and not base.__module__.endswith(".pipeline_utils"):
            yield inspect.getsource(sys.modules[base.__module__])
        elif library != "diffusers" and library not in _BASE_LIBRARIES:
            yield inspect.getsource(base)


def read_attention_backends() -> dict[Any, Any]:
    """Return the registered attention functions by name (models/attention_dispatch.py)."""
    registry = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)
    backends: dict[Any, Any] = getattr(registry, "_backends", {})
    return backends


def has_custom_processors(model: torch.nn.Module) -> bool:
    """Return whether attention layers have processors other than those of diffusers.

    `enable_attention_slicing` replaces them (models/attention_processor.py).
    """
    processors = (getattr(layer, "processor", None) for layer in model.modules() if hasattr(layer, "set_processor"))
    return any(
        processor is not None and not type(processor).__module__.startswith("diffusers.") for processor in processors
    )


def find_denoising_step(frame: FrameType) -> int | None:
    """Return the index of the current denoising step in a pipeline's `__call__` frame.

    Returns None outside the denoising loop. Every pipeline has a `for i, t in enumerate(timesteps)`
    loop (pipelines/*/pipeline_*.py). In loops over `t` without an index `i`, the step is 0.
    """
    if frame.f_locals.get("self") is None or "t" not in frame.f_locals:
        return None
    # `i` and `t` are still set after the loop, so compare line numbers.
    if not any(first <= frame.f_lineno <= last for first, last in _find_loops(frame.f_code)):
        return None
    step = frame.f_locals.get("i")
    return step if isinstance(step, int) else 0


@lru_cache(maxsize=1024)
def _find_loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return the first and last line numbers of each loop over `t` in a function.

    Returns an empty tuple if the source is not available.
    """
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
    """Return the names of modules kept in float32 (models/modeling_utils.py, `_keep_in_fp32_modules`)."""
    return tuple(getattr(model, "_keep_in_fp32_modules", None) or ())


def read_uncast_layers(model: Any) -> tuple[str, ...]:
    """Return patterns of the names of layers that layerwise casting skips (hooks/layerwise_casting.py)."""
    from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

    return (*DEFAULT_SKIP_MODULES_PATTERN, *(getattr(model, "_skip_layerwise_casting_patterns", None) or ()))


def read_repeated_blocks(model: Any) -> frozenset[str]:
    """Return the class names of a model's repeated blocks (models/modeling_utils.py, `_repeated_blocks`)."""
    return frozenset(getattr(model, "_repeated_blocks", None) or ())


def read_parallel_plan(model: Any, kind: str) -> Mapping[str, Any]:
    """Return a model's sharding plan for "context" or "tensor" parallelism (models/modeling_utils.py)."""
    return getattr(model, {"context": "_cp_plan", "tensor": "_tp_plan"}[kind], None) or {}


def read_tensor_parallel_devices() -> tuple[str, ...]:
    """Return the device types that support tensor parallelism (hooks/tensor_parallel.py)."""
    return tuple(importlib.import_module("diffusers.hooks.tensor_parallel")._SUPPORTED_TP_DEVICES)


def make_tensor_parallel_config(ranks: int, mesh: Any) -> Any:
    """Return a `TensorParallelConfig`, which diffusers does not export (models/_modeling_parallel.py)."""
    return importlib.import_module("diffusers.models._modeling_parallel").TensorParallelConfig(
        tp_degree=ranks, mesh=mesh
    )


@contextmanager
def use_mesh(model: Any, mesh: Any, device: Any) -> Iterator[None]:
    """Make a model's `enable_parallelism` use this mesh and device inside the `with` block.

    See `_resolve_parallel_config` in models/modeling_utils.py.
    """
    import torch

    # `_resolve_parallel_config` derives both from torch's accelerator and divides by its device count, which is zero on
    # a machine without an accelerator.
    parallel = importlib.import_module("diffusers.models._modeling_parallel")

    def resolve(config: Any) -> Any:
        kind = "context" if isinstance(config, parallel.ContextParallelConfig) else "tensor"
        resolved = parallel.ParallelConfig(**{f"{kind}_parallel_config": config})
        resolved.setup(torch.distributed.get_rank(), torch.distributed.get_world_size(), device, mesh=mesh)
        model._parallel_config = resolved
        return resolved

    # Set on the instance, so other models of the class are not affected.
    vars(model)["_resolve_parallel_config"] = resolve
    try:
        yield
    finally:
        del vars(model)["_resolve_parallel_config"]


def is_uneven_share(error: AssertionError) -> bool:
    """Return whether an error means that the sequence length is not divisible by the mesh size.

    See hooks/context_parallel.py.
    """
    return _NOT_DIVISIBLE in str(error)


def allow_uneven_shares(model: Any) -> None:
    """Allow context parallelism to split a sequence unevenly (models/_modeling_parallel.py)."""
    model._parallel_config.context_parallel_config.ulysses_anything = True


def read_dtype_argument() -> str:
    """Return the name of the dtype argument of `from_pretrained`: `dtype` or `torch_dtype`.

    See utils/deprecation_utils.py.
    """
    # Newer versions warn about `torch_dtype`, older ones do not know `dtype`.
    deprecation = importlib.import_module("diffusers.utils.deprecation_utils")
    return "dtype" if hasattr(deprecation, "_resolve_dtype") else "torch_dtype"


def casts_components(pipeline_class: Any) -> bool:
    """Return whether a class's `from_pipe` casts components to float32 by default.

    Pipeline classes cast them (pipelines/pipeline_utils.py); the AutoPipeline classes do not.
    """
    return hasattr(pipeline_class, "_get_signature_keys")


def read_never_offloaded(pipe: Any) -> tuple[str, ...]:
    """Return the names of the models that CPU offloading skips (pipelines/pipeline_utils.py)."""
    return tuple(getattr(pipe, "_exclude_from_cpu_offload", ()))


def read_offload_order(pipe: Any) -> tuple[str, ...]:
    """Return the names of the models that replace one another under CPU offloading, in the order of their calls."""
    order = str(getattr(pipe, "model_cpu_offload_seq", None) or "").split("->")
    return tuple(name for name in order if name)


def read_optional_components(pipeline_class: Any) -> tuple[str, ...]:
    """Return the names of the components that a pipeline works without (pipelines/pipeline_utils.py)."""
    return tuple(getattr(pipeline_class, "_optional_components", ()))


def supports_group_offloading(model: Any) -> bool:
    """Return whether a model supports group offloading (models/modeling_utils.py)."""
    # Models of other libraries have no such attribute; group offloading works for any nn.Module.
    return bool(getattr(model, "_supports_group_offloading", True))


def read_step_count(pipe: Any) -> int | None:
    """Return the number of steps in the current call, or None if the pipeline does not store it.

    See `_num_timesteps` in pipelines/*/pipeline_*.py.
    """
    count = getattr(pipe, "_num_timesteps", None)
    return count if isinstance(count, int) else None


@contextmanager
def use_progress_bars(make_bar: Callable[..., Any]) -> Iterator[None]:
    """Use `make_bar` for `from_pretrained`'s progress bars inside the `with` block (utils/logging.py)."""
    logging: Any = importlib.import_module("diffusers.utils.logging")
    before, logging.tqdm = logging.tqdm, make_bar
    try:
        yield
    finally:
        logging.tqdm = before


def read_alpha_sigma(scheduler: Any, sigma: float) -> tuple[float, float] | None:
    """Return alpha and sigma for a noise level, or None if the scheduler has no `_sigma_to_alpha_sigma_t`."""
    import torch

    convert = getattr(scheduler, "_sigma_to_alpha_sigma_t", None)
    if convert is None:
        return None
    alpha, scaled = convert(torch.tensor(sigma))
    return float(alpha), float(scaled)


def unpack_latents(pipe: Any, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Reshape packed latents to (batch, channels, height, width); return other latents unchanged.

    See pipelines/flux/pipeline_flux.py.
    """
    unpack: Callable[..., torch.Tensor] | None = getattr(pipe, "_unpack_latents", None)
    return latents if unpack is None else unpack(latents, height, width, pipe.vae_scale_factor)


def find_slicing_obstacle(vae: Any) -> str:
    """Return why `vae.enable_slicing()` changes images or fails with the config of a VAE; empty if it does neither."""
    # models/autoencoders/autoencoder_kl_ltx.py and autoencoder_kl_ltx2.py
    config = getattr(vae, "config", None)
    if not isinstance(config, Mapping):  # a model of transformers
        return ""
    if config.get("timestep_conditioning"):
        return "its slicing does not support timestep_conditioning"
    noisy = [name for name, value in config.items() if name.endswith("inject_noise") and value not in (None, False)]
    if any(config[name] is True or any(config[name]) for name in noisy):
        return "it draws noise for all images of a batch at the same time"
    return ""


def find_renamed_class(config: Mapping[str, Any], model_class: type) -> type:
    """Return the current class for a config that uses an old class name (models/model_loading_utils.py)."""
    loading: Any = importlib.import_module("diffusers.models.model_loading_utils")
    if model_class.__name__ not in loading._CLASS_REMAPPING_DICT or "norm_type" not in config:
        return model_class
    renamed: type = loading._fetch_remapped_cls_from_config(config, model_class)
    return renamed
