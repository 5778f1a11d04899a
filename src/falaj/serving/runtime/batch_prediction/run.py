"""A batch prediction: read parts in order, predict and encode them on all cores, write them in order, and resume."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from falaj.errors import Conflict, FalajError, InvalidInput, Unavailable
from falaj.ports.table_folders import TableFolders
from falaj.records.control.predictions import PredictionProgress, PredictionRun, PredictionSummary
from falaj.records.names import repeated_names
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.runtime.batch_prediction.column_binding import ColumnPlan, UnfitColumnError, plan_columns
from falaj.serving.runtime.batch_prediction.input_tables import (
    TEXT_BYTES,
    InputTable,
    RowSource,
    open_copy,
    open_input,
    plain_type,
    read_parts,
    require_one_schema,
    row_bytes,
)
from falaj.serving.runtime.batch_prediction.partial_output import (
    KeptHere,
    OutputKeeper,
    PartialOutput,
    open_partial,
)
from falaj.serving.runtime.engine import LONGEST_S, QUICK_S, ModelEngine
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]
Report = Callable[[PredictionProgress], None]

RUN_ROWS = 4096
"""Rows of one call of the model: with more, what lies between two layers of a small network leaves the cache."""
RUN_BYTES = 16 << 20
"""Bytes of the inputs, or of the outputs, of one call."""
PART_ROWS = 1 << 17
PART_BYTES = 64 << 20
"""A part is a row group of the output: so many rows, or fewer where they are wide."""
COMMIT_S = 1.0
"""A killed run repeats about so much work."""
STOP_S = 0.2
"""A run notices so soon that it is to stop."""
COMPRESSION = "snappy"


class RunStopped(Exception):
    """The run was asked to stop; what it had done counts."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"stopped after row {rows}")
        self.rows = rows


def predict(
    run: PredictionRun,
    engine: ModelEngine,
    *,
    folder: Path,
    folders: TableFolders,
    report: Report,
    keeper: OutputKeeper = KeptHere(),  # noqa: B008 - it has no state
) -> PredictionSummary:
    """Predict the rows of a table into the file `data` of `folder`, from where an earlier run stopped.

    RunStopped once `keeper` is to stop: the runs of the model that go on then are not waited for.
    """
    began = time.monotonic()
    threads = run.threads or len(os.sched_getaffinity(0))
    with open_partial(folder, restart=run.restart) as output:
        if run.is_staged:
            table = open_copy(Path(run.source))
        else:
            table = open_input(Path(run.source), folders, version=output.header.get("delta_version"))
        plan = plan_columns(engine.model, run.tensors, table.schema, run.columns)
        _require_unseen(run, plan)
        outputs = _outputs(engine.model, run.columns.outputs)
        encoder = PartEncoder(engine, plan, outputs, run, table.schema, row_bytes(table, plan.read))
        require_one_schema(table, plan.read)
        if run.to_delta:
            folders.require_storable(encoder.schema)
        _require_same_run(run, table, output, encoder)
        resumed = output.rows
        keeper.begin(resumed)
        report(PredictionProgress(rows=resumed, total=table.rows, resumed=resumed))
        _predict_rest(table, encoder, output, threads=threads, report=report, keeper=keeper)
        if not table.rows:
            output.append(encoder.empty(), rows=0, files=())
        output.finish()
    return PredictionSummary(
        rows=table.rows,
        resumed=resumed,
        columns=tuple(encoder.schema.names),
        seconds=round(time.monotonic() - began, 3),
        cpu_seconds=round(time.process_time(), 3),
    )


def _require_unseen(run: PredictionRun, plan: ColumnPlan) -> None:
    """Raise InvalidInput if a model that is evaluated takes the column that it is to predict."""
    if any(run.target in each.columns for each in plan.tensors):
        raise InvalidInput.at(
            "target",
            given=f"{run.target}, which {run.model} takes as an input",
            allowed="a column that the model does not get to see",
        )


