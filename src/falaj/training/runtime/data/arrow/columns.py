"""The columns of a table to train on, and their conversion to tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

TORCH_TYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "halffloat": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}
WIDENED = ("bool", "uint16", "uint32", "uint64")
"""Types without an equivalent in torch, or bit-packed ones: they are cast."""
FEATURE_MARK = "__"
"""Separates the view from the feature in the column names of a training set."""


@dataclass(frozen=True)
class ColumnSelection:
    """The columns of the inputs and of the target, and the tensors that they become.

    Inputs become one matrix of float32, in the order of the table; a fixed-size list is as many columns. A single
    fixed-size list of whole numbers stays whole numbers: tokens. A target of whole numbers becomes a vector of int64:
    classes. Any other, and several, become a matrix of float32.
    """

    inputs: tuple[str, ...]
    target: tuple[str, ...]
    widths: dict[str, int]
    input_type: torch.dtype
    target_type: torch.dtype

    @property
    def names(self) -> list[str]:
        return [*self.inputs, *self.target]

    @property
    def input_width(self) -> int:
        return sum(self.widths[name] for name in self.inputs)

    @property
    def target_width(self) -> int:
        return sum(self.widths[name] for name in self.target)


def select_columns(
    schema: Any, *, inputs: Sequence[str] | None, target: str | Sequence[str] | None, where: str
) -> ColumnSelection:
    """Return the columns to train on; raise InvalidTraining with all faults."""
    targets = (target,) if isinstance(target, str) else tuple(target or ())
    wanted = tuple(inputs) if inputs is not None else default_inputs(schema, targets)
    faults = [
        TrainingFault(f"{where}.{kind}", name, f"a column: {', '.join(schema.names)}")
        for kind, names in (("target", targets), ("inputs", wanted))
        for name in names
        if name not in schema.names
    ]
    faults += [
        TrainingFault(f"{where}.inputs", name, "a column that is not the target")
        for name in wanted
        if name in targets
    ]
    if not wanted:
        faults.append(TrainingFault(f"{where}.inputs", "no column", "at least one beside the target"))
    if not faults:
        faults = [f for name in (*wanted, *targets) for f in column_type_faults(schema.field(name), where)]
    if faults:
        raise InvalidTraining("the table cannot be trained on", faults=faults)
    widths = {name: column_width(schema.field(name).type) for name in (*wanted, *targets)}
    tokens = (
        len(wanted) == 1
        and is_fixed_size_list(schema.field(wanted[0]).type)
        and is_integer(schema.field(wanted[0]).type)
    )
    classes = len(targets) == 1 and widths[targets[0]] == 1 and is_integer(schema.field(targets[0]).type)
    kinds = (torch.int64 if whole else torch.float32 for whole in (tokens, classes))
    return ColumnSelection(wanted, targets, widths, *kinds)


def default_inputs(schema: Any, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Return all columns but the target; for a training set with keys and a timestamp, the features."""
    features = tuple(name for name in schema.names if FEATURE_MARK in name and name not in targets)
    if features and any(str(field.type).startswith("timestamp") for field in schema):
        return features
    return tuple(name for name in schema.names if name not in targets)


def column_type_faults(field: Any, where: str) -> list[TrainingFault]:
    """Return the fault of a column that cannot be converted to numbers, with its fix."""
    kind = field.type
    if item_type(kind) is not None and column_width(kind) > 0:
        return []
    words, fix = str(kind), "leave it out: inputs=[…]"
    if words.startswith(("string", "large_string", "dictionary", "binary")):
        fix = "encode the strings as numbers (pandas: .astype('category').cat.codes; polars: .to_physical(); pyarrow: "
        fix += ".dictionary_encode()), or leave it out: inputs=[…]"
    elif words.startswith(("timestamp", "date", "time", "duration", "decimal")):
        fix = "cast it to a number (pandas: .astype; polars and pyarrow: .cast), or leave it out: inputs=[…]"
    elif words.startswith(("list", "large_list")):
        fix = "lists of one size: pyarrow.list_(value_type, size)"
    return [
        TrainingFault(
            f"{where}[{field.name!r}]", words, "numbers, booleans, or fixed-size lists of numbers", fix
        )
    ]


def column_tensors(batch: Any, names: Sequence[str], nulls: dict[str, int]) -> list[Tensor]:
    """Return columns of a record batch as tensors of rows × width; count nulls."""
    found = []
    for name in names:
        array = batch.column(batch.schema.get_field_index(name))
        nulls[name] = nulls.get(name, 0) + array.null_count
        found.append(values(array, nulls, name))
    return found


def values(array: Any, nulls: dict[str, int], name: str) -> Tensor:
    """Return an array of numbers as a tensor of rows × width; zeros for nulls, which the caller refuses."""
    import pyarrow as pa

    rows, kind = len(array), array.type
    width = column_width(kind)
    if is_fixed_size_list(kind):
        if array.null_count:
            return torch.zeros(rows, width)
        array = array.flatten()
        nulls[name] += array.null_count
    if str(array.type) in WIDENED:
        try:
            array = array.cast(pa.uint8() if str(array.type) == "bool" else pa.int64())
        except pa.ArrowInvalid as error:
            fault = TrainingFault(f"data[{name!r}]", str(error), "numbers below 2**63", "cast it to float64")
            raise InvalidTraining("a number is too large", faults=[fault]) from error
    dtype = TORCH_TYPES[str(array.type)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only memory, which is not written
        flat = torch.frombuffer(
            memoryview(array.buffers()[1]),
            dtype=dtype,
            count=len(array),
            offset=array.offset * dtype.itemsize,
        )
    return flat.reshape(rows, width)


def item_type(kind: Any) -> str | None:
    """Return the type of the numbers in a column; None if it holds none."""
    words = str(kind.value_type if is_fixed_size_list(kind) else kind)
    return words if words in TORCH_TYPES or words in WIDENED else None


def is_fixed_size_list(kind: Any) -> bool:
    return str(kind).startswith("fixed_size_list")


def is_integer(kind: Any) -> bool:
    return (item_type(kind) or "").lstrip("u").startswith("int")


def column_width(kind: Any) -> int:
    return int(kind.list_size) if is_fixed_size_list(kind) else 1
