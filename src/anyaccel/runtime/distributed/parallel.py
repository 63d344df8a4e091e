"""One model over several devices: a process a device joins the others, and diffusers splits the denoisers.

Each rank runs the same program. Text encoders and the autoencoder run whole on every rank; all give the same picture.
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
from anyaccel.backends.registry import load_registry
from anyaccel.backends.sheet import Distributed
from anyaccel.backends.torch_device import is_host
from anyaccel.errors import AnyaccelError, NotMeasurableError, UsageError
from anyaccel.library_logging import EXPERIMENTAL_ADVICE, drop_log_records
from anyaccel.planning.facts import PipelineFacts
from anyaccel.planning.options import FLOATING_BYTES, PlacementOptions
from anyaccel.planning.parallel import Ranks, Split
from anyaccel.planning.plan import Plan
from anyaccel.runtime.call_request import CallRequest
from anyaccel.runtime.distributed.cfg_split import split_cfg_over_ranks
from anyaccel.runtime.introspection import find_models, read_facts
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
    "read_ranks",
    "run_split",
    "share_noise",
    "split_models",
    "take_own_device",
]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process that it starts."""
T = TypeVar("T")
_MARK = "_anyaccel_split"
_FREE_SHARE = 0.8
"""Weights that take more than this of a device leave no room for a picture."""


def count_ranks() -> int:
    """How many processes share the work: those of the group that was joined, or that torchrun started."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else 1


def read_ranks(opened: OpenDevice, facts: PipelineFacts, options: PlacementOptions) -> Ranks:
    """The processes that there are, as far as a plan depends on them."""
    if options.parallel is None:
        return Ranks()
    types = read_tensor_parallel_devices()
    return Ranks(count=count_ranks(), tensor_types=types, fits_alone=_fits_alone(opened, facts, options))


def _fits_alone(opened: OpenDevice, facts: PipelineFacts, options: PlacementOptions) -> bool | None:
    """Whether the weights fit on one device, by the memory on its label: what is free may differ between ranks."""
    try:
        total = opened.driver.memory(opened.index).total_bytes
    except NotMeasurableError:
        return None
    number = FLOATING_BYTES[options.dtype or opened.sheet.default_dtypes.order[0]]
    return sum(one.parameters for one in facts.components) * number <= total * _FREE_SHARE


def take_own_device(opened: OpenDevice, asked: Any) -> OpenDevice:
    """The device of this rank: that of its number on this machine, unless one was named or it sees one alone."""
    local, name = int(os.environ.get("LOCAL_RANK", 0)), opened.sheet.name
    if isinstance(asked, int | OpenDevice):
        return opened
    if asked is not None and DeviceSpec.parse(asked, load_registry()).index is not None:
        return opened
    if is_available(f"{name}:{local}") or is_available(f"{name}:1"):
        return open_device(f"{name}:{local}")
    return opened


def join_ranks(opened: OpenDevice, plan: Plan) -> None:
    """Join the other processes by the device's own backend, beside gloo for the host; all must have one plan."""
    distributed = torch.distributed
    known = opened.sheet.distributed
    assert isinstance(known, Distributed)
    set_device = getattr(opened.driver.module(), "set_device", None)
    if set_device is not None and not is_host(opened.torch_device):
        set_device(opened.index)
    if not distributed.is_initialized():
        if known.module:
            importlib.import_module(known.module)
        beside = f"cpu:gloo,{opened.sheet.torch_name}:{known.backend}"
        distributed.init_process_group("gloo" if is_host(opened.torch_device) else beside)
        if distributed.Backend.backend_type_map[known.backend] != distributed.ProcessGroup.BackendType.CUSTOM:
            atexit.register(_leave)  # where torch complains of a group that is left behind; of others, of leaving
    mine = f"{plan.pipeline}, parallel {plan.parallel}, {plan.dtype.value}, {plan.title}"
    all_plans: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(all_plans, mine)
    if len(set(all_plans)) > 1:
        said = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(all_plans))
        raise UsageError(f"the ranks decided differently: {said}", hint="say dtype= and parallel= in the program")


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_splits(pipe: Any, split: Split | None) -> None:
    """Raise if models are split in another way already: diffusers has no way back."""
    for name, model in find_models(pipe).items():
        before = vars(model).get(_MARK)
        if before is not None and before != split:
            raise UsageError(
                f"{name} is split over devices by {before} already, and parallel is now {split or 'left out'}",
                hint="load the pipeline anew",
            )


def split_models(pipe: Any, placement: Placement) -> None:
    """Split the models that run at every step as the plan says; weights that are to be split lie on the host."""
    split = placement.plan.parallel.value
    assert split is not None
    models = find_models(pipe)
    for name in read_facts(pipe).denoisers:
        model = models[name]
        if vars(model).get(_MARK) == split:
            continue
        if split.strategy == "cfg":
            split_cfg_over_ranks(model, insist=placement.options.parallel != "auto")
        else:
            _enable(model, split, placement)
        vars(model)[_MARK] = split


def _enable(model: Any, split: Split, placement: Placement) -> None:
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
        raise UsageError(f"diffusers refuses parallel='{split}': {error}", hint="leave parallel out") from error


@functools.cache
def _make_mesh(kind: str, split: Split) -> Any:
    """The ranks in the shape that diffusers takes them in; made once, since making one is a meeting of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if split.strategy == "context":
        return init_device_mesh(kind, (1, split.ranks), mesh_dim_names=("ring", "ulysses"))
    return init_device_mesh(kind, (split.ranks,), mesh_dim_names=("tp",))


def share_noise(request: CallRequest) -> CallRequest:
    """The request with rank 0's seeds, and every generator as rank 0 has it: all ranks draw the same noise."""
    given = request.arguments.get("generator")
    generators = [torch.default_generator, *(given if isinstance(given, list | tuple) else [given] if given else [])]
    told: list[Any] = [(request.seeds, [one.get_state() for one in generators])]
    torch.distributed.broadcast_object_list(told, src=0)
    seeds, states = told[0]
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    return replace(request, seeds=seeds)


def run_split(pipe: Any, split: Split | None, run: Callable[[], T]) -> T:
    """Run a call; where diffusers cannot share a sequence out evenly, once more with shares that differ.

    Uneven shares cost an exchange of their sizes at every attention, and so are not taken before they are needed.
    """
    try:
        return run()
    except AssertionError as error:
        if split is None or not is_uneven_share(error):
            raise
    models: dict[str, Any] = dict(find_models(pipe))
    for name in read_facts(pipe).denoisers:
        allow_uneven_shares(models[name])
    try:
        return run()
    except AssertionError as error:
        raise UsageError(
            f"parallel='{split}': a sequence is too short to be shared out: {error}", hint="take fewer ranks"
        ) from error
