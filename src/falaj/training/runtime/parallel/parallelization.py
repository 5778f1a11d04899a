"""Applies a parallel layout to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.gradient_reduction import cpu_group
from falaj.training.runtime.parallel.layout import ParallelLayout
from falaj.training.runtime.parallel.pipeline.partition import partition_model
from falaj.training.runtime.parallel.pipeline.pipelined_model import PipelinedModel
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.parallel.strategies import (
    DdpStrategy,
    ExactDdpStrategy,
    FsdpStrategy,
    ParallelStrategy,
    SingleProcessStrategy,
    broadcast_model,
)
from falaj.training.runtime.parallel.tensor_plan import Cut, TensorPlan, find_cuts

SPLIT_MODELS: WeakKeyDictionary[nn.Module, tuple[ParallelLayout, Mapping[str, Cut], DeviceMesh]] = (
    WeakKeyDictionary()
)
"""Models that a run left sharded or split: the next run uses them as they are."""


def parallelize(
    model: nn.Module, world: ProcessGroup, layout: ParallelLayout, *, tensor_plan: TensorPlan | None
) -> ParallelStrategy:
    """Apply `layout` to `model`, which is on its device, over the processes of `world`."""
    if world.size == 1:
        return SingleProcessStrategy(model, world)
    cuts = find_tensor_cuts(model, layout, tensor_plan)
    before = earlier_mesh(model, layout, cuts)
    broadcast_model(model, world.device)
    mesh = before or make_mesh(world, layout)
    found = _over_mesh(model, world, layout, mesh, {} if before else cuts)
    if layout.shards or cuts:
        SPLIT_MODELS[model] = layout, dict(cuts), mesh
    return found


def parallelize_pipeline(
    model: nn.Module,
    world: ProcessGroup,
    layout: ParallelLayout,
    *,
    tensor_plan: TensorPlan | None,
    cuts: Sequence[str] | None,
) -> tuple[PipelinedModel, ParallelStrategy]:
    """Cut `model` into pipeline stages, and apply the rest of `layout` to the stage of this process."""
    tensor_cuts = find_tensor_cuts(model, layout, tensor_plan)
    earlier_mesh(model, layout, tensor_cuts)
    plan = partition_model(model, count=layout.pipeline, cuts=cuts)
    broadcast_model(model, world.device)
    mesh = make_mesh(world, layout)
    pipeline = PipelinedModel(model, plan, world, mesh["pipeline"].get_group())
    strategy = _over_mesh(pipeline.part, world, layout, mesh, tensor_cuts)
    strategy.pipeline_group = pipeline.group
    return pipeline, strategy


def earlier_mesh(model: nn.Module, layout: ParallelLayout, cuts: Mapping[str, Cut]) -> DeviceMesh | None:
    """Return the mesh of an earlier run with the same layout, if there is one. Raise InvalidTraining for another
    layout."""
    if model not in SPLIT_MODELS:
        return None
    then, cuts_then, mesh = SPLIT_MODELS[model]
    if (then, cuts_then) == (layout, dict(cuts)):
        return mesh
    given = f"{layout.summary}, for a model that an earlier fit left as {then.summary}"
    fix = "use the same parallel=, or a new model from the checkpoint or the full tensors of this one"
    fault = TrainingFault("parallel", given, then.summary, fix)
    raise InvalidTraining("an earlier run has split this model differently", faults=[fault])


def find_tensor_cuts(model: nn.Module, layout: ParallelLayout, plan: TensorPlan | None) -> Mapping[str, Cut]:
    """Return the layers to split. Errors are raised before any communication, so that no process waits for
    another."""
    return find_cuts(model, plan, size=layout.tensor) if layout.tensor > 1 else {}


def make_mesh(world: ProcessGroup, layout: ParallelLayout) -> DeviceMesh:
    shape = (layout.pipeline, layout.data, layout.tensor)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))


def parallelize_exactly(model: nn.Module, world: ProcessGroup, *, micro_batches: int) -> ParallelStrategy:
    """Keep a replica in each process, with sums that are bitwise equal for any number of processes."""
    earlier_mesh(model, ParallelLayout(data=world.size), {})
    require_exact(model, world, micro_batches)
    if world.size > 1:
        broadcast_model(model, world.device)
    return ExactDdpStrategy(model, world)


def _over_mesh(
    model: nn.Module, world: ProcessGroup, layout: ParallelLayout, mesh: DeviceMesh, cuts: Mapping[str, Cut]
) -> SingleProcessStrategy:
    if cuts:
        split_tensors(model, mesh["tensor"], cuts)
    found = _over_data(model, world, layout, mesh)
    found.reports_loss = layout.reports_loss(world.rank)
    return found


def _over_data(
    model: nn.Module, world: ProcessGroup, layout: ParallelLayout, mesh: DeviceMesh
) -> SingleProcessStrategy:
    if layout.data == 1:
        return SingleProcessStrategy(model, world)
    way = FsdpStrategy if layout.shards else DdpStrategy
    return way(model, world, mesh["data"], cpu_group(mesh, "data"))


def split_tensors(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut]) -> None:
    """Split the layers that this process holds; other stages split their own."""
    kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
    here = {
        name: kinds[cut]()
        for name, cut in cuts.items()
        if not any(p.is_meta for p in model.get_submodule(name).parameters())
    }
    if here:
        parallelize_module(model, mesh, here)


def require_exact(model: nn.Module, world: ProcessGroup, micro_batches: int) -> None:
    """Raise InvalidTraining if the model or the number of processes does not allow exact training."""
    faults = []
    if world.size & (world.size - 1) or micro_batches % world.size:
        allowed = f"a power of two, at most the {micro_batches} micro-batches"
        faults.append(TrainingFault("processes", world.size, allowed, f"accumulate={world.size}"))
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            given = f"{type(module).__name__}, whose running statistics depend on the distribution of samples"
            faults.append(TrainingFault(name or "model", given, "GroupNorm or LayerNorm, or exact=False"))
    if faults:
        raise InvalidTraining("this cannot be trained exactly", faults=faults)
