"""The engine of an ensemble: steps run in order, independent ones side by side where it pays."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.errors import FalajError, InvalidInput, Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.ensembles import REQUEST, ComposedEnsemble, ComposedStep, places_of
from falaj.records.serving.tensors import ServedModel, Tensor
from falaj.serving.runtime.engine import LONGEST_S, ModelEngine, require_small_outputs
from falaj.serving.runtime.ensembles.step_meter import RunMeter
from falaj.serving.runtime.formats import declared_tensors
from falaj.serving.runtime.probe import RunCost
from falaj.serving.signatures import shape_fits

Array = npt.NDArray[Any]
Place = tuple[str, str]
"""A step, or REQUEST, and the name of a tensor there."""

PLATFORM = "ensemble"
PARALLEL_S = 0.001
"""Two steps of at least this length run side by side; handing over a shorter one takes as long as it does."""


class _Feed(NamedTuple):
    """A tensor of a step, and what it is made from: one place as it is, or several as its columns."""

    tensor: Tensor
    places: tuple[Place, ...]
    is_columns: bool


class EnsembleEngine:
    """A loaded ensemble: an engine for each step. It runs in threads of the server, and its steps where they do."""

    in_process = True

    def __init__(
        self, file: ServedFile, composed: ComposedEnsemble, engines: Mapping[str, ModelEngine]
    ) -> None:
        """`engines`: by the names of the steps. Raise InvalidInput if one has other tensors than were composed."""
        for step in composed.steps:
            _require_composed(step, engines[step.name].model)
        self.model = ServedModel(
            name=file.model,
            version=file.version,
            platform=PLATFORM,
            inputs=declared_tensors(composed.inputs),
            outputs=declared_tensors(composed.gives),
        )
        self.engines = engines
        self._levels = composed.composed_levels()
        self._feeds = {
            step.name: [_feed(step.inputs[tensor.name], tensor) for tensor in engines[step.name].model.inputs]
            for step in composed.steps
        }
        self._answers = [_feed(composed.outputs[tensor.name], tensor) for tensor in self.model.outputs]
        self.cost = cost_of([[engines[step.name].cost for step in level] for level in self._levels])
        self.runs = RunMeter()
        self.steps = {step.name: RunMeter() for step in composed.steps}
        width = max(len(level) for level in self._levels)
        instances = file.settings.instances or os.cpu_count() or 1
        self._pool = (
            ThreadPoolExecutor((width - 1) * instances, thread_name_prefix="step") if width > 1 else None
        )

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        """Return the outputs for `inputs`. Raise the error of a step with its name, Unavailable after `limit_s`."""
        began, failed = time.perf_counter(), True
        try:
            outputs = self._run(inputs, began + limit_s, limit_s)
            failed = False
            return outputs
        finally:
            self.runs.count(time.perf_counter() - began, failed=failed)

    def close(self) -> None:
        with ExitStack() as closing:
            for engine in self.engines.values():
                closing.callback(engine.close)
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, inputs: Sequence[Array], until: float, limit_s: float) -> list[Array]:
        rows = _rows(self.model, inputs)
        known: dict[Place, Array] = {
            (REQUEST, tensor.name): array for tensor, array in zip(self.model.inputs, inputs, strict=True)
        }
        for level in self._levels:
            for step, outputs in zip(level, self._run_level(level, known, rows, until, limit_s), strict=True):
                tensors = self.engines[step.name].model.outputs
                known |= {
                    (step.name, tensor.name): array for tensor, array in zip(tensors, outputs, strict=True)
                }
        found = [_tensor_of(known, each) for each in self._answers]
        require_small_outputs(found)
        return found

    def _run_level(
        self,
        level: Sequence[ComposedStep],
        known: Mapping[Place, Array],
        rows: int,
        until: float,
        limit_s: float,
    ) -> list[list[Array]]:
        """Return the outputs of the steps of a level; the first error of one of them, once all have ended."""
        long: list[ComposedStep] = []
        if len(level) > 1:
            long = [step for step in level if self.engines[step.name].cost.of_run(rows) >= PARALLEL_S]
        if self._pool is None or len(long) < 2:
            return [self._run_step(step, known, rows, until, limit_s) for step in level]
        beside: dict[str, Future[list[Array]]] = {
            step.name: self._pool.submit(self._run_step, step, known, rows, until, limit_s)
            for step in long[1:]
        }
        found, error = {}, None
        for step in [*(each for each in level if each.name not in beside), *long[1:]]:
            future = beside.get(step.name)
            try:
                found[step.name] = (
                    self._run_step(step, known, rows, until, limit_s) if future is None else future.result()
                )
            except Exception as raised:
                error = error or raised
        if error is not None:
            raise error
        return [found[step.name] for step in level]

    def _run_step(
        self, step: ComposedStep, known: Mapping[Place, Array], rows: int, until: float, limit_s: float
    ) -> list[Array]:
        engine, began, failed = self.engines[step.name], time.perf_counter(), True
        try:
            if began >= until:
                raise Unavailable(
                    f"the time limit of {limit_s:g} s was over before it began; earlier steps took it"
                )
            feed = [_fed(known, each, is_strict=step.lookup is None) for each in self._feeds[step.name]]
            outputs = engine.run(feed, limit_s=until - began)
            _require_rows(engine.model, outputs, rows)
            failed = False
            return outputs
        except FalajError as error:
            raise error.within(step.title) from None
        except Exception as error:
            raise RuntimeError(f"{step.title}: {error}") from error
        finally:
            self.steps[step.name].count(time.perf_counter() - began, failed=failed)


def step_file(file: ServedFile, step: ComposedStep) -> ServedFile:
    """Return the version of a step as it is served: with the settings of the ensemble, as far as they concern it."""
    model, _, number = str(step.model).rpartition("@")
    is_onnx = step.format is FileFormat.ONNX  # which has the names in its file
    return ServedFile(
        model=model,
        version=number,
        registered=step.version,
        format=step.format or FileFormat.ONNX,
        inputs=() if is_onnx else declared_tensors(step.takes),
        outputs=() if is_onnx else declared_tensors(step.gives),
        settings=file.settings if is_onnx else file.settings.model_copy(update={"engine": None}),
    )


def cost_of(levels: Sequence[Sequence[RunCost]]) -> RunCost:
    """Return the cost of steps in order. Requests share a run only if they may share those of all steps.

    Of long steps side by side the longest counts. No ensemble runs on the event loop.
    """
    steps = [cost for level in levels for cost in level]
    return RunCost(
        seconds=sum(cost.seconds for level in levels for cost in _counted(level)),
        rows=min(cost.rows for cost in steps),
        inline_rows=0,
        more_seconds=sum(cost.more_seconds for level in levels for cost in _counted(level)),
    )


def _counted(level: Sequence[RunCost]) -> list[RunCost]:
    """Return the costs of a level that follow each other: short ones, and the longest of the others."""
    long = sorted((cost for cost in level if cost.seconds >= PARALLEL_S), key=lambda cost: cost.seconds)
    return [*(cost for cost in level if cost.seconds < PARALLEL_S), *long[-1:]]


def _rows(model: ServedModel, inputs: Sequence[Array]) -> int:
    counts = {len(array) for array in inputs}
    if len(counts) != 1:
        shown = ", ".join(
            f"{tensor.name} {list(array.shape)}" for tensor, array in zip(model.inputs, inputs, strict=True)
        )
        raise InvalidInput(
            f"the inputs have different numbers of rows: given {shown}, allowed the same in all"
        )
    return counts.pop()


def _feed(sources: str | tuple[str, ...], tensor: Tensor) -> _Feed:
    places = tuple((place.step, place.tensor) for place in places_of(sources))
    return _Feed(tensor, places, is_columns=not isinstance(sources, str))


def _fed(known: Mapping[Place, Array], feed: _Feed, *, is_strict: bool) -> Array:
    """Return an input of a step. Raise InvalidInput if it has another shape than a strict step takes."""
    array = _tensor_of(known, feed)
    if is_strict and not shape_fits(array.shape, feed.tensor.shape):
        shown = ", ".join(".".join(place) for place in feed.places)
        raise InvalidInput(
            f"its input {feed.tensor} got the shape {list(array.shape)} from {shown}; "
            f"allowed {list(feed.tensor.shape)}"
        )
    return array


def _tensor_of(known: Mapping[Place, Array], feed: _Feed) -> Array:
    if not feed.is_columns:
        return known[feed.places[0]]
    columns = [array.reshape(len(array), -1) for array in (known[place] for place in feed.places)]
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)


def _require_rows(model: ServedModel, outputs: Sequence[Array], rows: int) -> None:
    """Raise InvalidInput if a step did not answer each row: whose answer is whose?"""
    for tensor, array in zip(model.outputs, outputs, strict=True):
        if array.shape[:1] != (rows,):
            raise InvalidInput(
                f"it answered {tensor.name} with the shape {list(array.shape)} for {rows} rows; "
                "its answer is not passed on"
            )


def _require_composed(step: ComposedStep, model: ServedModel) -> None:
    """Raise InvalidInput if the opened step has other inputs or outputs than the ensemble was composed with."""
    if step.lookup is not None:
        return
    pairs = (("inputs", step.takes, model.inputs), ("outputs", step.gives, model.outputs))
    for what, specs, found in pairs:
        composed = declared_tensors(specs)
        if len(composed) != len(found) or not all(map(_agree, composed, found)):
            raise InvalidInput.at(
                f"{step.title} {what}",
                given=", ".join(map(str, found)),
                allowed=f"{', '.join(map(str, composed))}, as the ensemble was composed",
                fix="register the version with the signature of its file, and compose the ensemble again",
            )


def _agree(composed: Tensor, found: Tensor) -> bool:
    return (composed.name, composed.datatype, len(composed.shape)) == (
        *(found.name, found.datatype),
        len(found.shape),
    ) and all(-1 in pair or pair[0] == pair[1] for pair in zip(composed.shape, found.shape, strict=True))
