"""The rows of a job: tensors as the model takes them, and the target; some to fit recipes, others to judge them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from falaj.errors import Fault, InvalidInput
from falaj.optimization.runtime.conversion.converted import Array

MAX_ROWS = 20_000
"""Rows to judge by."""
MAX_FITTED_ROWS = 50_000
FITTED_SHARE = 0.5
"""Share of the data that recipes learn from, unless a held-out set is given."""


@dataclass(frozen=True)
class InputShape:
    """The input of a model: the shape of one row, with -1 for a dimension of any size, and the NumPy type."""

    row: tuple[int, ...]
    dtype: str

    def reshape(self, flat: Array) -> Array:
        """Return rows of numbers as the tensor that the model takes. Raise InvalidInput if they do not fit."""
        width = flat.shape[1]
        unknown = sum(size < 0 for size in self.row)
        known = int(np.prod([size for size in self.row if size >= 0], dtype=np.int64))
        fits = width == known if not unknown else unknown == 1 and known > 0 and width % known == 0
        if not fits:
            wanted = " × ".join("any" if size < 0 else str(size) for size in self.row) or "one number"
            raise InvalidInput.at(
                "features",
                given=f"{width} columns, counting each number of a list",
                allowed=f"the {wanted} numbers that the model takes a row, in order",
            )
        if np.issubdtype(np.dtype(self.dtype), np.integer) and not np.isfinite(flat).all():
            raise InvalidInput.at(
                "features", given="missing values", allowed=f"whole numbers, as the model takes {self.dtype}"
            )
        return np.ascontiguousarray(flat.reshape(len(flat), *self.row).astype(self.dtype))


@dataclass(frozen=True)
class EvaluationRows:
    """Features and target; `skipped` rows had no target, and `total` had one before they were sampled."""

    features: Array
    target: Array
    skipped: int = 0
    total: int = 0

    def take(self, rows: Array) -> EvaluationRows:
        return EvaluationRows(self.features[rows], self.target[rows], self.skipped, self.total)

    def __len__(self) -> int:
        return len(self.target)


def read_evaluation_rows(
    path: Path, *, features: Sequence[str], target: str, shape: InputShape, most: int, seed: int
) -> EvaluationRows:
    """Read at most `most` rows of a Parquet file, sampled by `seed`. Raise InvalidInput with all faults.

    A column holds a number, or a list of numbers of one length; the numbers of a row, in the order of `features`, are
    reshaped to what the model takes.
    """
    if not path.exists():
        raise InvalidInput(f"the input {path.name} is missing: the job needs evaluation data")
    with pq.ParquetFile(path) as file:
        _require_columns(file.schema_arrow, features, target)
        if file.metadata.num_rows == 0:
            raise InvalidInput.at("data", given="no rows", allowed="rows with features and the target")
        table = file.read(columns=[*dict.fromkeys([*features, target])])
    labels = _numbers(table, target)
    known = np.flatnonzero(np.isfinite(labels))
    if len(known) == 0:
        raise InvalidInput.at(f"column {target}", given="no values", allowed="a number in some rows at least")
    chosen = known
    if len(known) > most:
        chosen = np.sort(np.random.default_rng(seed).choice(known, most, replace=False))
    part = table.take(pa.array(chosen))
    flat = np.column_stack([_block(part, name) for name in features])
    return EvaluationRows(shape.reshape(flat), labels[chosen], len(labels) - len(known), len(known))


def split_rows(rows: EvaluationRows, *, seed: int) -> tuple[EvaluationRows, EvaluationRows]:
    """Return rows to fit by and other rows to judge by, drawn at random."""
    order = np.random.default_rng(seed).permutation(len(rows))
    count = round(FITTED_SHARE * len(rows))
    if count == 0 or count == len(rows):
        raise InvalidInput.at(
            "data",
            given=f"{len(rows)} rows with a target",
            allowed="rows to calibrate or train with, and other rows to judge by",
        )
    return rows.take(np.sort(order[:count])), rows.take(np.sort(order[count:]))


def _require_columns(schema: pa.Schema, features: Sequence[str], target: str) -> None:
    faults = []
    for name in dict.fromkeys([*features, target]):
        if name not in schema.names:
            shown = ", ".join(schema.names[:20])
            faults.append(Fault(where=f"column {name}", given="nothing", allowed=f"one of {shown}"))
        elif not _is_number(found := schema.field(name).type) and (
            name == target or not _is_list_of_numbers(found)
        ):
            fix = "encode it as a number in a view, or leave it out"
            allowed = "numbers or booleans" if name == target else "numbers, booleans or lists of numbers"
            faults.append(Fault(where=f"column {name}", given=str(found), allowed=allowed, fix=fix))
    if not features:
        faults.append(
            Fault(where="features", given="none", allowed="the columns that the model takes, in order")
        )
    if faults:
        raise InvalidInput("the columns of the data are invalid", faults=faults)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(lists and _is_number(kind.value_type))


def _block(table: pa.Table, name: str) -> Array:
    """Return a column as rows of float32 numbers: one a row, or those of its lists."""
    column = table[name].combine_chunks()
    if _is_number(column.type):
        return _numbers(table, name).astype(np.float32)[:, None]
    lengths = (
        set(column.value_lengths().to_pylist()) if not pa.types.is_fixed_size_list(column.type) else set()
    )
    if column.null_count or len(lengths) > 1:
        raise InvalidInput.at(
            f"column {name}",
            given=f"{column.null_count} missing lists" if column.null_count else "lists of different lengths",
            allowed="a list of the same length in every row",
        )
    values = column.flatten().cast(pa.float32(), safe=False).fill_null(float("nan"))
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(len(column), -1)


def _numbers(table: pa.Table, name: str) -> Array:
    column = table[name].combine_chunks().cast(pa.float64(), safe=False)
    return np.asarray(column.fill_null(float("nan")).to_numpy(zero_copy_only=False), np.float64)
