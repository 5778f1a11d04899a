"""Read a training set once and sketch its columns: the reference that a monitor pins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from falaj.errors import InvalidInput
from falaj.governance.operations.operation import ArrowStream
from falaj.monitoring.sketches.columns import kind_of
from falaj.monitoring.sketches.sketchers import sketch_reference
from falaj.records.monitoring.sketches import ReferenceSketch


def sketch_training_set(
    stream: ArrowStream, *, training_set: str, columns: Sequence[str] | None
) -> ReferenceSketch:
    """The sketches of `columns`, or of every column that can be watched."""
    types = {field.name: field.type for field in stream.schema}
    names = _chosen(types, columns)
    kinds = {name: kind_of(pa.array([], types[name])) for name in names}
    reference = sketch_reference(training_set, _parts(stream, names), kinds=kinds)
    if not any(sketch.rows for sketch in reference.features):
        raise InvalidInput.at(
            "reference", given=f"{training_set}, which has no rows", allowed="a training set with rows"
        )
    return reference


def _chosen(types: dict[str, Any], columns: Sequence[str] | None) -> list[str]:
    able = [name for name, kind in types.items() if _can_be_watched(kind)]
    if columns is None:
        if not able:
            raise InvalidInput.at(
                "reference",
                given="a training set without numbers, times, text or booleans",
                allowed="one with a column that can be watched",
            )
        return able
    wrong = [name for name in columns if name not in able]
    if wrong:
        raise InvalidInput.at(
            "columns",
            given=", ".join(wrong),
            allowed=f"columns of the training set that can be watched: {', '.join(able)}",
        )
    return list(columns)


def _can_be_watched(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("integer", "floating", "decimal", "boolean", "temporal", "string", "large_string", "string_view")
    return any(getattr(pa.types, f"is_{test}")(kind) for test in tests)


def _parts(stream: ArrowStream, names: list[str]) -> Iterator[dict[str, Any]]:
    for batch in stream:
        yield {name: batch.column(name) for name in names}
