"""Spreads a model over the processes in the way that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.spread.layout import Layout
from falaj.training.runtime.spread.pipeline.cutting import find_stages
from falaj.training.runtime.spread.pipeline.pipeline import Pipeline
from falaj.training.runtime.spread.sums import word_group
from falaj.training.runtime.spread.tensor_plan import Cut, TensorPlan, find_cuts
from falaj.training.runtime.spread.ways import Alone, Copies, ExactCopies, Shards, Spread, same_start

CUT_BY_RUNS: WeakKeyDictionary[nn.Module, tuple[Layout, Mapping[str, Cut], DeviceMesh]] = WeakKeyDictionary()
"""Models that were left in shards or with cut layers: another run takes them as they are."""


def spread_over(
    model: nn.Module, world: ProcessGroup, layout: Layout, *, tensor_plan: TensorPlan | None
) -> Spread:
    """`model`, which lies on its device, spread over the processes of `world`."""
    if world.size == 1:
        return Alone(model, world)
    cuts = find_tensor_cuts(model, layout, tensor_plan)
    before = refuse_other_cuts(model, layout, cuts)
    same_start(model, world.device)
    mesh = before or make_mesh(world, layout)
    found = _over_mesh(model, world, layout, mesh, {} if before else cuts)
    if layout.shards or cuts:
        CUT_BY_RUNS[model] = layout, dict(cuts), mesh
    return found


def spread_in_stages(
    model: nn.Module,
    world: ProcessGroup,
    layout: Layout,
    *,
    tensor_plan: TensorPlan | None,
    cuts: Sequence[str] | None,
) -> tuple[Pipeline, Spread]:
    """`model` cut into the stages of a pipeline; the part of this process is spread further as `layout` says."""
    tensor_cuts = find_tensor_cuts(model, layout, tensor_plan)
    refuse_other_cuts(model, layout, tensor_cuts)
    plan = find_stages(model, count=layout.pipeline, cuts=cuts)
    same_start(model, world.device)
    mesh = make_mesh(world, layout)
    pipeline = Pipeline(model, plan, world, mesh["pipeline"].get_group())
    spread = _over_mesh(pipeline.part, world, layout, mesh, tensor_cuts)
    spread.stages = pipeline.group
    return pipeline, spread


def refuse_other_cuts(model: nn.Module, layout: Layout, cuts: Mapping[str, Cut]) -> DeviceMesh | None:
    """The mesh over which an earlier run cut `model` in the same way, if there was one; refused in another way."""
    if model not in CUT_BY_RUNS:
        return None
    then, cuts_then, mesh = CUT_BY_RUNS[model]
    if (then, cuts_then) == (layout, dict(cuts)):
        return mesh
    given = f"{layout.words}, for a model that an earlier fit left as {then.words}"
    fix = "the same parallel= as then, or a new model from the checkpoint or the whole tensors of that one"
    fault = TrainingFault("parallel", given, then.words, fix)
    raise InvalidTraining("the model is cut already", faults=[fault])


def find_tensor_cuts(model: nn.Module, layout: Layout, plan: TensorPlan | None) -> Mapping[str, Cut]:
    """What is refused is refused before the processes talk: one that has left would be missed by the others."""
    return find_cuts(model, plan, size=layout.tensor) if layout.tensor > 1 else {}


def make_mesh(world: ProcessGroup, layout: Layout) -> DeviceMesh:
    shape = (layout.pipeline, layout.data, layout.tensor)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))


def spread_exactly(model: nn.Module, world: ProcessGroup, *, micro_batches: int) -> Spread:
    """A copy in each process, and sums that are the same to the bit for any number of them."""
    refuse_other_cuts(model, Layout(data=world.size), {})
    require_exact(model, world, micro_batches)
    if world.size > 1:
        same_start(model, world.device)
    return ExactCopies(model, world)


def _over_mesh(
    model: nn.Module, world: ProcessGroup, layout: Layout, mesh: DeviceMesh, cuts: Mapping[str, Cut]
) -> Alone:
    if cuts:
        cut_tensors(model, mesh["tensor"], cuts)
    found = _over_data(model, world, layout, mesh)
    found.speaks = layout.speaks(world.rank)
    return found


def _over_data(model: nn.Module, world: ProcessGroup, layout: Layout, mesh: DeviceMesh) -> Alone:
    if layout.data == 1:
        return Alone(model, world)
    way = Shards if layout.shards else Copies
    return way(model, world, mesh["data"], word_group(mesh, "data"))


def cut_tensors(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut]) -> None:
    """Cut the layers that this process holds; those of other stages of a pipeline are cut by others."""
    kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
    here = {
        name: kinds[cut]()
        for name, cut in cuts.items()
        if not any(p.is_meta for p in model.get_submodule(name).parameters())
    }
    if here:
        parallelize_module(model, mesh, here)


def require_exact(model: nn.Module, world: ProcessGroup, micro_batches: int) -> None:
    faults = []
    if world.size & (world.size - 1) or micro_batches % world.size:
        allowed = f"a power of two, at most the {micro_batches} micro-batches"
        faults.append(TrainingFault("processes", world.size, allowed, f"accumulate={world.size}"))
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            given = f"{type(module).__name__}, whose running statistics depend on who sees which samples"
            faults.append(TrainingFault(name or "model", given, "GroupNorm or LayerNorm, or exact=False"))
    if faults:
        raise InvalidTraining("this cannot be trained exactly", faults=faults)
