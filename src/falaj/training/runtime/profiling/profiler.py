"""Profiles some steps of a run: after a warm-up, ranges and torch's profiler are attached, and then removed.

A failure here costs the profile, never the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from falaj.training.runtime.profiling.bottleneck import BottleneckReport, RunConditions, diagnose
from falaj.training.runtime.profiling.breakdown import Overlap, time_breakdown
from falaj.training.runtime.profiling.cost import StepCost, update_bytes
from falaj.training.runtime.profiling.events import PREFIX, read_trace
from falaj.training.runtime.reporting.throughput import ModelCost, StepClock
from falaj.training.runtime.step.engine import StepEngine

WARM_STEPS = 5
"""Steps before the profile, in which code is compiled, graphs are captured and caches are filled."""
TRACE_NAME = "profile-{step}.pt.trace.json"
"""Contains the last profiled step. The format of TensorBoard's profiler; chrome://tracing and Perfetto open it
too."""


@dataclass(frozen=True)
class ProfileRequest:
    """What to profile, and where the result goes."""

    steps: int
    folder: Path
    conditions: RunConditions
    price: ModelCost | None
    samples: int
    """Per step."""
    devices: int
    notify: Callable[[str], None]
    done: Callable[[int, BottleneckReport], None]
    checkpoints: Callable[[], Overlap]
    """Returns the seconds of all checkpoints so far, and how many overlapped with the steps."""


class StepProfiler:
    """Wraps the `advance` method of an engine until the profile is complete."""

    def __init__(
        self, engine: StepEngine, clock: StepClock, assignment: ProfileRequest, *, left: int
    ) -> None:
        """`left` is the number of remaining steps of the run."""
        self._engine, self._clock, self._request = engine, clock, assignment
        self._warm = max(0, min(WARM_STEPS, left - assignment.steps - 1))
        self._wanted = min(assignment.steps, left - self._warm)
        self._seen, self._number = 0, 0
        self._advance, self._before_us = engine.run_step, vars(engine).get("run_step")
        self._stands = left > 0
        self._undo: list[Undo] = []
        self._profiler: profile | None = None
        self._step: AbstractContextManager[Any] | None = None
        self._read_before = Overlap()
        self._verdict: BottleneckReport | None = None
        if self._stands:
            engine.run_step = self.run_step  # type: ignore[method-assign]

    @property
    def verdict(self) -> BottleneckReport | None:
        """The report, including checkpoints that were made since."""
        if self._verdict is None or not (saved := self._request.checkpoints()).took:
            return self._verdict
        return replace(self._verdict, overlap={**self._verdict.overlap, "checkpoints": saved})

    def run_step(self, number: int, indices: Tensor, on_loss: Callable[[Tensor], None]) -> None:
        """Run a step; its range lasts until the next one begins."""
        self._seen += 1
        self._close_step()
        if self._seen > self._warm + self._wanted:
            self.end()
            self._engine.run_step(number, indices, on_loss)
            return
        if self._seen == max(1, self._warm):  # the first profiled step is slower
            self._begin()
        self._number = number
        if self._profiler is not None and self._seen > self._warm:
            if self._seen == self._warm + 1:
                self._read_before = reading_overlap(self._engine)
            self._step = torch_range("step")
            self._step.__enter__()
        self._advance(number, indices, on_loss)

    def end(self) -> None:
        """Evaluate the profile after the last step, and detach."""
        if not self._stands:
            return
        self._stands = False
        del self._engine.run_step
        if self._before_us is not None:
            self._engine.run_step = self._before_us  # type: ignore[method-assign]
        profiler, self._profiler = self._profiler, None
        with self._clock.excluded():
            try:
                if profiler is not None:
                    self._finish(profiler)
            except Exception as failure:
                self._request.notify(
                    f"the profile failed ({type(failure).__name__}: {failure}); training continues"
                )
            finally:
                self._leave()

    def abandon(self) -> None:
        """Detach without a result, because the run ended in the middle of a step."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(Exception):
                self._close_step()
                profiler.stop()
            self._leave()

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _begin(self) -> None:
        with self._clock.excluded():
            try:
                activities = [ProfilerActivity.CPU]
                if self._engine.step.device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                    torch.cuda.synchronize()
                profiler = profile(activities=activities)
                profiler.start()
            except Exception as failure:
                self._request.notify(
                    f"the profile failed ({type(failure).__name__}: {failure}); training continues"
                )
                return
            self._profiler = profiler
            self._undo += [add_ranges(self._engine, torch_range), add_untimed_ranges(self._clock)]

    def _close_step(self) -> None:
        if self._step is not None:
            if self._engine.step.device.type == "cuda" and self._seen > self._warm + self._wanted:
                torch.cuda.synchronize()  # include the work that the last steps launched
            self._step.__exit__(None, None, None)
            self._step = None

    def _finish(self, profiler: profile) -> None:
        request = self._request
        self._seen = self._warm + self._wanted + 1
        self._close_step()
        profiler.stop()
        request.folder.mkdir(parents=True, exist_ok=True)
        trace = request.folder / TRACE_NAME.format(step=self._number)
        profiler.export_chrome_trace(str(trace))
        shares = time_breakdown(read_trace(trace))
        read = reading_overlap(self._engine)
        before = self._read_before
        data = Overlap(read.took - before.took, read.hidden - before.hidden)
        cost, price = None, request.price
        if price is not None and (counted := price.of_step(request.samples)) is not None:
            update = update_bytes(self._engine.step.optimizer)
            cost = StepCost(counted.flops / request.devices, counted.bytes / request.devices + update)
        self._verdict = diagnose(
            shares,
            request.conditions,
            cost=cost,
            peaks=price.peaks(with_bandwidth=True) if price is not None else None,
            overlap={"data": data, "checkpoints": request.checkpoints()},
            trace=str(trace),
        )
        request.notify(self._verdict.summary)
        request.done(self._number, self._verdict)


