"""`fit`: train a torch model on seeded batches, with checkpoints that it resumes from exactly.

    fj.fit(model, torch.nn.functional.mse_loss, (inputs, targets), epochs=10)

`data` is tensors (a tuple is inputs…, target), a map-style dataset, or a table: pyarrow's, or a path of Parquet, as
`fj.job.inputs` has them. options.py says what can be chosen.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Unpack

from torch import nn

from falaj.training.runtime.agent.agents import Agent
from falaj.training.runtime.data.dataloading.start_method import require_not_in_worker
from falaj.training.runtime.data.sources import Data, SampleSource, open_data
from falaj.training.runtime.loop import FitResult, prepare, train
from falaj.training.runtime.memory.dry_run import is_dry_run, write_estimate
from falaj.training.runtime.options import FitKeywords, FitOptions, completed, settings_from, shown
from falaj.training.runtime.parallel.agreement import require_same_arguments
from falaj.training.runtime.parallel.auto import resolve_layout
from falaj.training.runtime.parallel.process_group import find_device, join_process_group
from falaj.training.runtime.planning.numerics import apply_numerics
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.selection import select_plan
from falaj.training.runtime.step.allocator import retained_heap
from falaj.training.runtime.step.model_checks import require_trainable
from falaj.training.runtime.step.step import Loss

__all__ = ["FitResult", "Plan", "fit"]


@shown
def fit(model: nn.Module, loss: Loss, data: Data, **options: Unpack[FitKeywords]) -> FitResult:
    """Train `model` in place, for `steps` steps or `epochs` epochs in all, and go on where `run` left off.

    `loss(model(inputs), target)` is the mean over a batch. options.py says what each option means.
    """
    chosen = completed(options)
    settings = settings_from(chosen)
    require_trainable(model, loss)
    source = open_data(data, inputs=chosen["inputs"], target=chosen["target"])
    if is_dry_run():
        write_estimate(settings, model, loss, source)
    return train_as(settings, model, loss, source, chosen["run"])


def train_as(
    settings: FitOptions, model: nn.Module, loss: Loss, source: SampleSource, run: str | Path | Agent | None
) -> FitResult:
    """Train with the other processes of the world, if there are any, until the end or a SIGTERM."""
    require_not_in_worker()
    world = join_process_group(find_device(settings.compute.device))
    require_same_arguments(model, source, settings, world)
    with retained_heap(), open_run(run, world) as agent:
        plan = select_plan(model, loss, source, settings, agent, world)
        notify = agent.notify if agent else print
        settings, plan = resolve_layout(model, loss, source, settings, plan, world, notify)
        with apply_numerics(plan), open_checkpointer(run, agent, world) as checkpointer:
            training = prepare(model, loss, source, settings, plan, agent, world, checkpointer)
            keeps = agent is not None or world.size > 1  # else there is nothing to save
            stops = sigterm_stops(lambda: world.requests.add("stop")) if keeps else nullcontext()
            with stops, closing(training.engine), closing(training.report):
                return train(training)
