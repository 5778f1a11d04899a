"""Batches of predictions as Arrow: encoded by the model server, decoded to read one of them.

The id of a prediction is the id of its batch and its number in the batch (`ID-12`); a row of a request with several
rows has its row number appended (`ID-12.3`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from falaj.errors import Damaged, InvalidInput, NotFound, shorten
from falaj.records.serving.endpoints import SHADOW
from falaj.records.serving.tensors import ServedModel
from falaj.serving.dependencies import PredictedBatch

ArrowTable: TypeAlias = Any

COMPRESSION = "zstd"


_ID = re.compile(r"(.+)-(0|[1-9][0-9]{0,9})(?:\.(0|[1-9][0-9]{0,9}))?")


def split_id(prediction: str) -> tuple[str, int, int | None]:
    """Split the id of a prediction into batch, number and row, if it has one."""
    found = _ID.fullmatch(prediction)
    if found is None:
        raise NotFound(f"{prediction!r} is not a prediction id; an id ends in a number, like ID-12")
    batch, number, row = found.groups()
    return batch, int(number), None if row is None else int(row)


# ------------------------------------------------------------------------------------------- encoding


class BatchRows:
    """Collected responses of one version, as flat lists and arrays to keep the cost per request low."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.rows = 0
        self.size_bytes = 0
        self._numbers: list[int] = []
        self._counts: list[int] = []
        self._moments: list[int] = []
        self._callers: list[str] = []
        self._requests: list[str] = []
        self._spans: list[int] = []
        self._tensors: list[list[Any]] = [[] for _ in (*model.inputs, *model.outputs)]
        self._has_rows = True

    def add(self, answered: PredictedBatch, numbers: Sequence[int]) -> None:
        """Add an answered batch whose requests have these numbers."""
        moment = int(answered.at.timestamp() * 1e6)
        self._numbers += numbers
        self._counts += answered.counts
        self._moments += [moment] * len(numbers)
        self._callers += answered.callers
        self._requests += answered.requests
        rows = answered.rows
        self.rows += rows
        self._spans.append(rows)
        for kept, array in zip(self._tensors, (*answered.inputs, *answered.outputs), strict=True):
            kept.append(array)
            self.size_bytes += array.nbytes
            if array.shape[:1] != (rows,):
                self._has_rows = False

    def blocks(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return inputs and outputs by name as one array each; tensors that cannot be concatenated are left out."""
        joined = {name: block for name, block in self._joined().items() if block is not None}
        inputs = {name for name, _ in self._places()[: len(self.model.inputs)]}
        return (
            {name[3:]: block for name, block in joined.items() if name in inputs},
            {name[4:]: block for name, block in joined.items() if name not in inputs},
        )

    def table(self, features: Sequence[str]) -> ArrowTable:
        import numpy as np
        import pyarrow as pa

        counts = np.array(self._counts)
        each = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        moments = pa.array(np.array(self._moments)[each]).cast(pa.timestamp("us", tz="UTC"))
        columns: dict[str, Any] = {
            "number": pa.array(np.array(self._numbers)[each], pa.int32()),
            "row": pa.array(np.arange(self.rows) - first, pa.int32()),
            "at": moments,
            "caller": pa.array(self._callers, pa.string()).dictionary_encode().take(pa.array(each)),
            "request": pa.array(self._requests, pa.string()).take(pa.array(each)),
        }
        joined = self._joined()
        for name, place in self._places():
            columns[name] = _lists(joined[name], self._tensors[place], self._spans)
        facts = {"model": self.model.name, "version": self.model.version, "features": list(features)}
        return pa.table(columns, metadata={"falaj": json.dumps(facts)})

    def _places(self) -> list[tuple[str, int]]:
        names = [f"in.{tensor.name}" for tensor in self.model.inputs]
        names += [f"out.{tensor.name}" for tensor in self.model.outputs]
        return [(name, place) for place, name in enumerate(names)]

    def _joined(self) -> dict[str, Any]:
        """Return each tensor as one array; None if it has no row dimension or its shape varies."""
        import numpy as np

        found: dict[str, Any] = {}
        for name, place in self._places():
            try:
                found[name] = np.concatenate(self._tensors[place]) if self._has_rows else None
            except ValueError:
                found[name] = None
        return found


def encode_batch(rows: BatchRows, *, features: Sequence[str]) -> bytes:
    """Encode a batch for the prediction log."""
    import pyarrow as pa

    table = rows.table(features)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=COMPRESSION)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _lists(block: Any, arrays: Sequence[Any], spans: Sequence[int]) -> Any:
    """Return a tensor as one list per row; a tensor without a row dimension is put in the first row."""
    import numpy as np
    import pyarrow as pa

    if block is not None:
        values = np.ravel(block)
        ends = np.arange(len(block) + 1) * (block.size // len(block))
    else:
        lengths: list[int] = []
        for array, rows in zip(arrays, spans, strict=True):
            whole = not array.ndim or len(array) != rows
            lengths += [array.size, *([0] * (rows - 1))] if whole else [array.size // rows] * rows
        values = np.concatenate([np.ravel(array) for array in arrays])
        ends = np.concatenate([[0], np.cumsum(lengths)])
    plain = pa.array([_text(v) for v in values], pa.string()) if values.dtype == object else pa.array(values)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), plain)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# ------------------------------------------------------------------------------------------- decoding


def decode_batch(content: Any, *, limit_bytes: int) -> DecodedBatch:
    """Decode a batch, as the parser process returns it. Raise Damaged if it is not one of up to `limit_bytes`."""
    from falaj.governance import arrow_ipc

    try:
        return DecodedBatch(arrow_ipc.read_result(content, where="predictions", limit_bytes=limit_bytes))
    except (InvalidInput, KeyError, ValueError, TypeError, AttributeError) as error:
        raise Damaged(f"a batch of predictions cannot be read: {shorten(str(error), limit=400)}") from error


class DecodedBatch:
    """A decoded batch with an index of its predictions."""

    def __init__(self, table: ArrowTable) -> None:
        self._table = table
        self._facts: dict[str, Any] = json.loads(table.schema.metadata[b"falaj"])
        pairs = zip(table["number"].to_pylist(), table["row"].to_pylist(), strict=True)
        self._places = {pair: place for place, pair in enumerate(pairs)}
        self._output = _scored_output(table.schema)

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    @property
    def is_shadow(self) -> bool:
        """Tell whether a shadow made these predictions, so that they were never sent."""
        return str(self._facts["version"]).endswith(SHADOW)

    def place(self, number: int, row: int | None) -> int | None:
        """Return the row index of a prediction; None if it is missing, or has several rows and none was named."""
        if row is None and (number, 1) in self._places:
            return None
        return self._places.get((number, row or 0))

    def named(self, prediction: str) -> str:
        """Return the canonical id of a prediction: `ID-12.0` of a request with one row becomes `ID-12`."""
        batch, number, _ = split_id(prediction)
        return prediction if (number, 1) in self._places else f"{batch}-{number}"

    def at(self, place: int) -> Any:
        return self._table["at"][place].as_py()

    def predicted(self, place: int) -> list[float]:
        """Return the numbers to score: those of the first output with floating-point numbers."""
        values = [] if self._output is None else self._table[self._output][place].as_py()
        return [float(value) for value in values]

    def fields(self, place: int) -> dict[str, Any]:
        """Return all logged fields of one row."""
        row = {name: self._table[name][place].as_py() for name in self._table.column_names}
        inputs = {n[3:]: v for n, v in row.items() if n.startswith("in.")}
        outputs = {n[4:]: v for n, v in row.items() if n.startswith("out.")}
        names = self._facts["features"]
        if names and len(inputs) == 1:
            (values,) = inputs.values()
            inputs = dict(zip(names, values, strict=True)) if len(values) == len(names) else inputs
        logged = {name: row[name] for name in ("at", "caller", "request")}
        return logged | {"inputs": inputs, "outputs": outputs}


def _scored_output(schema: Any) -> str | None:
    import pyarrow as pa

    outputs = [field for field in schema if field.name.startswith("out.")]
    floats = [field for field in outputs if pa.types.is_floating(field.type.value_type)]
    numbers = [field for field in outputs if not pa.types.is_string(field.type.value_type)]
    chosen = floats or numbers
    return chosen[0].name if chosen else None
