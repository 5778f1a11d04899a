"""Probe a loaded model: the cost of a run, and whether requests may share one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]
Run = Callable[[Sequence[Array]], Sequence[Any]]

MOST_ROWS = 32
"""Largest batch: beyond this a small model gains little, and every request waits for the last row."""
INLINE_S = 0.0005
"""A longer run would block the event loop and goes to a thread."""
INLINE_OUTPUTS = 16_384
"""So does one with more values in its outputs: encoding them would take as long."""
BATCHING_GAIN = 0.75
"""Rows share a run in a thread only if it takes at most this share of separate runs."""
DYNAMIC_SIZE = 4
"""Size of dynamic dimensions after the first in a trial."""
ANY_ROWS = 2**62
"""Stands for the first dimension of a model that fixes it."""
TRIALS = 5
MAX_TRIAL_S = 0.2


@dataclass(frozen=True, slots=True)
class RunCost:
    """Seconds of one run, and its largest batch: 1 means no batching."""

    seconds: float
    rows: int
    inline_rows: int
    """Rows of the largest batch that runs on the event loop; 0: none does."""
    more_seconds: float = 0.0
    """Seconds that each row after the first adds."""

    @property
    def inline(self) -> bool:
        return self.inline_rows > 0

    def of_run(self, rows: int) -> float:
        """Return the expected seconds of a run."""
        return self.seconds + self.more_seconds * (rows - 1)

    def of_request(self, rows: int) -> float:
        """Return the expected seconds of a request: its part of a full batch, where it shares one."""
        return self.of_run(self.rows) / self.rows * rows if rows < self.rows else self.of_run(rows)


def measure(model: ServedModel, run: Run, *, is_bounded: bool, max_batch_rows: int | None = None) -> RunCost:
    """Measure the cost of `model`. One that fails on synthetic values runs unbatched and in a thread.

    Batches have at most `max_batch_rows`; if nobody has chosen that, 32, and only where sharing a run pays.
    What was measured holds for other values only if the model `is_bounded`; any other never runs on the event loop.
    """
    most = max_batch_rows or MOST_ROWS
    try:
        single = _measured(run, _sample(model, rows=1))
        shares = _has_rows(model) and _rows_are_independent(model, run)
        full = _measured(run, _sample(model, rows=most)) if _chooses_rows(model) else single
    except Exception:  # the engine may raise anything on synthetic values
        return RunCost(INLINE_S, rows=1, inline_rows=0)
    inline_rows = 0
    if is_bounded and full.is_quick:
        inline_rows = most if _chooses_rows(model) else ANY_ROWS
    elif is_bounded and single.is_quick and not shares:
        inline_rows = 1
    pays = inline_rows or max_batch_rows or full.seconds <= BATCHING_GAIN * most * single.seconds
    return RunCost(
        single.seconds,
        rows=most if shares and pays else 1,
        inline_rows=inline_rows,
        more_seconds=max(0.0, full.seconds - single.seconds) / max(1, most - 1),
    )


def _chooses_rows(model: ServedModel) -> bool:
    """Return whether a request chooses the first dimension of an input."""
    return any(tensor.shape[:1] == (DYNAMIC,) for tensor in model.inputs)


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


class _Measured(NamedTuple):
    seconds: float
    outputs: int

    @property
    def is_quick(self) -> bool:
        return self.seconds <= INLINE_S and self.outputs <= INLINE_OUTPUTS


def _measured(run: Run, inputs: Sequence[Array]) -> _Measured:
    """Return the fastest of a few runs after a warm-up, and the number of values in its outputs."""
    outputs = sum(np.size(array) for array in run(inputs))
    best = float("inf")
    until = time.perf_counter() + MAX_TRIAL_S
    for _ in range(TRIALS):
        began = time.perf_counter()
        run(inputs)
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended > until:
            break
    return _Measured(best, outputs)


def _sample(model: ServedModel, *, rows: int) -> list[Array]:
    random = np.random.default_rng(7)
    return [_values(tensor, rows, random) for tensor in model.inputs]


def _values(tensor: Tensor, rows: int, random: np.random.Generator) -> Array:
    first = [rows if size == DYNAMIC else size for size in tensor.shape[:1]]
    rest = [DYNAMIC_SIZE if size == DYNAMIC else size for size in tensor.shape[1:]]
    if tensor.datatype is Datatype.BYTES:
        return np.full((*first, *rest), "0", np.object_)
    drawn = random.random((*first, *rest))
    if tensor.datatype in (Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64):
        return drawn.astype(NUMPY[tensor.datatype])
    return (drawn > 0.5).astype(NUMPY[tensor.datatype])  # 0 and 1 suit flags, categories and counts
