"""Sketches: counts, laws of merging, accuracy, and rejection of malicious bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.errors import Damaged, InvalidInput
from falaj.monitoring.sketches.columns import Values, kind_of
from falaj.monitoring.sketches.reading import read_points
from falaj.monitoring.sketches.sketchers import (
    WindowSketcher,
    decode,
    encode,
    merge,
    merge_windows,
    sketch_column,
    sketch_reference,
)
from falaj.records.monitoring.sketches import (
    CATEGORY_LIMIT,
    ColumnKind,
    ColumnRole,
    FeatureSketch,
    ReferenceSketch,
    WindowSketch,
)
from falaj.records.quantiles.kll import RANK_ERROR

NOON = datetime(2013, 7, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)

floats = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=40)
words = st.lists(st.sampled_from([f"word-{number}" for number in range(30)]), max_size=40)


def numeric(*batches: Any) -> FeatureSketch:
    return sketch_column(
        "x", [np.asarray(batch, dtype=np.float64) for batch in batches], kind=ColumnKind.NUMERIC
    )


def categorical(*batches: Values) -> FeatureSketch:
    return sketch_column("x", batches, kind=ColumnKind.CATEGORICAL)


def window(model: str = "churn@1", at: datetime = NOON, values: Any = (1.0, 2.0)) -> WindowSketch:
    sketcher = WindowSketcher(model, features={"x": ColumnKind.NUMERIC, "c": ColumnKind.CATEGORICAL})
    sketcher.update({"x": np.array(values), "c": np.array(["a"] * len(values))})
    return sketcher.cut(since=at, until=at + HOUR)


def same_small(first: FeatureSketch, second: FeatureSketch) -> bool:
    """Return whether two sketches are equal distributions; exact only while the sketch has compacted nothing."""
    one, two = read_points(first), read_points(second)
    facts = {"count", "nulls", "minimum", "maximum"}
    return (
        first.model_dump(include=facts) == second.model_dump(include=facts)
        and one.values.tolist() == two.values.tolist()
        and one.cumulated.tolist() == two.cumulated.tolist()
    )


# ------------------------------------------------------------------------------------------- merging


@given(floats, floats, floats)
def test_merging_numbers_is_associative_and_commutative(a: Any, b: Any, c: Any) -> None:
    left, middle, right = numeric(a), numeric(b), numeric(c)

    grouped_left = merge([merge([left, middle]), right])
    grouped_right = merge([left, merge([middle, right])])

    assert same_small(grouped_left, grouped_right)
    assert same_small(grouped_left, merge([right, middle, left]))
    assert same_small(grouped_left, numeric(a, b, c))


@given(words, words, words)
def test_merging_categories_is_associative_and_commutative(a: Any, b: Any, c: Any) -> None:
    left, middle, right = (categorical(pa.array(part, pa.string())) for part in (a, b, c))

    merged = merge([merge([left, middle]), right])

    assert merged == merge([left, merge([middle, right])]) == merge([right, left, middle])
    assert merged == categorical(pa.array(a + b + c, pa.string()))


def test_categories_beyond_the_limit_merge_alike_in_any_order_and_kept_counts_are_exact() -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 5_000, 40_000).astype(str)
    parts = [categorical(part) for part in np.array_split(rows, 7)]

    forward, backward = merge(parts), merge(parts[::-1])

    assert forward == backward == categorical(rows)
    assert len(forward.categories) == CATEGORY_LIMIT
    assert forward.count == 40_000
    assert all(count == (rows == name).sum() for name, count in list(forward.categories.items())[:50])


@pytest.mark.parametrize("parts", [1, 60])
@pytest.mark.parametrize("draw", ["normal", "exponential", "sorted", "ties"])
def test_ranks_stay_within_the_bound_of_the_sketch(parts: int, draw: str) -> None:
    rng = np.random.default_rng(2)
    rows = {
        "normal": rng.normal(size=120_000),
        "exponential": rng.exponential(size=120_000),
        "sorted": np.arange(120_000.0),
        "ties": rng.poisson(3, 120_000).astype(np.float64),
    }[draw]

    points = read_points(merge([numeric(part) for part in np.array_split(rows, parts)]))

    exact = np.searchsorted(np.sort(rows), points.values, side="right")
    assert np.abs(points.at_or_below(points.values) - exact).max() / len(rows) <= 1.5 * RANK_ERROR
    assert points.count == len(rows)


def test_memory_is_bounded_however_many_values_come() -> None:
    sizes = [
        len(numeric(np.random.default_rng(3).normal(size=rows)).sketch or b"") for rows in (10**5, 2 * 10**6)
    ]

    assert max(sizes) < 24_000


def test_sketches_of_different_columns_do_not_merge() -> None:
    with pytest.raises(InvalidInput):
        merge([numeric([1.0]), categorical(np.array(["a"]))])
    with pytest.raises(InvalidInput):
        merge([])
    with pytest.raises(InvalidInput):
        merge_windows([window("churn@1"), window("churn@2")])


def test_windows_of_replicas_become_one() -> None:
    merged = merge_windows([window(at=NOON), window(at=NOON + HOUR, values=(5.0,))])

    assert (merged.since, merged.until) == (NOON, NOON + 2 * HOUR)
    assert [sketch.count for sketch in merged.features] == [3, 3]
    assert merged.features[0].maximum == 5.0


# ------------------------------------------------------------------------------------- odd columns


def test_nan_and_null_are_counted_and_infinities_are_values() -> None:
    sketch = numeric([1.0, np.nan, np.inf], [-np.inf, np.nan])

    assert (sketch.count, sketch.nulls) == (3, 2)
    assert (sketch.minimum, sketch.maximum) == (-np.inf, np.inf)


@pytest.mark.parametrize(
    ("values", "count", "nulls", "maximum"),
    [
        (np.array([]), 0, 0, None),
        (np.array([np.nan]), 0, 1, None),
        (np.array([7.0]), 1, 0, 7.0),
        (np.full(5_000, 3.0), 5_000, 0, 3.0),
        (np.array([2**63 - 1, -(2**63)]), 2, 0, float(2**63 - 1)),
        (np.array([2**64 - 1], dtype=np.uint64), 1, 0, float(2**64 - 1)),
        (np.array([10**30, None], dtype=object), 1, 1, 1e30),
        (np.array([[1.0], [2.0]], dtype=np.float32), 2, 0, 2.0),
        (np.array(["2013-01-01", "NaT"], dtype="datetime64[s]"), 1, 1, 1356998400.0),
        (pa.array([1, None, 2**60]), 2, 1, float(2**60)),
        (pa.array([None, None]), 0, 2, None),
        (pa.array([Decimal("1.5")]), 1, 0, 1.5),
        (pa.array([NOON]), 1, 0, NOON.timestamp() * 1e6),
        (pa.array([NOON.date()]), 1, 0, 15_887),
        (pa.chunked_array([[1.0], [None, np.nan]]), 1, 2, 1.0),
        (pa.array([1, 1, 2]).dictionary_encode(), 3, 0, 2.0),
    ],
)
def test_columns_of_many_types_are_numbers(
    values: Values, count: int, nulls: int, maximum: float | None
) -> None:
    sketch = sketch_column("x", [values], kind=ColumnKind.NUMERIC)

    assert (sketch.count, sketch.nulls, sketch.maximum) == (count, nulls, maximum)


@pytest.mark.parametrize(
    ("values", "categories", "nulls"),
    [
        (np.array([True, False, True]), {"true": 2, "false": 1}, 0),
        (pa.array([True, None]), {"true": 1}, 1),
        (np.array(["a", "b", "a"]), {"a": 2, "b": 1}, 0),
        (np.array(["a", None, np.nan], dtype=object), {"a": 1}, 2),
        (pa.array(["x", "x", None]).dictionary_encode(), {"x": 2}, 1),
        (pa.chunked_array([["a"], ["a", ""]]), {"a": 2, "": 1}, 0),
        (np.array([3, 3, 4]), {"3": 2, "4": 1}, 0),
        (np.array([], dtype="U1"), {}, 0),
        (pa.array([None, None]), {}, 2),
    ],
)
def test_booleans_text_and_integers_are_categories(
    values: Values, categories: dict[str, int], nulls: int
) -> None:
    sketch = categorical(values)

    assert (sketch.categories, sketch.nulls) == (categories, nulls)


def test_long_categories_are_shortened_and_stay_apart() -> None:
    sketch = categorical(np.array(["é" * 5_000 + "1", "é" * 5_000 + "2"], dtype=object))

    assert len(sketch.categories) == 2
    assert max(map(len, sketch.categories)) == 64


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array(["a"]), ColumnKind.NUMERIC),
        (np.array([10**400], dtype=object), ColumnKind.NUMERIC),
        (np.array([1j]), ColumnKind.NUMERIC),
        (np.ones((2, 2)), ColumnKind.NUMERIC),
        (np.array(["a", 1], dtype=object), ColumnKind.NUMERIC),
        (pa.array([[1], [2]]), ColumnKind.NUMERIC),
        (pa.array([{"a": 1}]), ColumnKind.CATEGORICAL),
        (np.array([1.5]), ColumnKind.CATEGORICAL),
        (np.array(["\ud800"], dtype=object), ColumnKind.CATEGORICAL),
        (pa.array([b"\xff"]), ColumnKind.CATEGORICAL),
        (np.array([["a", "b"], ["c", "d"]]), ColumnKind.CATEGORICAL),
        ([1.0], ColumnKind.NUMERIC),
    ],
)
def test_other_columns_are_refused_by_name(values: Any, kind: ColumnKind) -> None:
    with pytest.raises(InvalidInput, match="x is not valid"):
        sketch_column("x", [values], kind=kind)


def test_kinds_follow_from_the_first_batch() -> None:
    table = pa.table(
        {"n": [1, 2], "t": ["a", "b"], "b": [True, False], "d": pa.array(["a", "a"]).dictionary_encode()}
    )

    reference = sketch_reference("flights@1", table.to_batches())

    assert [sketch.kind for sketch in reference.features] == [
        ColumnKind.NUMERIC,
        *[ColumnKind.CATEGORICAL] * 3,
    ]
    assert kind_of(np.array(["2013-07-01"], dtype="datetime64[s]")) is ColumnKind.NUMERIC


def test_a_mixed_column_of_a_training_set_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="m is not valid"):
        sketch_reference("flights@1", [{"m": np.array(["a", 1, None], dtype=object)}])


def test_read_only_memory_is_accepted() -> None:
    tensor = np.frombuffer(np.arange(9.0).tobytes())

    assert numeric(tensor).maximum == 8.0


def test_predictions_are_kept_apart_from_features() -> None:
    sketcher = WindowSketcher(
        "churn@1", features={"x": ColumnKind.NUMERIC}, predictions={"x": ColumnKind.NUMERIC}
    )

    sketcher.update({"x": np.array([1.0]), "unwatched": np.array([1.0])})
    sketcher.update({"x": np.array([9.0, 9.0])}, role=ColumnRole.PREDICTION)

    done = sketcher.cut(since=NOON, until=NOON + HOUR)
    assert [(s.role, s.count) for s in done.features] == [(ColumnRole.FEATURE, 1), (ColumnRole.PREDICTION, 2)]
    assert [s.count for s in sketcher.cut(since=NOON, until=NOON + HOUR).features] == [0, 0]


# ----------------------------------------------------------------------------------------- bytes


@given(floats, words)
def test_a_written_sketch_is_read_back(numbers: Any, texts: Any) -> None:
    features = (numeric(numbers), categorical(pa.array(texts, pa.string())).model_copy(update={"name": "c"}))
    written = ReferenceSketch(training_set="flights@1", features=features)

    assert decode(encode(written), ReferenceSketch) == written


def test_a_large_sketch_is_read_back() -> None:
    written = window(values=np.random.default_rng(4).normal(size=300_000))

    assert decode(encode(written), WindowSketch) == written


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_are_refused_or_still_a_sketch(data: st.DataObject) -> None:
    rows = data.draw(st.sampled_from([0, 1, 2, 700, 3_000, 50_000]))
    original = numeric(np.random.default_rng(5).normal(size=rows))
    raw = bytearray(original.sketch or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        near_the_start = st.integers(0, min(len(raw), 64) - 1)
        position = data.draw(st.one_of(near_the_start, st.integers(0, len(raw) - 1)))
        raw[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw), len(raw) - 1, len(raw) // 2, 7]))
    changed = original.model_copy(update={"sketch": bytes(raw[:cut])})

    try:
        merged = merge([changed, numeric([1.0, 2.0]), changed])
    except Damaged:
        return
    assert merged.count == 2 * rows + 2
    assert read_points(merged).count == merged.count


@given(st.binary(max_size=200))
def test_random_bytes_are_damaged(noise: bytes) -> None:
    with pytest.raises(Damaged):
        decode(noise, WindowSketch)
    with pytest.raises(Damaged):
        read_points(numeric([1.0, 2.0, 3.0]).model_copy(update={"sketch": noise}))


@pytest.mark.parametrize(
    "change",
    [
        {"count": 3},
        {"minimum": 0.0},
        {"sketch": None},
        {"count": -1},
        {"kind": ColumnKind.CATEGORICAL},
        {"categories": {"a": 1}},
        {"minimum": None},
    ],
)
def test_a_record_that_contradicts_itself_is_damaged(change: dict[str, Any]) -> None:
    whole = ReferenceSketch(training_set="flights@1", features=(numeric([1.0, 2.0]),))
    broken = whole.model_copy(update={"features": (whole.features[0].model_copy(update=change),)})

    with pytest.raises(Damaged):
        decode(encode(broken), ReferenceSketch)
