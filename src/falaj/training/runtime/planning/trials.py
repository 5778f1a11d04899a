"""Trials of a plan on the model and real batches: numerics compared with fp32, and speed."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.sources import Batch, DatasetSource, SampleSource, TensorSource
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.options import INITIAL_BATCH_SIZE, FitOptions
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.function_state import FunctionState
from falaj.training.runtime.planning.numerics import apply_numerics, full_fp32, precision_of
from falaj.training.runtime.planning.numerics_check import (
    PERTURBATION,
    NumericErrors,
    NumericsReference,
    compare,
    loss_curve_fault,
    numerics_fault,
    relative_distance,
    stable_gradients,
)
from falaj.training.runtime.planning.plan import Plan, Precision, plan_from
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.engine import StepEngine, is_resident, make_engine, to_resident
from falaj.training.runtime.step.out_of_memory import is_out_of_memory

CURVE_STEPS = 8
CURVE_S = 1.0
GRAPH_STEPS = 5  # before a graph is replayed for the second time
TIMED_S = 0.3
ROUNDS = 3
SENT_BYTES = 1 << 30
MIN_SHARE = 1 / 16
"""The share of the data that is copied to the GPU for trials at least: copying all of it would take seconds."""
FATAL = ("CUDA error", "device-side assert", "illegal memory access")


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The outcome of trying a plan. `rejection` states why it must not be used."""

    plan: Plan
    samples_per_second: float = 0.0
    errors: NumericErrors | None = None
    memory_bytes: int = 0
    seconds: float = 0.0
    rejection: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return the outcome as plain values, for a pipe or a file."""
        return asdict(self)


def outcome_from(line: dict[str, Any]) -> TrialOutcome:
    errors = line["errors"] and NumericErrors(**line["errors"])
    return TrialOutcome(**{**line, "plan": plan_from(line["plan"]), "errors": errors})


class TrialRunner:
    """Tries plans on copies of a model and its loss, which are left unchanged."""

    def __init__(
        self, model: nn.Module, loss: Loss, source: SampleSource, options: FitOptions, device: torch.device
    ) -> None:
        self._model, self._loss, self._source = model, loss, source
        self._options, self._world = options, ProcessGroup(device=device)
        self._references: dict[int, NumericsReference] = {}
        self._noise = (0.0, 0.0)
        self._memory = FunctionState(loss, options.optimization.optimizer)
        self._is_rehearsal = False
        self._stable_gradients: dict[Precision, list[bool]] = {}

    @property
    def on_gpu(self) -> bool:
        return self._world.device.type == "cuda"

    @cached_property
    def sample(self) -> tuple[SampleSource, float]:
        """The source that trials read, and the seconds to read one sample of a dataset. Does not need the GPU."""
        return sample_items(self._source) if isinstance(self._source, DatasetSource) else (self._source, 0.0)

    @cached_property
    def _near_source(self) -> SampleSource:
        """The source on the device if it will be resident there; a part of it if it is large."""
        source, device = self.sample[0], self._world.device
        if (
            isinstance(source, TensorSource)
            and source.size_bytes > SENT_BYTES
            and is_resident(source, device)
        ):
            share = max(SENT_BYTES / source.size_bytes, MIN_SHARE)
            source = source.thinned(max(int(share * len(source)), 4 * self._first_size))
        return to_resident(source, device)

    @property
    def _first_size(self) -> int:
        given = self._options.batching.batch_size
        return INITIAL_BATCH_SIZE if given == "auto" else given

    def for_rehearsal(self) -> TrialRunner:
        """Return a runner that runs one step of a plan and measures nothing."""
        other = copy.copy(self)
        other._is_rehearsal = True
        return other

    def restore(self) -> None:
        """Restore the state of the caller's functions from before the trials."""
        self._memory.restore()

    def try_out(self, plan: Plan) -> TrialOutcome:
        """Train with `plan` for a moment and return the outcome; exceptions become rejections."""
        began = time.perf_counter()
        try:
            if plan.compile != "off":
                torch._dynamo.reset()
            with apply_numerics(plan):
                found = self._rehearsed(plan) if self._is_rehearsal else self._measured(plan)
        except Exception as failure:
            found = TrialOutcome(plan=plan, rejection=reason_of(failure))
        finally:
            self.restore()
            gc.collect()
            if self.on_gpu:
                ignore_lost_context(torch.cuda.empty_cache)
        return replace(found, seconds=time.perf_counter() - began)

    def step_seconds(self, plan: Plan) -> float:
        """Return roughly how long a step takes."""
        try:
            engine, batches, _ = self.engine(plan)
            took = []
            for number in (1, 2, 3):
                began = time.perf_counter()
                engine.run_step(number, batches.indices(number), _ignore)
                took.append(time.perf_counter() - began)
        finally:
            self.restore()
        return min(took)

    def _rehearsed(self, plan: Plan) -> TrialOutcome:
        engine, batches, messages = self.engine(plan)
        engine.run_step(1, batches.indices(1), _ignore)
        return TrialOutcome(plan=plan, rejection=fallback_reason(messages))

    def _measured(self, plan: Plan) -> TrialOutcome:
        batches, precision = self.batches(plan), precision_of(plan, self._world.device)
        reference = self._reference(batches)
        is_reference = is_plain(plan) and precision == "fp32"
        stable = [] if is_reference else self._stable(precision, batches, reference)
        engine, _, messages = self.engine(plan)  # made last: the functions' state refers to its model
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if is_reference:
            return self._timed(
                engine, batches, TrialOutcome(plan=plan, errors=NumericErrors(0.0, 0.0)), messages
            )
        loss, gradients = self._gradients(engine, batches, 1)
        errors = compare(loss, gradients, reference, stable)
        del gradients
        found = TrialOutcome(plan=plan, errors=errors)
        if is_plain(plan):  # the fallback of the run
            return self._timed(engine, batches, found, messages)
        fault = fallback_reason(messages) or numerics_fault(errors, reference, precision)
        if fault is not None:
            return replace(found, rejection=fault)
        return self._timed(engine, batches, found, messages, reference=reference)

    def _timed(
        self,
        engine: StepEngine,
        batches: BatchPlan,
        found: TrialOutcome,
        messages: list[str],
        *,
        reference: NumericsReference | None = None,
    ) -> TrialOutcome:
        """Measure the speed, unless the first losses differ from those of the reference."""
        loss_curve, rest_s = self._loss_curve(engine, batches, least=GRAPH_STEPS if found.plan.graph else 2)
        fault = fallback_reason(messages)
        if fault is None and reference is not None:
            fault = loss_curve_fault(loss_curve, reference, precision_of(found.plan, self._world.device))
        if fault is not None:
            return replace(found, rejection=fault)
        rate = self._rate(engine, batches, first=len(loss_curve) + 1, step_s=rest_s)
        memory = torch.cuda.max_memory_allocated() if self.on_gpu else 0
        return replace(
            found, samples_per_second=rate, memory_bytes=memory, rejection=fallback_reason(messages)
        )

    def batches(self, plan: Plan) -> BatchPlan:
        samples = len(self._near_source)
        batch_size = min(plan.batch_size or self._first_size, samples)
        return BatchPlan(samples, batch_size, self._options.batching.seed, drop_last=True)

    def engine(
        self, plan: Plan, *, source: SampleSource | None = None
    ) -> tuple[StepEngine, BatchPlan, list[str]]:
        """Return an engine over a copy of the model, its batches, and the list of its messages."""
        batching, messages = self._options.batching, list[str]()
        batches = self.batches(plan)
        model, loss, options = self._own_copy()
        engine = make_engine(
            model,
            loss,
            source or self._near_source,
            options,
            plan,
            batches=batches,
            total=batching.steps or 1000,
            world=self._world,
            notify=messages.append,
            endless=True,
        )
        engine.prepare(plan)
        return engine, batches, messages

    def _own_copy(self) -> tuple[nn.Module, Loss, FitOptions]:
        """Return copies of the model, the loss, and an optimizer that the caller made; see `restore`."""
        optimization, copies = self._options.optimization, dict[int, Any]()
        model, loss, optimizer = copy.deepcopy((self._model, self._loss, optimization.optimizer), copies)
        self._memory.install_copies(copies)
        return model, loss, replace(self._options, optimization=replace(optimization, optimizer=optimizer))

    def _reference(self, batches: BatchPlan) -> NumericsReference:
        """Return the results of plain fp32; noise and first losses are those of the first batch size."""
        size = batches.batch_size
        if size not in self._references:
            first = not self._references
            with apply_numerics(Plan()), full_fp32():
                self._references[size] = self._plain(batches, first=first)
        return self._references[size]

    def _plain(self, batches: BatchPlan, *, first: bool) -> NumericsReference:
        plain = Plan(batch_size=batches.batch_size, micro_batches=self._options.micro_batches)
        engine, _, _ = self.engine(plain)
        loss, gradients = self._gradients(engine, batches, 1)
        loss_curve: list[float] = []
        if first:
            other, others = self._gradients(engine, batches, 2)
            self._noise = relative_distance(others, gradients), abs(other - loss)
            del others
            loss_curve, _ = self._loss_curve(engine, batches, least=GRAPH_STEPS if self.on_gpu else 2)
        noise, spread = self._noise
        return NumericsReference(
            loss=loss, gradients=gradients, noise=noise, spread=spread, loss_curve=loss_curve
        )

    def _stable(self, precision: Precision, batches: BatchPlan, reference: NumericsReference) -> list[bool]:
        """Return which gradients can be compared, determined with the first batch size."""
        if precision not in self._stable_gradients:
            with apply_numerics(Plan()), full_fp32():
                engine, _, _ = self.engine(Plan(batch_size=batches.batch_size))
                perturb(engine.step.model, PERTURBATION[precision])
                _, shaken = self._gradients(engine, batches, 1)
            self._stable_gradients[precision] = stable_gradients(shaken, reference.gradients)
        return self._stable_gradients[precision]

    def _gradients(
        self, engine: StepEngine, batches: BatchPlan, number: int
    ) -> tuple[float, list[Tensor | None]]:
        loss = engine.gradients(number, batches.indices(number))
        scale = engine.step.scaler.get_scale() if engine.step.scaler else 1.0
        parameters = engine.step.model.parameters()
        return loss.item(), [None if p.grad is None else p.grad.detach() / scale for p in parameters]

    def _loss_curve(self, engine: StepEngine, batches: BatchPlan, *, least: int) -> tuple[list[float], float]:
        """Return the losses of the first steps, and the seconds of the last one."""
        losses: list[float] = []
        began = last = time.perf_counter()
        took = 0.0
        while len(losses) < CURVE_STEPS and (len(losses) < least or last - began < CURVE_S):
            number = len(losses) + 1
            engine.run_step(number, batches.indices(number), lambda loss: losses.append(loss.item()))
            now = time.perf_counter()
            took, last = now - last, now
        return losses, took

    def _rate(self, engine: StepEngine, batches: BatchPlan, *, first: int, step_s: float) -> float:
        """Return the samples per second, the best of a few rounds."""
        count = max(1, min(2000, int(TIMED_S / max(step_s, 1e-6))))
        rounds = 1 if step_s > TIMED_S else ROUNDS
        best, number, late = 0.0, first, time.perf_counter() + 2 * rounds * max(TIMED_S, step_s)
        for _ in range(rounds):
            began, samples, end = self._now(), 0, number + count
            while number < end and (not samples or time.perf_counter() < late):
                indices = batches.indices(number)
                engine.run_step(number, indices, _ignore)
                samples, number = samples + len(indices), number + 1
            best = max(best, samples / (self._now() - began))
            if time.perf_counter() >= late:
                break
        return best

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def perturb(model: nn.Module, by: float) -> None:
    """Change each weight up or down by a relative amount."""
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=rng, dtype=torch.int8)
            parameter.mul_(1 + by * (2 * signs.to(parameter.device) - 1))


