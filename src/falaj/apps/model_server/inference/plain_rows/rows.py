"""Rows of plain tables as the inputs of a model: columns by name, or values in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.apps.model_server.inference.protocol import FLOATS, InferRequest, InputTensor
from falaj.errors import Fault, InvalidInput, shorten
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.lookups.joins import FeatureJoin
from falaj.serving.signatures import MAX_FAULTS, invalid_request
from falaj.serving.tensors import NUMPY, from_values, to_bytes

Array = npt.NDArray[Any]
Values = Sequence[Any] | Array
"""The values of a column or of all rows: numbers, texts or null, or lists of them; or an array of numbers."""

_NONE = type(None)
_ALLOWED: dict[Datatype, tuple[frozenset[type], str]] = {
    datatype: (frozenset(types), words)
    for datatypes, types, words in (
        (FLOATS, {int, float, _NONE}, "numbers; null is NaN"),
        ({Datatype.BOOL}, {bool}, "true and false"),
        ({Datatype.BYTES}, {str}, "texts"),
    )
    for datatype in datatypes
}
_WHOLE = frozenset({int}), "whole numbers"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a caller sent: columns by name, or each row as a value or list of its own.

    The cells of a CSV file are texts whatever they mean: `is_text`.
    """

    count: int
    columns: Mapping[str, Values] | None = None
    unnamed: Values = ()
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class RowSchema:
    """What rows are for a model version: `features` are the columns of its only input, if they have names."""

    model: ServedModel
    join: FeatureJoin | None = None
    features: tuple[str, ...] = ()

    @property
    def matrix(self) -> Tensor | None:
        """Return the input of a model that takes one matrix with a row of numbers for each row."""
        inputs = self.model.inputs
        is_matrix = len(inputs) == 1 and len(inputs[0].shape) == 2 and inputs[0].shape[0] == DYNAMIC
        return inputs[0] if is_matrix else None


def build_request(rows: Rows, schema: RowSchema, *, request: str = "") -> InferRequest:
    """Return rows as an inference request. Raise InvalidInput with all faults."""
    if rows.columns is None:
        inputs = [_whole_input(rows, schema)]
    elif schema.join is not None:
        inputs = _looked_up(rows, rows.columns, schema.join)
    elif schema.matrix is not None and not (len(rows.columns) == 1 and schema.matrix.name in rows.columns):
        inputs = [_stacked(rows, rows.columns, schema, schema.matrix)]
    else:
        inputs = _by_name(rows, rows.columns, schema.model)
    return InferRequest(inputs=inputs, id=request)


def _whole_input(rows: Rows, schema: RowSchema) -> InputTensor:
    """Return rows without names as the one input of a model."""
    if len(schema.model.inputs) != 1 or schema.join is not None:
        names = schema.join.inputs if schema.join else [tensor.name for tensor in schema.model.inputs]
        raise invalid_request(
            [Fault(where="rows", given="values without names", allowed=f"the columns {', '.join(names)}")]
        )
    (tensor,) = schema.model.inputs
    return _tensor(tensor, rows.unnamed, "rows", is_text=rows.is_text)


def _by_name(rows: Rows, columns: Mapping[str, Values], model: ServedModel) -> list[InputTensor]:
    wanted = {tensor.name: tensor for tensor in model.inputs}
    _require_columns(columns, list(wanted))
    found = []
    for name, tensor in wanted.items():
        values = columns[name]
        if tensor.shape[1:] == (1,) and len(values) and not isinstance(values[0], list):
            values = values[:, None] if isinstance(values, np.ndarray) else [[value] for value in values]
        found.append(_tensor(tensor, values, f"column '{name}'", is_text=rows.is_text))
    return found


def _stacked(rows: Rows, columns: Mapping[str, Values], schema: RowSchema, tensor: Tensor) -> InputTensor:
    """Return the columns side by side: in the order of the model's features, or as they are if those have no names."""
    width = tensor.shape[1]
    names = schema.features if len(schema.features) == width or width == DYNAMIC else ()
    if names:
        _require_columns(columns, names)
    elif width not in (DYNAMIC, len(columns)):
        fault = Fault(where="columns", given=f"{len(columns)}", allowed=f"{width}, in the order of the model")
        raise invalid_request([fault])
    block, faults = [], []
    for name in names or columns:
        try:
            block.append(_typed(columns[name], tensor.datatype, is_text=rows.is_text))
            if block[-1].ndim != 1:
                raise ValueError("lists")
        except (ValueError, OverflowError) as error:
            faults.append(_fault(f"column '{shorten(name)}'", error, tensor.datatype))
    if faults:
        raise invalid_request(faults[:MAX_FAULTS])
    stacked = np.stack(block, axis=1) if block else np.empty((rows.count, 0))
    return _packed(tensor.name, tensor.datatype, stacked)


