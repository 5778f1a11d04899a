"""Probe a loaded model: the cost of a run, and whether requests may share one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.records.serving import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]
Run = Callable[[Sequence[Array]], Sequence[Any]]

MOST_ROWS = 32
"""Largest batch: beyond this a small model gains little, and every request waits for the last row."""
INLINE_S = 0.0005
"""A longer run would block the event loop and goes to a thread."""
BATCHING_GAIN = 0.75
"""Rows share a run in a thread only if it takes at most this share of separate runs."""
DYNAMIC_SIZE = 4
"""Size of dynamic dimensions after the first in a trial."""
TRIALS = 5
MAX_TRIAL_S = 0.2


@dataclass(frozen=True, slots=True)
class RunCost:
    """Seconds of one run, its largest batch (1: no batching), and whether it runs on the event loop."""

    seconds: float
    rows: int
    inline: bool


def measure(model: ServedModel, run: Run) -> RunCost:
    """Measure the cost of `model`. One that fails on synthetic values runs unbatched and in a thread."""
    try:
        single = _seconds(run, _sample(model, rows=1))
        shares = _has_rows(model) and _rows_are_independent(model, run)
        if not shares:
            return RunCost(single, rows=1, inline=single <= INLINE_S)
        full = _seconds(run, _sample(model, rows=MOST_ROWS))
    except Exception:  # the engine may raise anything on synthetic values
        return RunCost(INLINE_S, rows=1, inline=False)
    if full <= INLINE_S:
        return RunCost(single, rows=MOST_ROWS, inline=True)
    return RunCost(single, rows=MOST_ROWS if full <= BATCHING_GAIN * MOST_ROWS * single else 1, inline=False)


def _has_rows(model: ServedModel) -> bool:
    """Return whether the first dimension of all inputs and outputs is dynamic, and so may be the batch."""
    return all(tensor.shape[:1] == (DYNAMIC,) for tensor in (*model.inputs, *model.outputs))


def _rows_are_independent(model: ServedModel, run: Run) -> bool:
    """Return whether the result of a row is the same alone and in a batch."""
    rows = 3
    inputs = _sample(model, rows=rows)
    together = run(inputs)
    for number in range(rows):
        alone = run([array[number : number + 1] for array in inputs])
        for one, all_rows in zip(alone, together, strict=True):
            if len(all_rows) != rows or not _alike(one, all_rows[number : number + 1]):
                return False
    return True


def _alike(one: Array, other: Array) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.kind == "f":
        return np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
    return bool((one == other).all())


def _seconds(run: Run, inputs: Sequence[Array]) -> float:
    """Return the fastest of a few runs after a warm-up."""
    run(inputs)
    best = float("inf")
    until = time.perf_counter() + MAX_TRIAL_S
    for _ in range(TRIALS):
        began = time.perf_counter()
        run(inputs)
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > until:
            break
    return best


def _sample(model: ServedModel, *, rows: int) -> list[Array]:
    random = np.random.default_rng(7)
    return [_values(tensor, rows, random) for tensor in model.inputs]


def _values(tensor: Tensor, rows: int, random: np.random.Generator) -> Array:
    first = [rows if size == DYNAMIC else size for size in tensor.shape[:1]]
    rest = [DYNAMIC_SIZE if size == DYNAMIC else size for size in tensor.shape[1:]]
    if tensor.datatype is Datatype.BYTES:
        return np.full((*first, *rest), "0", np.object_)
    drawn = random.random((*first, *rest))
    if tensor.datatype in (Datatype.FP16, Datatype.FP32, Datatype.FP64):
        return drawn.astype(NUMPY[tensor.datatype])
    return (drawn > 0.5).astype(NUMPY[tensor.datatype])  # 0 and 1 suit flags, categories and counts