def _require_same_run(
    run: PredictionRun, table: InputTable, output: PartialOutput, encoder: PartEncoder
) -> None:
    """Begin a run, or raise Conflict if the earlier one was of another model, other columns or other rows.

    A job begins anew instead: nobody is there to decide.
    """
    header = {
        "model": run.model,
        "sha256": run.sha256,
        "source": Path(run.source).name if run.is_staged else run.source,
        "delta_version": table.version,
        "columns": run.columns.model_dump(mode="json"),
        "schema": hashlib.sha256(encoder.schema.serialize().to_pybytes()).hexdigest(),
        "part_rows": encoder.part_rows,
    }
    if output.header and run.is_staged:
        try:
            _require_same(run, table, output, header)
        except Conflict as error:
            print(f"{error.message.partition('; --restart')[0]}: it begins anew", file=sys.stderr, flush=True)
            output.forget()
    if not output.header:
        output.begin(header)
        return
    _require_same(run, table, output, header)


def _require_same(
    run: PredictionRun, table: InputTable, output: PartialOutput, header: dict[str, Any]
) -> None:
    stopped = f"an earlier run of {output.header['model']} stopped after row {output.rows}"
    fix = "--restart begins anew"
    if (output.header["model"], output.header["sha256"]) != (run.model, run.sha256):
        raise Conflict(
            f"{stopped}, and this one is of {run.model}: predictions of two versions are not mixed; {fix}, "
            f"{output.header['model']} instead of {run.model} goes on"
        )
    for name, words in (("source", "another input"), ("columns", "other columns"), ("schema", "other types")):
        if output.header[name] != header[name]:
            raise Conflict(f"{stopped}, with {words} than this one; {fix}")
    now = [[each.name, each.mark] for each in table.sources()]
    if output.files != now[: len(output.files)]:
        changed = next(
            (was[0] for was, found in zip(output.files, now, strict=False) if was != found), "the input"
        )
        raise Conflict(f"{stopped}, and {changed} has changed since; {fix}")


def _predict_rest(
    table: InputTable,
    encoder: PartEncoder,
    output: PartialOutput,
    *,
    threads: int,
    report: Report,
    keeper: OutputKeeper,
) -> None:
    """Predict the rows that are left: at most two parts for each thread are in memory."""
    resumed, committed_at, sources = output.rows, time.monotonic(), table.sources()
    parts = read_parts(table, encoder.plan.read, start=output.rows, part_rows=output.header["part_rows"])
    pool = ThreadPoolExecutor(threads, thread_name_prefix="predict")
    try:
        for started in _in_order(pool, encoder, parts, first_row=output.rows, most=2 * threads):
            part = _result(table, started, keeper)
            output.append(
                memoryview(part.content), rows=part.rows, files=_files(sources, output.rows, part.rows)
            )
            if time.monotonic() - committed_at >= COMMIT_S:
                output.commit()
                keeper.offer(output.counted(), total=table.rows)
                committed_at = time.monotonic()
            report(PredictionProgress(rows=output.rows, total=table.rows, resumed=resumed))
    except BaseException as error:
        pool.shutdown(wait=not isinstance(error, RunStopped), cancel_futures=True)
        with suppress(FalajError):  # the first error says what is wrong
            output.commit()
            keeper.keep(output.counted())
        raise
    pool.shutdown()


class _Started(NamedTuple):
    first_row: int
    future: Future[EncodedPart]


def _in_order(
    pool: ThreadPoolExecutor, encoder: PartEncoder, parts: Iterator[Any], *, first_row: int, most: int
) -> Iterator[_Started]:
    """Yield the parts in the order of their rows; `most` are started ahead."""
    started: deque[_Started] = deque()
    while True:
        try:
            part = next(parts, None)
        except BaseException:
            yield from started  # what was read before the fault is predicted, and counts
            raise
        if part is None:
            break
        started.append(_Started(first_row, pool.submit(encoder.encode, part)))
        first_row += part.num_rows
        if len(started) >= most:
            yield started.popleft()
    yield from started