def _looked_up(rows: Rows, columns: Mapping[str, Values], join: FeatureJoin) -> list[InputTensor]:
    """Return the keys and features that a lookup takes from a request, each in the type that its values have."""
    _require_columns(columns, join.inputs, optional=join.optional)
    keys = {key for part in join.views for key in part.keys}
    found, faults = [], []
    for name in (each for each in join.inputs if each in columns):
        values = columns[name]
        datatype = join.datatype_of(name)
        if name in keys:
            is_whole = not rows.is_text and _is_whole(values)
            datatype = Datatype.INT64 if is_whole else Datatype.BYTES
        try:
            found.append(_packed(name, datatype, _typed(values, datatype, is_text=rows.is_text)))
        except (ValueError, OverflowError) as error:
            faults.append(_fault(f"column '{name}'", error, datatype))
    if faults:
        raise invalid_request(faults[:MAX_FAULTS])
    return found


def _require_columns(
    given: Mapping[str, Values], wanted: Sequence[str], *, optional: frozenset[str] = frozenset()
) -> None:
    known = frozenset(wanted)
    allowed = f"the columns {shorten(', '.join(wanted), limit=400)}"
    faults = [
        Fault(where=f"column '{shorten(name)}'", given="an unknown name", allowed=allowed)
        for name in given
        if name not in known
    ][:MAX_FAULTS]
    faults += [
        Fault(where=f"column '{shorten(name)}'", given="nothing", allowed=allowed)
        for name in wanted
        if name not in given and name not in optional
    ]
    if faults:
        raise invalid_request(faults)


def _tensor(tensor: Tensor, values: Values, where: str, *, is_text: bool) -> InputTensor:
    try:
        return _packed(tensor.name, tensor.datatype, _typed(values, tensor.datatype, is_text=is_text))
    except (ValueError, OverflowError) as error:
        raise invalid_request([_fault(where, error, tensor.datatype)]) from None


def _packed(name: str, datatype: Datatype, array: Array) -> InputTensor:
    made = InputTensor(name=name, shape=list(array.shape), datatype=datatype)
    made.data = memoryview(to_bytes(array, datatype))  # type: ignore[assignment]
    return made


def _fault(where: str, error: Exception, datatype: Datatype) -> Fault:
    return Fault(where=where, given=shorten(str(error)), allowed=_allowed(datatype)[1])


def _allowed(datatype: Datatype) -> tuple[frozenset[type], str]:
    return _ALLOWED.get(datatype, _WHOLE)


# ------------------------------------------------------------------------------------------- values


def _is_whole(values: Values) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "iu"
    return all(type(value) is int for value in values)


def _typed(values: Values, datatype: Datatype, *, is_text: bool) -> Array:
    """Return values, which may be nested, as an array. Raise ValueError or OverflowError if they do not fit."""
    if isinstance(values, np.ndarray):
        return _cast(values, datatype)
    flat, shape = flatten(values)
    if is_text:
        flat = [_read_cell(cell, datatype) for cell in flat]
    allowed, _ = _allowed(datatype)
    for value in flat:
        if type(value) not in allowed:
            raise ValueError(f"{shorten(value)} ({type(value).__name__})")
    if datatype in FLOATS:
        flat = [np.nan if value is None else value for value in flat]
    if datatype is Datatype.BYTES:
        array = np.empty(len(flat), np.object_)
        array[:] = flat
    else:
        array = from_values(flat, datatype)
    return array.reshape(shape)


def _cast(array: Array, datatype: Datatype) -> Array:
    """Return an array of numbers in the type of a tensor. Raise ValueError or OverflowError if they do not fit."""
    kinds = {"f": "iuf", "b": "b", "O": ""}.get(NUMPY[datatype].kind, "iu")
    if array.dtype.kind not in kinds:
        raise ValueError(f"a column of {array.dtype}")
    if kinds == "iu" and len(array):
        bounds = np.iinfo(NUMPY[datatype])
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise OverflowError(f"a number that {datatype} cannot hold")
    try:
        with np.errstate(over="raise"):
            return array.astype(NUMPY[datatype])
    except FloatingPointError:
        raise OverflowError(f"a number that {datatype} cannot hold") from None


def flatten(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return nested lists as one list, and their shape. Raise ValueError if they have different lengths."""
    level, shape = list(values), [len(values)]
    while level and isinstance(level[0], list):
        size = len(level[0])
        if any(type(part) is not list or len(part) != size for part in level):
            raise ValueError("lists of different lengths")
        shape.append(size)
        level = [value for part in level for value in part]
    return level, shape


def _read_cell(cell: str, datatype: Datatype) -> Any:
    """Return the cell of a text file as a value. An empty one is null."""
    if datatype is Datatype.BYTES:
        return cell
    text = cell.strip()
    if datatype is Datatype.BOOL:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ValueError(shorten(text))
        return text.lower() in ("true", "1")
    if not text:
        return None
    if len(text) > 400 or "_" in text:
        raise ValueError(shorten(text))
    return float(text) if datatype in FLOATS else int(text)


def require_rows(count: int, most: int) -> None:
    if count > most:
        raise InvalidInput(f"rows: given {count}, allowed {most} in a request; send the rest in another")
