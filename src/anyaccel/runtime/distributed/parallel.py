"""Denoisers that are split across several devices, with one process per device.

Each rank runs the same program. Text encoders and the VAE run unsplit on every rank, and all ranks
return the same image.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from anyaccel.backends.device import OpenDevice, is_available, open_device
from anyaccel.backends.device_spec import DeviceSpec
from anyaccel.backends.device_type_checks import is_host
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Distributed
from anyaccel.errors import AnyaccelError, NotMeasurableError, UsageError
from anyaccel.library_logging import EXPERIMENTAL_ADVICE, drop_log_records
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions
from anyaccel.planning.parallel import Ranks, Split
from anyaccel.planning.plan import Plan
from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.distributed.cfg_split import split_cfg_over_ranks
from anyaccel.runtime.introspection import find_models, list_denoisers
from anyaccel.runtime.placement_state import Placement
from anyaccel.upstream.diffusers_internals import (
    allow_uneven_shares,
    is_uneven_share,
    make_tensor_parallel_config,
    read_tensor_parallel_devices,
    use_mesh,
)

__all__ = [
    "check_splits",
    "count_ranks",
    "join_ranks",
    "open_rank_device",
    "read_ranks",
    "run_split",
    "share_noise",
    "split_models",
]

# Environment variables that torchrun sets in each process.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
T = TypeVar("T")
# Key of the `Split` in the `__dict__` of a split model.
_SPLIT_ATTRIBUTE = "_anyaccel_split"
# Larger weights leave too little memory for activations.
_MAX_WEIGHTS_SHARE = 0.8


def count_ranks() -> int:
    """Return the world size from the process group or from torchrun's environment variables.

    Return 1 if neither exists.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else 1


def read_ranks(opened: OpenDevice, facts: PipelineFacts, options: PlacementOptions) -> Ranks:
    """Return the facts about the ranks that the planner needs to choose a parallel strategy.

    These are the number of ranks, the device types that support tensor parallelism, and whether the
    weights fit on one device.
    """
    if options.parallel is None:
        return Ranks()
    device_types = read_tensor_parallel_devices()
    return Ranks(
        count=count_ranks(), tensor_types=device_types, fits_one_device=_fits_one_device(opened, facts, options)
    )


def _fits_one_device(opened: OpenDevice, facts: PipelineFacts, options: PlacementOptions) -> bool | None:
    """Return whether the weights fit on one device; None if the device's memory cannot be measured."""
    # By total memory, because free memory can differ between ranks, and all ranks must make the same plan.
    try:
        total = opened.driver.memory(opened.index).total_bytes
    except NotMeasurableError:
        return None
    itemsize = FLOATING_BYTES[options.dtype or opened.sheet.default_dtypes.order[0]]
    return sum(component.count_bytes(itemsize) for component in facts.components) <= total * _MAX_WEIGHTS_SHARE


def open_rank_device(opened: OpenDevice, requested: Any) -> OpenDevice:
    """Return the device for this rank, with index `LOCAL_RANK` unless the user requested an index."""
    local, name = int(os.environ.get("LOCAL_RANK", 0)), opened.sheet.name
    if isinstance(requested, int | OpenDevice):
        return opened
    if requested is not None and DeviceSpec.parse(requested, load_registry()).index is not None:
        return opened
    # If each rank sees only its own device, for example by CUDA_VISIBLE_DEVICES, that device has index 0.
    if is_available(f"{name}:{local}") or is_available(f"{name}:1"):
        return open_device(f"{name}:{local}")
    return opened


def join_ranks(opened: OpenDevice, plan: Plan) -> None:
    """Join the process group; raise `UsageError` if the ranks have different plans."""
    distributed = torch.distributed
    facts = opened.sheet.distributed
    assert isinstance(facts, Distributed)
    set_device = getattr(opened.driver.module(), "set_device", None)
    if set_device is not None and not is_host(opened.torch_device):
        set_device(opened.index)
    if not distributed.is_initialized():
        if facts.module:
            importlib.import_module(facts.module)  # registers the backend
        # gloo for the tensors that stay on the CPU, such as generator states.
        backends = f"cpu:gloo,{opened.sheet.torch_name}:{facts.backend}"
        distributed.init_process_group("gloo" if is_host(opened.torch_device) else backends)
        # torch's own backends warn if the group is not destroyed at exit
        # (https://docs.pytorch.org/docs/stable/distributed.html#shutdown); custom backends complain if it is.
        if distributed.Backend.backend_type_map[facts.backend] != distributed.ProcessGroup.BackendType.CUSTOM:
            atexit.register(_destroy_group)
    summary = f"{plan.pipeline}, parallel {plan.parallel}, {plan.dtype.value}, {plan.title}"
    summaries: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(summaries, summary)
    if len(set(summaries)) > 1:
        differences = "; ".join(f"rank {rank}: {summary}" for rank, summary in enumerate(summaries))
        hint = "pass the same dtype= and parallel= explicitly on every rank"
        raise UsageError(f"the ranks have different plans: {differences}", hint=hint)


