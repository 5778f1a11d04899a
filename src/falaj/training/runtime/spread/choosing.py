"""Spreads a model over the processes in the way that was asked for."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from falaj.training.runtime.errors import Fault, InvalidTraining
from falaj.training.runtime.spread.layout import Layout
from falaj.training.runtime.spread.tensor_plan import TensorPlan, find_cuts
from falaj.training.runtime.spread.ways import (
    Alone,
    Copies,
    CutCopies,
    ExactCopies,
    Shards,
    Spread,
    same_start,
)
from falaj.training.runtime.world import World


def spread_over(model: nn.Module, world: World, layout: Layout, *, tensor_plan: TensorPlan | None) -> Spread:
    """`model`, which lies on its device, spread over the processes of `world`."""
    if world.size == 1:
        return Alone(model, world)
    same_start(model)
    mesh = init_device_mesh(
        world.device.type, (layout.data, layout.tensor), mesh_dim_names=("data", "tensor")
    )
    if layout.tensor > 1:
        cut_tensors(model, mesh["tensor"], tensor_plan)
    found = _over_data(model, world, layout, mesh)
    found.speaks = layout.speaks(world.rank)
    return found


def spread_exactly(model: nn.Module, world: World, *, micro_batches: int) -> Spread:
    """A copy in each process, and sums that are the same to the bit for any number of them."""
    require_exact(model, world, micro_batches)
    if world.size > 1:
        same_start(model)
    return ExactCopies(model, world)


def _over_data(model: nn.Module, world: World, layout: Layout, mesh: DeviceMesh) -> Alone:
    if layout.data == 1:
        return Alone(model, world)
    if layout.shards:
        return Shards(model, world, mesh["data"])
    if layout.tensor > 1:
        return CutCopies(model, world, mesh["data"])
    return Copies(model, world, mesh["data"], unused=False)


def cut_tensors(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan | None) -> None:
    cuts = find_cuts(model, plan, size=mesh.size())
    kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
    parallelize_module(model, mesh, {name: kinds[cut]() for name, cut in cuts.items()})


def require_exact(model: nn.Module, world: World, micro_batches: int) -> None:
    faults = []
    if world.size & (world.size - 1) or micro_batches % world.size:
        allowed = f"a power of two, at most the {micro_batches} micro-batches"
        faults.append(Fault("processes", world.size, allowed, f"accumulate={world.size}"))
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            given = f"{type(module).__name__}, whose running statistics depend on who sees which samples"
            faults.append(Fault(name or "model", given, "GroupNorm or LayerNorm, or exact=False"))
    if faults:
        raise InvalidTraining("this cannot be trained exactly", faults=faults)