def is_plain(plan: Plan) -> bool:
    """Return whether `plan` is the baseline that others are compared with."""
    return replace(plan, batch_size=None, micro_batches=1, workers=None, prefetch=None) == Plan()


def fallback_reason(messages: list[str]) -> str | None:
    """Return why a plan fell back to something else during its trial, or None."""
    return messages[0].partition(": ")[2] or messages[0] if messages else None


def reason_of(failure: Exception) -> str:
    first = (str(failure).strip() or type(failure).__name__).split("\n")[0][:160]
    return f"out of memory ({first})" if is_out_of_memory(failure) else f"{type(failure).__name__}: {first}"


def is_fatal(outcome: TrialOutcome) -> bool:
    """Return whether the process can no longer use its GPU."""
    return any(words in (outcome.rejection or "") for words in FATAL)


def ignore_lost_context(act: Callable[[], None]) -> None:
    try:
        act()
    except RuntimeError:
        return  # the CUDA context is lost, see `is_fatal`


def _ignore(_: Tensor) -> None:
    return


SAMPLES_AT_MOST = 256
SAMPLES_AT_LEAST = 8
READING_S = 1.0


class SampledSource:
    """A source of `count` samples that repeats the few that were read."""

    def __init__(self, columns: TensorSource, count: int) -> None:
        self._columns, self._count = columns, count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        return self._columns.read(indices % len(self._columns), seed=seed)


def sample_items(items: DatasetSource) -> tuple[SampleSource, float]:
    """Return a few of `items` in memory, and the seconds to read one; `items` itself if they are not tensors."""
    first = min(len(items), SAMPLES_AT_LEAST)
    items.read(torch.arange(first), seed=0)  # warm up: files are opened and modules imported
    began = time.perf_counter()
    batch = items.read(torch.arange(first), seed=0)
    sample_s = (time.perf_counter() - began) / first
    count = min(len(items), SAMPLES_AT_MOST, int(READING_S / max(sample_s, 1e-9)))
    if count > first:
        began = time.perf_counter()
        batch = items.read(torch.arange(count), seed=0)
        sample_s = (time.perf_counter() - began) / count
    try:
        columns = TensorSource(batch, where="data")
    except InvalidTraining:
        return items, sample_s
    if len(columns) != max(count, first):  # a collate function of the caller's that does not stack
        return items, sample_s
    return SampledSource(columns, len(items)), sample_s
