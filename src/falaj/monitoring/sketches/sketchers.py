"""Build, merge and serialize sketches of columns in constant memory, cheap enough for every request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
from pydantic import ValidationError

from falaj.errors import Damaged, InvalidInput
from falaj.monitoring.sketches.columns import (
    Values,
    category_counts,
    category_hash,
    kind_of,
    numbers,
    shortened,
)
from falaj.monitoring.sketches.reading import read_sketch
from falaj.records.monitoring.sketches import (
    CATEGORY_LIMIT,
    ColumnKind,
    ColumnRole,
    FeatureSketch,
    ReferenceSketch,
    SketchSet,
    WindowSketch,
)
from falaj.records.quantiles.kll import KllSketch

Columns: TypeAlias = Mapping[str, Values] | pa.RecordBatch | pa.Table
Set = TypeVar("Set", bound=SketchSet)


class NumericSketcher:
    """Sketches one numeric column. Not thread-safe."""

    def __init__(self, name: str, *, role: ColumnRole = ColumnRole.FEATURE) -> None:
        self.name, self.role = name, role
        self._rows = 0
        self._kll = KllSketch()

    def update(self, values: Values) -> None:
        column = numbers(values, name=self.name)
        self._kll.update(column)
        self._rows += len(column)

    def absorb(self, other: FeatureSketch) -> None:
        self._kll.merge(read_sketch(other))
        self._rows += other.rows

    def sketch(self) -> FeatureSketch:
        count = self._kll.count  # without NaN, so the difference is nulls
        return FeatureSketch(
            name=self.name,
            kind=ColumnKind.NUMERIC,
            role=self.role,
            count=count,
            nulls=self._rows - count,
            sketch=self._kll.to_bytes(),
            minimum=self._kll.minimum,
            maximum=self._kll.maximum,
        )


class CategorySketcher:
    """Sketches one categorical column. Not thread-safe.

    Beyond the limit it keeps the categories with the smallest hashes. A category that is kept at the end was kept
    from the start, so its count is exact, and merging gives the same result in any order.
    """

    def __init__(self, name: str, *, role: ColumnRole = ColumnRole.FEATURE) -> None:
        self.name, self.role = name, role
        self._counts: dict[str, int] = {}
        self._other = 0
        self._nulls = 0

    def update(self, values: Values) -> None:
        counts, nulls = category_counts(values, name=self.name)
        self._nulls += nulls
        self._add(((shortened(category), count) for category, count in counts.items()))

    def absorb(self, other: FeatureSketch) -> None:
        self._nulls += other.nulls
        self._other += other.other
        self._add(other.categories.items())

    def sketch(self) -> FeatureSketch:
        return FeatureSketch(
            name=self.name,
            kind=ColumnKind.CATEGORICAL,
            role=self.role,
            count=sum(self._counts.values()) + self._other,
            nulls=self._nulls,
            categories=dict(sorted(self._counts.items())),
            other=self._other,
        )

    def _add(self, counts: Iterable[tuple[str, int]]) -> None:
        for category, count in counts:
            self._counts[category] = self._counts.get(category, 0) + count
        if len(self._counts) > CATEGORY_LIMIT:
            ranked = sorted(self._counts, key=category_hash)
            self._other += sum(self._counts.pop(category) for category in ranked[CATEGORY_LIMIT:])


Sketcher = NumericSketcher | CategorySketcher


def new_sketcher(name: str, kind: ColumnKind, *, role: ColumnRole = ColumnRole.FEATURE) -> Sketcher:
    return (NumericSketcher if kind is ColumnKind.NUMERIC else CategorySketcher)(name, role=role)


class WindowSketcher:
    """The sketches of one model version on one server; `cut` returns a window and starts the next."""

    def __init__(
        self,
        model: str,
        *,
        features: Mapping[str, ColumnKind],
        predictions: Mapping[str, ColumnKind] | None = None,
    ) -> None:
        self.model = model
        self._kinds = {ColumnRole.FEATURE: dict(features), ColumnRole.PREDICTION: dict(predictions or {})}
        self._sketchers = self._fresh()

    def update(self, columns: Columns, *, role: ColumnRole = ColumnRole.FEATURE) -> None:
        """Add a batch. Unwatched columns are ignored; watched ones may be absent."""
        for name, values in columns_of(columns).items():
            sketcher = self._sketchers.get((role, name))
            if sketcher is not None:
                sketcher.update(values)

    def cut(self, *, since: datetime, until: datetime) -> WindowSketch:
        sketches = tuple(sketcher.sketch() for sketcher in self._sketchers.values())
        window = WindowSketch(model=self.model, since=since, until=until, features=sketches)
        self._sketchers = self._fresh()
        return window

    def _fresh(self) -> dict[tuple[ColumnRole, str], Sketcher]:
        return {
            (role, name): new_sketcher(name, kind, role=role)
            for role, kinds in self._kinds.items()
            for name, kind in kinds.items()
        }


def sketch_column(
    name: str, batches: Iterable[Values], *, kind: ColumnKind, role: ColumnRole = ColumnRole.FEATURE
) -> FeatureSketch:
    sketcher = new_sketcher(name, kind, role=role)
    for values in batches:
        sketcher.update(values)
    return sketcher.sketch()


def sketch_reference(
    training_set: str, batches: Iterable[Columns], *, kinds: Mapping[str, ColumnKind] | None = None
) -> ReferenceSketch:
    """Sketch the columns of a training set; kinds not in `kinds` are taken from the first batch."""
    sketchers: dict[str, Sketcher] = {}
    for batch in batches:
        for name, values in columns_of(batch).items():
            if name not in sketchers:
                sketchers[name] = new_sketcher(name, (kinds or {}).get(name) or kind_of(values))
            sketchers[name].update(values)
    features = tuple(sketcher.sketch() for sketcher in sketchers.values())
    return ReferenceSketch(training_set=training_set, features=features)


def columns_of(columns: Columns) -> Mapping[str, Any]:
    if isinstance(columns, Mapping):
        return columns
    return dict(zip(columns.schema.names, columns.columns, strict=True))


def merge(sketches: Sequence[FeatureSketch]) -> FeatureSketch:
    """Merge sketches of one column; counts are exact, quantiles stay within the bound of a single sketch."""
    if not sketches:
        raise InvalidInput("at least one sketch is needed to merge")
    first = sketches[0]
    if any((s.name, s.role, s.kind) != (first.name, first.role, first.kind) for s in sketches):
        raise InvalidInput.at(
            first.name, given="sketches of different columns or kinds", allowed="one column"
        )
    merged = new_sketcher(first.name, first.kind, role=first.role)
    for sketch in sketches:
        merged.absorb(sketch)
    return merged.sketch()


def merge_windows(windows: Sequence[WindowSketch]) -> WindowSketch:
    """Merge windows of one model version into one that spans them all."""
    models = sorted({window.model for window in windows})
    if len(models) != 1:
        given = ", ".join(models) or "no window"
        raise InvalidInput.at("windows", given=given, allowed="windows of one model version")
    parts: dict[tuple[ColumnRole, str], list[FeatureSketch]] = {}
    for window in windows:
        for sketch in window.features:
            parts.setdefault((sketch.role, sketch.name), []).append(sketch)
    return WindowSketch(
        model=models[0],
        since=min(window.since for window in windows),
        until=max(window.until for window in windows),
        features=tuple(merge(part) for part in parts.values()),
    )


def encode(sketches: SketchSet) -> bytes:
    """Encode as JSON with the KLL bytes in base64: about 25 KB per numeric column."""
    return sketches.model_dump_json().encode()


def decode(data: bytes, kind: type[Set]) -> Set:
    """Decode the output of `encode`. Raise Damaged for invalid bytes."""
    try:
        sketches = kind.model_validate_json(data)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise Damaged(f"invalid {kind.__name__}: {where}: {first['msg']}") from None
    for sketch in sketches.features:
        if sketch.kind is ColumnKind.NUMERIC:
            read_sketch(sketch)
    return sketches
