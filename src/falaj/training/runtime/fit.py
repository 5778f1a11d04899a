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

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.agreeing import require_agreement
from falaj.training.runtime.data import Data, Source, open_data
from falaj.training.runtime.feeding.starting import refuse_in_worker
from falaj.training.runtime.kept_memory import freed_memory_kept
from falaj.training.runtime.loop import FitResult, prepare, train
from falaj.training.runtime.memory.asking import answer, is_asked
from falaj.training.runtime.opening import open_keeper, open_run
from falaj.training.runtime.options import Options, completed, settings_from, shown
from falaj.training.runtime.plan.choosing import choose_plan
from falaj.training.runtime.plan.numerics import numerics_of
from falaj.training.runtime.plan.plans import Plan
from falaj.training.runtime.readiness import require_ready
from falaj.training.runtime.settings import Settings, find_device
from falaj.training.runtime.spread.auto import settle_layout
from falaj.training.runtime.steps import Loss
from falaj.training.runtime.terminating import sigterm_stops
from falaj.training.runtime.world import join_world

__all__ = ["FitResult", "Plan", "fit"]


@shown
def fit(model: nn.Module, loss: Loss, data: Data, **options: Unpack[Options]) -> FitResult:
    """Train `model` in place, for `steps` steps or `epochs` epochs in all, and go on where `run` left off.

    `loss(model(inputs), target)` is the mean over a batch. options.py says what each option means.
    """
    chosen = completed(options)
    settings = settings_from(chosen)
    require_ready(model, loss)
    source = open_data(data, inputs=chosen["inputs"], target=chosen["target"])
    if is_asked():
        answer(settings, model, loss, source)
    return train_as(settings, model, loss, source, chosen["run"])


def train_as(
    settings: Settings, model: nn.Module, loss: Loss, source: Source, run: str | Path | Agent | None
) -> FitResult:
    """Train with the other processes of the world, if there are any, until the end or a SIGTERM."""
    refuse_in_worker()
    world = join_world(find_device(settings.computing.device))
    require_agreement(model, source, settings, world)
    with freed_memory_kept(), open_run(run, world) as agent:
        plan = choose_plan(model, loss, source, settings, agent, world)
        say = agent.say if agent else print
        settings, plan = settle_layout(model, loss, source, settings, plan, world, say)
        with numerics_of(plan), open_keeper(run, agent, world) as keeper:
            training = prepare(model, loss, source, settings, plan, agent, world, keeper)
            keeps = agent is not None or world.size > 1  # else there is nothing to save
            stops = sigterm_stops(lambda: world.wishes.add("stop")) if keeps else nullcontext()
            with stops, closing(training.engine), closing(training.report):
                return train(training)