def _result(table: InputTable, started: _Started, keeper: OutputKeeper) -> EncodedPart:
    try:
        while not keeper.is_stopping():
            if wait((started.future,), STOP_S).done:
                return started.future.result()
        raise RunStopped(started.first_row)
    except UnfitColumnError as error:
        row = started.first_row + error.row
        raise InvalidInput.at(
            f"{table.place(row)}, column {error.column}",
            given=f"{error.given} (row {row} of the input)",
            allowed=error.allowed,
            fix="correct the input, then run the same command again",
        ) from None


def _files(sources: Sequence[RowSource], first_row: int, count: int) -> list[tuple[str, str]]:
    """Return the names and marks of what `count` rows from `first_row` on come from."""
    found, start = [], 0
    for each in sources:
        if start < first_row + count and start + each.rows > first_row:
            found.append((each.name, each.mark))
        start += each.rows
    return found


class EncodedPart(NamedTuple):
    """A part of the output as a whole Parquet file in memory."""

    content: Any
    rows: int


@dataclass(frozen=True)
class PartEncoder:
    """Predicts a part of the rows and encodes it as Parquet; several threads do so at once."""

    engine: ModelEngine
    plan: ColumnPlan
    outputs: tuple[tuple[int, Tensor], ...]
    run: PredictionRun
    source: Any
    """The schema of the input."""
    read_bytes: float
    """About the bytes of a row that is read."""

    def __post_init__(self) -> None:
        names = [*self.plan.kept, *(self._name(tensor) for _, tensor in self.outputs)]
        if twice := sorted(set(repeated_names(names))):
            raise InvalidInput.at(
                "columns of the output",
                given=", ".join(twice),
                allowed="each name once, whether in capitals or not",
                fix="--prefix predicted_ renames the predictions; --keep chooses the other columns",
            )

    @property
    def schema(self) -> Any:
        kept = [pa.field(name, plain_type(self.source.field(name).type)) for name in self.plan.kept]
        made = [pa.field(self._name(tensor), _arrow_type(tensor)) for _, tensor in self.outputs]
        return pa.schema([*kept, *made])

    @property
    def part_rows(self) -> int:
        tensors = sum(_row_bytes(tensor) for tensor in (*self.engine.model.inputs, *self._tensors()))
        return max(1, min(PART_ROWS, PART_BYTES // max(1, int(self.read_bytes + tensors))))

    def encode(self, part: Any) -> EncodedPart:
        """Return the predictions of `part`, a table in one piece, with the columns that are kept."""
        rows = part.num_rows
        (batch,) = part.to_batches()
        arrays = [batch.column(name) for name in self.plan.kept]
        predicted = self._predict(batch)
        for place, tensor in self.outputs:
            arrays.append(_column(tensor, predicted[place], rows))
        return EncodedPart(self._encoded(pa.Table.from_arrays(arrays, schema=self.schema)), rows)

    def empty(self) -> memoryview:
        """Return the output of an input without rows."""
        return memoryview(self._encoded(self.schema.empty_table()))

    def _predict(self, batch: Any) -> list[Array]:
        size = self._run_rows()
        pieces: list[list[Array]] = []
        for start in range(0, batch.num_rows, size):
            rows = batch.slice(start, size)
            try:
                inputs = [each.array(rows) for each in self.plan.tensors]
            except UnfitColumnError as error:
                error.row += start
                raise
            pieces.append(self._run(inputs, rows.num_rows))
        return [np.concatenate(each) for each in zip(*pieces, strict=True)]

    def _run(self, inputs: list[Array], rows: int) -> list[Array]:
        """Run the model on a piece; one that takes a fixed number of rows gets the last one again and again."""
        fixed = self._fixed_rows()
        if fixed is not None and rows < fixed:
            inputs = [np.concatenate([each, np.repeat(each[-1:], fixed - rows, axis=0)]) for each in inputs]
        outputs = self._timed_run(inputs)
        for tensor, found in zip(self.engine.model.outputs, outputs, strict=True):
            if found.shape[:1] != (fixed or rows,):
                raise InvalidInput.at(
                    f"output {tensor.name} of {self.run.model}",
                    given=f"the shape {list(found.shape)} for {rows} rows",
                    allowed="a prediction for each row",
                )
        return [found[:rows] for found in outputs]

    def _timed_run(self, inputs: Sequence[Array]) -> list[Array]:
        """Run with the time limit of quick models where it is quick: longer runs give memory back after each."""
        if self.engine.cost.of_run(len(inputs[0])) < QUICK_S / 10:
            try:
                return self.engine.run(inputs, limit_s=QUICK_S)
            except Unavailable:
                pass  # the machine was busy
        return self.engine.run(inputs, limit_s=LONGEST_S)

    def _run_rows(self) -> int:
        """Return the rows of one call: as many as pay off, or 1 if the model mixes the rows of a call."""
        if (fixed := self._fixed_rows()) is not None:
            return fixed
        if self.engine.cost.rows == 1:
            return 1
        inputs = sum(_row_bytes(tensor) for tensor in self.engine.model.inputs)
        outputs = sum(_row_bytes(tensor) for tensor in self._tensors())
        return max(1, min(RUN_ROWS, RUN_BYTES // max(1, inputs, outputs)))

    def _fixed_rows(self) -> int | None:
        sizes = {tensor.shape[0] for tensor in self.engine.model.inputs if tensor.shape}
        fixed = sizes - {DYNAMIC}
        return max(fixed) if fixed else None

    def _tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self.outputs]

    def _name(self, tensor: Tensor) -> str:
        return f"{self.run.columns.prefix}{tensor.name}"

    def _encoded(self, table: Any) -> Any:
        sink = pa.BufferOutputStream()
        texts = [field.name for field in table.schema if _repeats(field.type)]
        pq.write_table(table, sink, compression=COMPRESSION, use_dictionary=texts, row_group_size=PART_ROWS)
        return sink.getvalue()


def _outputs(model: ServedModel, chosen: Sequence[str]) -> tuple[tuple[int, Tensor], ...]:
    """Return the outputs to write and their places among those of the model."""
    known = {tensor.name: (place, tensor) for place, tensor in enumerate(model.outputs)}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise InvalidInput.at(
            "outputs", given=", ".join(unknown), allowed=f"outputs of the model: {', '.join(known)}"
        )
    return tuple(known[name] for name in dict.fromkeys(chosen or known))


def _arrow_type(tensor: Tensor) -> Any:
    is_text = tensor.datatype is Datatype.BYTES
    element = pa.string() if is_text else pa.from_numpy_dtype(NUMPY[tensor.datatype])
    return element if _is_scalar(tensor) else pa.list_(element)


def _is_scalar(tensor: Tensor) -> bool:
    """Return whether the model predicts one value for a row; else a row has a list of them."""
    return tensor.shape[1:] in ((), (1,))


def _column(tensor: Tensor, values: Array, rows: int) -> Any:
    flat = np.ravel(values)
    kind = _arrow_type(tensor)
    element = kind if _is_scalar(tensor) else kind.value_type
    texts = tensor.datatype is Datatype.BYTES
    plain = pa.array([_text(value) for value in flat] if texts else flat, element)
    if _is_scalar(tensor):
        return plain
    ends = np.arange(rows + 1, dtype=np.int32) * (flat.size // max(1, rows))
    return pa.ListArray.from_arrays(pa.array(ends), plain)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _repeats(kind: Any) -> bool:
    """Return whether values of a type are worth a dictionary: numbers that differ in each row are not."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind))


def _row_bytes(tensor: Tensor) -> int:
    size = TEXT_BYTES if tensor.datatype is Datatype.BYTES else NUMPY[tensor.datatype].itemsize
    return size * prod(each if each > 0 else 1 for each in tensor.shape[1:])
