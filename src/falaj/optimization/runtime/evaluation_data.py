"""The rows for evaluation: features as float32 with missing values as NaN, and the target."""

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


@dataclass(frozen=True)
class EvaluationRows:
    """Features and target; `skipped` rows had no target."""

    features: Array
    target: Array
    skipped: int


def read_evaluation_rows(path: Path, *, features: Sequence[str], target: str, seed: int) -> EvaluationRows:
    """Read at most MAX_ROWS rows of a Parquet file, sampled by `seed`. Raise InvalidInput with all faults."""
    if not path.exists():
        raise InvalidInput(f"the input {path.name} is missing: the job needs evaluation data")
    with pq.ParquetFile(path) as file:
        _require_columns(file.schema_arrow, [*features, target])
        table = file.read(columns=[*dict.fromkeys([*features, target])])
    labels = _numbers(table, target)
    known = np.flatnonzero(np.isfinite(labels))
    if len(known) == 0:
        raise InvalidInput.at(f"column {target}", given="no values", allowed="a number in some rows at least")
    chosen = known
    if len(known) > MAX_ROWS:
        chosen = np.sort(np.random.default_rng(seed).choice(known, MAX_ROWS, replace=False))
    part = table.take(pa.array(chosen))
    matrix = np.column_stack([_numbers(part, name) for name in features]).astype(np.float32)
    return EvaluationRows(np.ascontiguousarray(matrix), labels[chosen], len(labels) - len(known))


def _require_columns(schema: pa.Schema, wanted: Sequence[str]) -> None:
    faults = []
    for name in wanted:
        if name not in schema.names:
            shown = ", ".join(schema.names[:20])
            faults.append(Fault(where=f"column {name}", given="nothing", allowed=f"one of {shown}"))
        elif not _is_number(schema.field(name).type):
            found = str(schema.field(name).type)
            fix = "encode it as a number in a view, or leave it out"
            faults.append(Fault(where=f"column {name}", given=found, allowed="numbers or booleans", fix=fix))
    if len(wanted) < 2:
        faults.append(
            Fault(where="features", given="none", allowed="the columns that the model takes, in order")
        )
    if faults:
        raise InvalidInput("the columns of the data are invalid", faults=faults)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _numbers(table: pa.Table, name: str) -> Array:
    column = table[name].combine_chunks().cast(pa.float64(), safe=False)
    return np.asarray(column.fill_null(float("nan")).to_numpy(zero_copy_only=False), np.float64)
