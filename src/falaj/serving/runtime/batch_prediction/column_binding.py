"""Which columns of the input become which inputs of the model, and how: exact names, checked casts, no silent loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from falaj.errors import Fault, InvalidInput
from falaj.records.control.predictions import EVERYTHING, PredictionColumns
from falaj.records.registry import TensorSpec
from falaj.records.serving.tensors import DYNAMIC, Datatype, ServedModel, Tensor
from falaj.serving.runtime.batch_prediction.input_tables import plain_type
from falaj.serving.tensors import NUMPY

Array = npt.NDArray[Any]

FLOATS = (Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64)


class UnfitColumnError(ValueError):
    """The values of a column in a part of the rows do not fit the model; `row` is the first such row of the part."""

    def __init__(self, column: str, row: int, given: str, allowed: str) -> None:
        super().__init__(f"column {column}: {given}")
        self.column, self.row, self.given, self.allowed = column, row, given, allowed


@dataclass(frozen=True)
class BoundTensor:
    """An input of the model and its columns; `shape` is that of one row."""

    tensor: Tensor
    columns: tuple[str, ...]
    shape: tuple[int, ...]
    is_list: bool

    def array(self, rows: Any) -> Array:
        """Return the columns of a batch of rows as one array; UnfitColumnError if a value does not fit."""
        if self.is_list:
            return self._of_lists(rows.column(self.columns[0]))
        if self.tensor.datatype is Datatype.BYTES:
            texts = np.empty((rows.num_rows, len(self.columns)), np.object_)
            for place, name in enumerate(self.columns):
                texts[:, place] = _texts(name, rows.column(name))
            return texts.reshape((rows.num_rows, *self.shape))
        block = np.empty((rows.num_rows, len(self.columns)), NUMPY[self.tensor.datatype])
        for place, name in enumerate(self.columns):
            block[:, place] = self._numbers(name, rows.column(name))
        return block.reshape((rows.num_rows, *self.shape))

    def _numbers(self, name: str, values: Any) -> Array:
        """Return a column as numbers that can be assigned to the tensor."""
        if self.tensor.datatype in FLOATS:
            return self._floats(name, values)
        if values.null_count:
            raise UnfitColumnError(
                name, _first(values.is_null()), "null", f"a value: the model takes {self.tensor.datatype}"
            )
        wanted = pa.from_numpy_dtype(NUMPY[self.tensor.datatype])
        if values.type != wanted:
            try:
                values = values.cast(wanted)
            except pa.ArrowInvalid as error:
                raise UnfitColumnError(
                    name, 0, str(error).splitlines()[0], f"values of {wanted}, which the model takes"
                ) from None
        return np.asarray(values.to_numpy(zero_copy_only=False))

    def _floats(self, name: str, values: Any) -> Array:
        """Return floating-point numbers; a null is NaN, and one that is too large for the model is refused."""
        kind = values.type
        if pa.types.is_decimal(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
            values = values.cast(pa.float64())
        found = np.asarray(values.to_numpy(zero_copy_only=False))
        if found.dtype.itemsize > NUMPY[self.tensor.datatype].itemsize and found.dtype.kind == "f":
            limit = float(np.finfo(NUMPY[self.tensor.datatype]).max)
            if found.size and max(np.fmax.reduce(found), -np.fmin.reduce(found)) > limit:
                wrong = (np.abs(found) > limit) & np.isfinite(found)
                if wrong.any():
                    row = int(np.argmax(wrong))
                    allowed = f"numbers that {self.tensor.datatype} can hold, up to {limit:g}"
                    raise UnfitColumnError(name, row, f"{found[row]:g}", allowed)
        return found

    def _of_lists(self, values: Any) -> Array:
        name, size = self.columns[0], prod(self.shape)
        if values.null_count:
            raise UnfitColumnError(
                name, _first(values.is_null()), "null", f"lists of {size} numbers in each row"
            )
        lengths = _lengths(values)
        if (lengths != size).any():
            row = int(np.argmax(lengths != size))
            raise UnfitColumnError(name, row, f"a list of {lengths[row]}", f"lists of {size} numbers")
        flat = self._numbers(name, values.flatten())
        return np.ascontiguousarray(flat, NUMPY[self.tensor.datatype]).reshape((len(values), *self.shape))


@dataclass(frozen=True)
class ColumnPlan:
    """The inputs of the model, the columns to read, and those to keep in the output."""

    tensors: tuple[BoundTensor, ...]
    read: tuple[str, ...]
    kept: tuple[str, ...]


def plan_columns(
    model: ServedModel, specs: Sequence[TensorSpec], schema: Any, columns: PredictionColumns
) -> ColumnPlan:
    """Bind the inputs of `model` to columns of `schema`; InvalidInput with all faults."""
    named = {spec.name: spec.features for spec in specs}
    if columns.features and len(model.inputs) != 1:
        raise InvalidInput.at(
            "features",
            given=", ".join(columns.features),
            allowed="a model with one input; this one has several",
        )
    faults: list[Fault] = []
    bound = []
    for tensor in model.inputs:
        features = columns.features or named.get(tensor.name, ())
        bound.append(_bound(tensor, features, schema, faults))
    features = tuple(dict.fromkeys(name for each in bound for name in each.columns))
    kept = _kept(columns, features, schema)
    read = tuple(dict.fromkeys([*features, *kept]))
    for name in read:
        if schema.names.count(name) != 1:
            faults.append(_missing(name, schema))
    if not faults:
        faults = [fault for each in bound for fault in _type_faults(each, schema)]
    if faults:
        raise InvalidInput("the columns of the input do not fit the model", faults=_once(faults))
    return ColumnPlan(tuple(bound), read, kept)


def _bound(tensor: Tensor, features: Sequence[str], schema: Any, faults: list[Fault]) -> BoundTensor:
    shape = tensor.shape[1:]
    if features:
        if shape not in ((), (len(features),), (DYNAMIC,)) or (shape == () and len(features) != 1):
            faults.append(
                Fault(
                    where=f"input {tensor.name}",
                    given=f"{len(features)} features",
                    allowed=f"as many as its shape {list(tensor.shape)} has",
                )
            )
        return BoundTensor(tensor, tuple(features), shape and (len(features),), is_list=False)
    is_list = tensor.name in schema.names and _is_list(schema.field(tensor.name).type)
    if not is_list and shape not in ((), (1,), (DYNAMIC,)):
        faults.append(
            Fault(
                where=f"input {tensor.name}",
                given="the version does not say which columns it takes",
                allowed=f"{prod(shape)} columns, or one column {tensor.name} of lists",
                fix="--features A,B,… names them in order",
            )
        )
    if is_list and DYNAMIC in shape:
        sizes = _list_size(schema.field(tensor.name).type)
        shape = tuple(sizes if size == DYNAMIC and sizes else size for size in shape)
        if DYNAMIC in shape:
            allowed = "a column of lists of a fixed size, as the model's shape does not say how long they are"
            faults.append(
                Fault(
                    where=f"column {tensor.name}", given=str(schema.field(tensor.name).type), allowed=allowed
                )
            )
    plain = shape if is_list else shape and (1,)
    return BoundTensor(tensor, (tensor.name,), plain, is_list=is_list)


def _kept(columns: PredictionColumns, features: Sequence[str], schema: Any) -> tuple[str, ...]:
    if columns.keep is None:
        return tuple(name for name in schema.names if name not in features)
    if EVERYTHING in columns.keep:
        return tuple(schema.names)
    return tuple(dict.fromkeys(columns.keep))


def _missing(name: str, schema: Any) -> Fault:
    count = schema.names.count(name)
    if count:
        return Fault(where=f"column {name}", given=f"{count} columns of that name", allowed="one column")
    similar = [each for each in schema.names if each.casefold() == name.casefold()]
    shown = ", ".join(schema.names[:20]) + ("…" if len(schema.names) > 20 else "")
    fix = f"names are exact: there is {', '.join(similar)}" if similar else None
    return Fault(where=f"column {name}", given="missing", allowed=f"a column of the input: {shown}", fix=fix)


def _type_faults(bound: BoundTensor, schema: Any) -> list[Fault]:
    """Return a fault for each column whose type cannot become that of the tensor."""
    faults = []
    for name in bound.columns:
        kind = plain_type(schema.field(name).type)
        element = kind.value_type if bound.is_list else kind
        if not _fits(element, bound.tensor.datatype):
            wanted = "text" if bound.tensor.datatype is Datatype.BYTES else "numbers"
            fix = None if wanted == "text" else "encode it as a number before"
            allowed = f"{wanted}: the model takes {bound.tensor.datatype}"
            faults.append(Fault(where=f"column {name}", given=str(kind), allowed=allowed, fix=fix))
    return faults


def _fits(kind: Any, datatype: Datatype) -> bool:
    types = pa.types
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    if datatype is Datatype.BYTES:
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
    if datatype in FLOATS:
        return bool(is_number or types.is_decimal(kind) or types.is_null(kind))
    return bool(types.is_boolean(kind)) if datatype is Datatype.BOOL else bool(is_number)


def _is_list(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _list_size(kind: Any) -> int | None:
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _lengths(values: Any) -> Array:
    if pa.types.is_fixed_size_list(values.type):
        return np.full(len(values), values.type.list_size)
    return np.diff(np.asarray(values.offsets.to_numpy(zero_copy_only=False)))


def _texts(name: str, values: Any) -> list[str]:
    if values.null_count:
        raise UnfitColumnError(
            name, _first(values.is_null()), "null", "text in each row: the model takes text"
        )
    try:
        texts: list[str] = values.to_pylist()
    except UnicodeDecodeError:
        raise UnfitColumnError(name, 0, "bytes that are not UTF-8", "text in UTF-8") from None
    return texts


def _first(mask: Any) -> int:
    return int(np.argmax(mask.to_numpy(zero_copy_only=False)))


def _once(faults: Sequence[Fault]) -> list[Fault]:
    return list({(fault.where, fault.given): fault for fault in faults}.values())[:20]