def reading_overlap(engine: StepEngine) -> Overlap:
    """Return the seconds of reading samples so far, and how many overlapped with computing."""
    return Overlap(engine.waited_s + engine.hidden_s, engine.hidden_s)


def add_untimed_ranges(clock: StepClock) -> Undo:
    """Add a range around what is not a training step."""
    plain = clock.excluded

    def aside() -> AbstractContextManager[None]:
        return NestedContexts(torch_range("aside"), plain())

    clock.excluded = aside  # type: ignore[method-assign, assignment]

    def leave() -> None:
        del clock.excluded

    return leave


class NestedContexts:
    """One context manager inside of another."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._inner.__exit__(*failure)
        self._outer.__exit__(*failure)


def add_nvtx_ranges(engine: StepEngine) -> None:
    """Add NVTX ranges around each step and its phases, until the run ends."""
    add_ranges(engine, nvtx_range)
    plain = engine.run_step

    def run_step(number: int, indices: Tensor, on_loss: Callable[[Tensor], None]) -> None:
        with nvtx_range(f"step {number}"):
            plain(number, indices, on_loss)

    engine.run_step = run_step  # type: ignore[method-assign]


MakeRange: TypeAlias = Callable[[str], AbstractContextManager[Any]]
Undo: TypeAlias = Callable[[], None]


def torch_range(name: str) -> AbstractContextManager[Any]:
    """Return a range for torch's profiler."""
    return torch.profiler.record_function(PREFIX + name)


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """Return a range for Nsight Systems."""
    return torch.cuda.nvtx.range(PREFIX + name)


def add_ranges(engine: StepEngine, mark: MakeRange) -> Undo:
    """Add ranges around reading, forward, backward and optimizer; the result removes them."""

    def around(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*values: Any, **options: Any) -> Any:
            with mark(name):
                return part(*values, **options)

        return marked

    loader, leave_step = engine.loader, engine.step.observe(around)
    loader.take = around("data", loader.take)  # type: ignore[method-assign]

    def leave() -> None:
        leave_step()
        del loader.take

    return leave
