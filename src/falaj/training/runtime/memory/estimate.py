"""`estimate`: the memory that training a model would take, without training it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.sources import Data, open_data
from falaj.training.runtime.data.torch_loaders import loader_options
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.memory.estimator import MemoryEstimate, MemoryEstimator
from falaj.training.runtime.parallel.layout import Parallel
from falaj.training.runtime.parallel.process_group import find_device
from falaj.training.runtime.parallel.tensor_plan import TensorPlan
from falaj.training.runtime.planning.plan import Plan, Precision
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.model_checks import shape_faults
from falaj.training.runtime.step.optimizers import OptimizerChoice

DEFAULT_BATCH_SIZE = 32


def estimate(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    target: str | Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    batch_size: int | None = None,
    optimizer: OptimizerChoice = "adamw",
    precision: Precision = "fp32",
    accumulate: int | None = None,
    parallel: Parallel = "auto",
    tensor_plan: TensorPlan | None = None,
    pipeline_cuts: Sequence[str] | None = None,
    processes: int = 1,
    device: str = "auto",
) -> MemoryEstimate:
    """Return the peak memory of training `model` like this. Nothing is computed, and no argument is changed.

    `loss`, `data`, `precision`, `accumulate`, `parallel` and the others are those of `fit`. `batch_size` is that of a
    DataLoader, else 32. `device` is the training device, cuda or cpu; it need not be present. Raise NoEstimate if the
    model can be traced neither on fake tensors nor on samples.
    """
    if batch_size is None:
        batch_size = int(loader_options(data).get("batch_size", DEFAULT_BATCH_SIZE))
    name = find_device(device).type if device == "auto" else device.partition(":")[0]
    faults = [] if name in ("cpu", "cuda") else [TrainingFault("device", device, "auto, cpu or cuda")]
    pieces = 1 if accumulate is None else accumulate
    for what, count in (("processes", processes), ("batch_size", batch_size), ("accumulate", pieces)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            faults.append(TrainingFault(what, count, "a whole number, at least 1"))
    faults += shape_faults(model)
    if faults:
        raise InvalidTraining("invalid options for a memory estimate", faults=faults)
    source = open_data(data, inputs=inputs, target=target)
    BatchPlan(len(source), batch_size, 0)  # raises if the batch is larger than the data
    plan = Plan(precision=precision, micro_batches=pieces)
    estimator = MemoryEstimator(
        *(model, loss, source, optimizer, plan, batch_size),
        device=name,
        tensor_plan=tensor_plan,
        pipeline_cuts=pipeline_cuts,
        fixed_micro_batches=accumulate is not None,
    )
    return estimator.estimate(parallel, processes)
