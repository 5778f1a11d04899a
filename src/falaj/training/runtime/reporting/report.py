"""The report of a run: losses, which are checked for NaN and infinity, metrics and heartbeats."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from falaj.training.runtime.agent.agents import Agent, MetricValue
from falaj.training.runtime.agent.run_files import WriteFailures
from falaj.training.runtime.checkpointing.resume_history import ResumeHistory
from falaj.training.runtime.checkpointing.saver import CheckpointSaver
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import LossNotFinite, TrainingFault
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.profiling.profiler import StepProfiler
from falaj.training.runtime.reporting.progress import ProgressDisplay
from falaj.training.runtime.reporting.tensorboard import EventFile
from falaj.training.runtime.reporting.throughput import Throughput, ThroughputMeter

SEND_INTERVAL_S = 1.0
GPU_WINDOW = 32  # losses read together on a GPU, where each read synchronizes
GPU_WINDOW_S = 0.05  # and no more often than this, up to
MAX_GPU_WINDOW = 1024
MAX_SAMPLES_SHOWN = 8
EVENTS = "TensorBoard's event file"


class TrainingReport:
    """Reports the steps after `done`, the step of the restored checkpoint."""

    def __init__(
        self,
        agent: Agent | None,
        plan: BatchPlan,
        saver: CheckpointSaver,
        world: ProcessGroup,
        *,
        done: int,
        total: int,
        meter: ThroughputMeter,
        events_folder: Path | None = None,
        progress: ProgressDisplay | None = None,
    ) -> None:
        """Metrics go to the agent, and as TensorBoard event files to `events_folder`."""
        self._progress = progress
        self._agent, self._plan, self._saver, self._world = agent, plan, saver, world
        self._done, self._total = done, total
        self._width = 1 if world.device.type == "cpu" else GPU_WINDOW
        self._window: list[Tensor] = []
        self._told = 0
        self._read_at = time.monotonic()
        self._next = time.monotonic() + SEND_INTERVAL_S
        self.losses: list[float] = []
        self.meter = meter
        self.watch: StepProfiler | None = None
        self.resume_history: ResumeHistory | None = None
        """Compares the losses of recomputed steps."""
        self._events_folder = events_folder
        self._events: EventFile | None = None
        self._unshown: list[MetricValue] = []
        self._trouble = WriteFailures(agent.notify if agent else print)

    def add(self, loss: Tensor) -> None:
        """Add the loss of the next step. One that is not finite raises, on a CPU before the model is updated."""
        self._window.append(loss)
        if len(self._window) >= self._width:
            if self._width > 1:
                self._width = self._next_width()
            self.read_losses()
            if time.monotonic() >= self._next:
                self.send()

    def _next_width(self) -> int:
        """Return the next number of losses to read together, so that reads are about `GPU_WINDOW_S` apart."""
        now = time.monotonic()
        took, self._read_at = now - self._read_at, now
        wider = took < GPU_WINDOW_S and self._world.size == 1
        return min(2 * self._width, MAX_GPU_WINDOW) if wider else self._width

    def read_losses(self) -> None:
        """Read the losses that are still on the device, and check them."""
        values = (
            torch.stack(self._window).tolist() if len(self._window) > 1 else [w.item() for w in self._window]
        )
        self._window.clear()
        self._world.agree_on_requests()
        for value in values:
            if not math.isfinite(value):
                step = self._done + len(self.losses) + 1
                self.send()
                raise self._not_finite(step, value)
            self.losses.append(value)

    def send(self) -> None:
        """Send new metrics to the agent, and request a stop if it says so."""
        self._next = time.monotonic() + SEND_INTERVAL_S
        figures = self.meter.since_last(self._done + len(self.losses))
        if self._progress is not None and self.losses:
            self._progress.show(
                self._done + len(self.losses), self.losses[-1], batch_size=self._plan.batch_size
            )
        if self._agent is None and self._events_folder is None:
            return
        first = self._done + self._told + 1
        new = [
            MetricValue(first + place, "loss", value) for place, value in enumerate(self.losses[self._told :])
        ]
        if self.resume_history is not None:
            self.resume_history.compare(first, self.losses[self._told :])
        self._told = len(self.losses)
        self._send(new + figures)
        if self._agent is None:
            return
        self._agent.progress(self._done + self._told, self._total)
        if not self._agent.heartbeat():
            self._world.requests.add("stop")

    def log(self, step: int, name: str, value: float) -> None:
        self._send([MetricValue(step, name, value)])

    def log_all(self, step: int, values: Mapping[str, float]) -> None:
        self._send([MetricValue(step, name, value) for name, value in values.items()])

    def finish(self, step: int, ledger: str) -> Throughput:
        """Send the overall throughput of a call whose last step is `step`, and return it."""
        if self.watch is not None:
            self.watch.end()
        rates = self.meter.overall(step)
        if step > self._done:
            self._send(rates.metrics(step))
            if self._agent is not None:
                self._agent.params({f"ledger.{step}": ledger})
        return rates

    def close(self) -> None:
        if self._progress is not None:
            self._progress.clear()
        if self.watch is not None:
            self.watch.abandon()
        if self._events is not None:
            self._trouble.attempt(EVENTS, self._events.close)

    def _send(self, metrics: Sequence[MetricValue]) -> None:
        if not metrics:
            return
        if self._agent is not None:
            self._agent.log(metrics)
        if self._events_folder is not None:
            folder = self._events_folder
            self._unshown += metrics
            self._trouble.attempt(EVENTS, lambda: self._show(folder))

    def _show(self, folder: Path) -> None:
        self._events = self._events or EventFile(folder, done=self._done)
        self._events.add(self._unshown)  # after a partial failure some are repeated, which is harmless
        self._unshown.clear()

    def _not_finite(self, step: int, value: float) -> LossNotFinite:
        samples = self._plan.indices(step).tolist()
        shown = ", ".join(map(str, samples[:MAX_SAMPLES_SHOWN])) + (
            ", …" if len(samples) > MAX_SAMPLES_SHOWN else ""
        )
        given = f"{len(samples)} samples: {shown}"
        fix = "a smaller lr, clip=1.0, or other samples"
        return LossNotFinite(
            f"the loss is {value} at step {step}; the last good checkpoint: {self._saver.last_checkpoint}",
            step=step,
            faults=[TrainingFault(f"batch of step {step}", given, "a finite loss", fix)],
        )