def _destroy_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_splits(pipe: Any, split: Split | None) -> None:
    """Raise if a model is already split in a different way, because diffusers cannot undo a split."""
    for name, model in find_models(pipe).items():
        before = vars(model).get(_SPLIT_ATTRIBUTE)
        if before is not None and before != split:
            raise UsageError(
                f"{name} is already split with parallel='{before}', and the split cannot be changed",
                hint="load the pipeline again to split it differently",
            )


def split_models(pipe: Any, placement: Placement) -> None:
    """Split the denoisers as planned; tensor parallelism requires their weights to be on the CPU."""
    split = placement.plan.parallel.value
    assert split is not None
    models = find_models(pipe)
    for name in list_denoisers(pipe):
        model = models[name]
        if vars(model).get(_SPLIT_ATTRIBUTE) == split:
            continue
        if split.strategy == "cfg":
            split_cfg_over_ranks(model, required=placement.options.parallel != "auto")
        else:
            _enable_parallelism(model, split, placement)
        vars(model)[_SPLIT_ATTRIBUTE] = split


def _enable_parallelism(model: Any, split: Split, placement: Placement) -> None:
    """Split one model with diffusers' context or tensor parallelism."""
    from diffusers import ContextParallelConfig

    mesh = _make_mesh(placement.opened.sheet.torch_name, split)
    if split.strategy == "context":
        config: Any = ContextParallelConfig(ulysses_degree=split.ranks, mesh=mesh)
    else:
        config = make_tensor_parallel_config(split.ranks, mesh)
    try:
        with drop_log_records(*EXPERIMENTAL_ADVICE), use_mesh(model, mesh, placement.device):
            model.enable_parallelism(config=config)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, AnyaccelError):
            raise
        raise UsageError(f"diffusers rejects parallel='{split}': {error}", hint="omit parallel") from error


@functools.cache
def _make_mesh(kind: str, split: Split) -> Any:
    """Return the device mesh in the shape that diffusers expects."""
    # Cached: creating a mesh is a collective operation of all ranks.
    from torch.distributed.device_mesh import init_device_mesh

    if split.strategy == "context":
        return init_device_mesh(kind, (1, split.ranks), mesh_dim_names=("ring", "ulysses"))
    return init_device_mesh(kind, (split.ranks,), mesh_dim_names=("tp",))


def share_noise(request: CallRequest) -> CallRequest:
    """Set the generators on all ranks to rank 0's states; return the request with rank 0's seeds."""
    passed = request.arguments.get("generator")
    generators = [
        torch.default_generator,
        *(passed if isinstance(passed, list | tuple) else [passed] if passed else []),
    ]
    shared: list[Any] = [(request.seeds, [generator.get_state() for generator in generators])]
    torch.distributed.broadcast_object_list(shared, src=0)
    seeds, states = shared[0]
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    return replace(request, seeds=seeds)


def run_split(pipe: Any, split: Split | None, run: Callable[[], T]) -> T:
    """Run a call, and rerun it with uneven shards if a sequence cannot be split evenly across ranks.

    Raise `UsageError` if a sequence is too short for the number of ranks.
    """
    # Uneven shards exchange their sizes at every attention, so they are enabled only when a call needs them:
    # https://github.com/huggingface/diffusers/pull/12996
    try:
        return run()
    except AssertionError as error:
        if split is None or not is_uneven_share(error):
            raise
    models: dict[str, Any] = dict(find_models(pipe))
    for name in list_denoisers(pipe):
        allow_uneven_shares(models[name])
    try:
        return run()
    except AssertionError as error:
        hint = "use fewer processes, or a larger image size"
        raise UsageError(f"a sequence is too short for parallel='{split}': {error}", hint=hint) from error
