"""What a run tells about itself: its losses, watched for NaN and infinity, and a sign of life every second."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from falaj.training.runtime.agent import Agent, Metric
from falaj.training.runtime.batches import BatchPlan
from falaj.training.runtime.errors import Fault, LossNotFinite
from falaj.training.runtime.metering import Meter, Rates
from falaj.training.runtime.profiling.watching import Watch
from falaj.training.runtime.saving import Saver
from falaj.training.runtime.side_files import Trouble
from falaj.training.runtime.surviving import Survival
from falaj.training.runtime.tensorboard import EventFile
from falaj.training.runtime.world import World

TELL_EVERY_S = 1.0
GPU_WINDOW = 32  # losses read together on a GPU, where reading each one would stall the queue
GPU_WINDOW_S = 0.05  # and no more often than this, up to
GPU_WINDOW_MOST = 1024
SAMPLES_SHOWN = 8
EVENTS = "TensorBoard's event file"


class Report:
    """The losses of the steps after `done`, where the newest checkpoint left off."""

    def __init__(
        self,
        agent: Agent | None,
        plan: BatchPlan,
        saver: Saver,
        world: World,
        *,
        done: int,
        total: int,
        meter: Meter,
        events_folder: Path | None = None,
    ) -> None:
        """Metrics go to the agent, and as TensorBoard's event files to `events_folder`."""
        self._agent, self._plan, self._saver, self._world = agent, plan, saver, world
        self._done, self._total = done, total
        self._width = 1 if world.device.type == "cpu" else GPU_WINDOW
        self._window: list[Tensor] = []
        self._told = 0
        self._read_at = time.monotonic()
        self._next = time.monotonic() + TELL_EVERY_S
        self.losses: list[float] = []
        self.meter = meter
        self.watch: Watch | None = None
        self.survival: Survival | None = None
        """It compares the losses of steps that are computed again."""
        self._events_folder = events_folder
        self._events: EventFile | None = None
        self._unshown: list[Metric] = []
        self._trouble = Trouble(agent.say if agent else print)

    def add(self, loss: Tensor) -> None:
        """Note the loss of the next step. Not finite: refused, on a CPU before the model is changed by it."""
        self._window.append(loss)
        if len(self._window) >= self._width:
            if self._width > 1:
                self._width = self._next_width()
            self.settle()
            if time.monotonic() >= self._next:
                self.tell()

    def _next_width(self) -> int:
        """So many that they come about every `GPU_WINDOW_S`: quick steps are read less often."""
        now = time.monotonic()
        took, self._read_at = now - self._read_at, now
        wider = took < GPU_WINDOW_S and self._world.size == 1
        return min(2 * self._width, GPU_WINDOW_MOST) if wider else self._width

    def settle(self) -> None:
        """Read the losses that are still on the device, and look at them."""
        values = (
            torch.stack(self._window).tolist() if len(self._window) > 1 else [w.item() for w in self._window]
        )
        self._window.clear()
        self._world.hear()
        for value in values:
            if not math.isfinite(value):
                step = self._done + len(self.losses) + 1
                self.tell()
                raise self._not_finite(step, value)
            self.losses.append(value)

    def tell(self) -> None:
        """Hand the agent what is new, and ask whether the run is still wanted."""
        self._next = time.monotonic() + TELL_EVERY_S
        figures = self.meter.since_last(self._done + len(self.losses))
        if self._agent is None and self._events_folder is None:
            return
        first = self._done + self._told + 1
        new = [Metric(first + place, "loss", value) for place, value in enumerate(self.losses[self._told :])]
        if self.survival is not None:
            self.survival.compare(first, self.losses[self._told :])
        self._told = len(self.losses)
        self._send(new + figures)
        if self._agent is None:
            return
        self._agent.progress(self._done + self._told, self._total)
        if not self._agent.heartbeat():
            self._world.wishes.add("stop")

    def log(self, step: int, name: str, value: float) -> None:
        self._send([Metric(step, name, value)])

    def log_all(self, step: int, values: Mapping[str, float]) -> None:
        self._send([Metric(step, name, value) for name, value in values.items()])

    def conclude(self, step: int, ledger: str) -> Rates:
        """The last word of a call whose last step is `step`: the figures of all of it."""
        if self.watch is not None:
            self.watch.end()
        rates = self.meter.overall(step)
        if step > self._done:
            self._send(rates.metrics(step))
            if self._agent is not None:
                self._agent.params({f"ledger.{step}": ledger})
        return rates

    def close(self) -> None:
        if self.watch is not None:
            self.watch.abandon()
        if self._events is not None:
            self._trouble.survive(EVENTS, self._events.close)

    def _send(self, metrics: Sequence[Metric]) -> None:
        if not metrics:
            return
        if self._agent is not None:
            self._agent.log(metrics)
        if self._events_folder is not None:
            folder = self._events_folder
            self._unshown += metrics
            self._trouble.survive(EVENTS, lambda: self._show(folder))

    def _show(self, folder: Path) -> None:
        self._events = self._events or EventFile(folder, done=self._done)
        self._events.add(self._unshown)  # if that fails half-way some are there twice, which harms nobody
        self._unshown.clear()

    def _not_finite(self, step: int, value: float) -> LossNotFinite:
        samples = self._plan.indices(step).tolist()
        shown = ", ".join(map(str, samples[:SAMPLES_SHOWN])) + (", …" if len(samples) > SAMPLES_SHOWN else "")
        given = f"{len(samples)} samples: {shown}"
        fix = "a smaller lr, clip=1.0, or other samples"
        return LossNotFinite(
            f"the loss is {value} at step {step}; the last good checkpoint: {self._saver.kept}",
            step=step,
            faults=[Fault(f"batch of step {step}", given, "a finite loss", fix)],
        )
