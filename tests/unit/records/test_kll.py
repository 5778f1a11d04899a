"""KLL sketches: exact facts, errors within the documented bounds, and rejection of bytes that lie."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.errors import Damaged
from falaj.records.quantiles.kll import RANK_ERROR, SHARE_ERROR, Floats, K, KllSketch

SIZES = st.integers(0, 3 * K) | st.sampled_from([K - 1, K, K + 1, 2047, 2048, 2**16 + 1])
VALUES = st.floats(allow_nan=True, allow_infinity=True)
WRITTEN_BY_DATASKETCHES = bytes.fromhex(
    "05010f00200308000300000000000000200301001d030000"
    "000000000000f0bf00000000000008400000000000000440000000000000f0bf0000000000000840"
)
"""By version 5.2 of Apache's library, of 3, -1 and 2.5; level 0 is not sorted."""


def sketch(*batches: Any, seed: int = 1) -> KllSketch:
    made = KllSketch(rng=random.Random(seed))
    for batch in batches:
        made.update(np.asarray(batch, dtype=np.float64))
    return made


def batches_of(sizes: list[int]) -> list[Floats]:
    rng = np.random.default_rng(len(sizes))
    return [rng.normal(size=size) for size in sizes]


def worst_errors(made: KllSketch, rows: Floats) -> tuple[float, float]:
    """Return the largest error of a rank, and of the share between two points."""
    points, ordered = made.points(), np.sort(rows)
    errors = (points.at_or_below(ordered) - np.searchsorted(ordered, ordered, side="right")) / len(rows)
    above, below = max(0.0, errors.max()), min(0.0, errors.min())
    return max(above, -below), above - below


# ------------------------------------------------------------------------------------------- exact facts


@given(st.lists(st.lists(VALUES, max_size=60), max_size=12))
def test_a_sketch_is_exact_until_it_compacts(batches: list[list[float]]) -> None:
    points = sketch(*batches).points()

    kept = sorted(value for batch in batches for value in batch if value == value)
    assert points.values.tolist() == kept
    assert points.cumulated.tolist() == list(range(1, len(kept) + 1))
    assert (points.exact, points.rank_error, points.share_error) == (True, 0.0, 0.0)


@given(st.lists(SIZES, max_size=8), st.lists(SIZES, max_size=8))
def test_counts_add_up_and_bounds_are_exact_after_a_merge(first: list[int], second: list[int]) -> None:
    parts = [batches_of(first), batches_of(second)]
    into, other = sketch(*parts[0]), sketch(*parts[1])

    into.merge(other)

    rows = np.concatenate([np.empty(0), *parts[0], *parts[1]])
    assert into.count == into.points().count == len(rows)
    assert (into.minimum, into.maximum) == ((rows.min(), rows.max()) if len(rows) else (None, None))
    assert other.to_bytes() == sketch(*parts[1]).to_bytes()


def test_a_sketch_merged_with_itself_counts_twice() -> None:
    made = sketch(np.arange(5_000.0))

    made.merge(made)

    assert made.count == made.points().count == 10_000


@pytest.mark.parametrize("size", [10, 5_000])
def test_nan_is_never_in(size: int) -> None:
    rows = np.arange(float(size))
    rows[::2] = np.nan

    made = sketch(rows, [np.nan], np.full(4_000, np.nan))

    assert (made.count, made.minimum, made.maximum) == (size // 2, 1.0, size - 1.0)
    assert not np.isnan(made.points().values).any()


@pytest.mark.parametrize(
    "rows",
    [np.arange(6.0, dtype=np.float32), np.arange(6), np.arange(12.0)[::2] / 2, np.arange(6.0, dtype=">f8")],
)
def test_other_types_and_strides_are_converted(rows: Any) -> None:
    made = KllSketch()

    made.update(rows)

    assert made.points().values.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_array_may_be_changed_after_an_update() -> None:
    rows = np.arange(5_000.0)
    made = sketch(rows[:10], rows)

    rows[:] = -1

    assert made.minimum == 0.0
    assert made.points().values.min() >= 0


def test_an_equal_generator_gives_the_same_sketch() -> None:
    batches = batches_of([3_000, 7, 70_000, 500] * 3)

    assert sketch(*batches).to_bytes() == sketch(*batches).to_bytes()
    assert sketch(*batches).to_bytes() != sketch(*batches, seed=2).to_bytes()


@pytest.mark.parametrize("batch", [100, 100_000])
def test_memory_is_constant(batch: int) -> None:
    rows = np.random.default_rng(1).normal(size=batch)
    made = sketch(rows)
    tracemalloc.start()
    try:
        for _ in range(1_000_000 // batch):
            made.update(rows)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert used_bytes < 64_000
    assert len(made.to_bytes()) < 24_000


def test_merging_takes_constant_memory() -> None:
    part = sketch(*batches_of([500] * 200)).to_bytes()
    into = sketch()
    tracemalloc.start()
    try:
        for _ in range(200):
            into.merge(KllSketch.from_bytes(bytes(bytearray(part))))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 2_000_000


# ------------------------------------------------------------------------------------------------ errors

STREAMS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "random": lambda rng, size: rng.normal(size=size),
    "sorted": lambda rng, size: np.arange(float(size)),
    "reversed": lambda rng, size: np.arange(float(size))[::-1],
    "few distinct": lambda rng, size: rng.integers(0, 10, size).astype(np.float64),
    "zipf": lambda rng, size: rng.zipf(1.3, size).astype(np.float64),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("cut", ["small batches", "large batches", "many small parts", "unequal parts"])
def test_errors_are_within_the_bounds_in_99_percent_of_simulated_streams(stream: str, cut: str) -> None:
    errors = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        rows = STREAMS[stream](rng, int(rng.integers(2_000, 20_000)))
        errors.append(worst_errors(sketch_cut(rows, cut, seed), rows))

    ranks, shares = np.array(errors).T
    assert (ranks > RANK_ERROR).sum() <= 1
    assert (shares > SHARE_ERROR).sum() <= 1


def sketch_cut(rows: Floats, cut: str, seed: int) -> KllSketch:
    """Sketch `rows` batch by batch, or part by part, each part a sketch that is stored, read and merged."""
    if cut == "small batches":
        return sketch(*np.array_split(rows, len(rows) // 60), seed=seed)
    if cut == "large batches":
        return sketch(*np.array_split(rows, 3), seed=seed)
    edges = range(100, len(rows), 100) if cut == "many small parts" else [2**power for power in range(15)]
    merged = sketch(seed=seed)
    for number, part in enumerate(np.split(rows, [edge for edge in edges if edge < len(rows)])):
        merged.merge(KllSketch.from_bytes(sketch(part, seed=seed + number).to_bytes()))
    return merged


@pytest.mark.parametrize(("parts", "size"), [(1, 40_000), (40, 1_000), (160, 5_000)])
def test_the_usual_error_is_less_than_half_of_the_bound(parts: int, size: int) -> None:
    errors = []
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(size=(parts, size))
        merged = sketch(seed=seed)
        for number, part in enumerate(rows):
            merged.merge(sketch(*part.reshape(-1, 100), seed=seed * parts + number))
        errors.append(worst_errors(merged, rows.ravel())[0])

    assert np.mean(errors) < 0.45 * RANK_ERROR


def test_errors_of_many_stored_steps_do_not_add_up() -> None:
    rows = np.random.default_rng(1).normal(size=60_000)
    made = KllSketch()

    for number, part in enumerate(np.array_split(rows, 200)):
        made = KllSketch.from_bytes(made.to_bytes(), rng=random.Random(number))
        made.update(part)

    assert worst_errors(made, rows)[0] <= RANK_ERROR


@given(st.lists(SIZES, min_size=1, max_size=8).filter(any), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_quantiles_have_about_the_rank_asked_for(sizes: list[int], ranks: list[float]) -> None:
    batches = batches_of(sizes)
    ordered = np.sort(np.concatenate(batches))

    quantiles = sketch(*batches).points().quantiles(np.array(ranks))

    above = np.searchsorted(ordered, quantiles, side="right") / len(ordered)
    below = np.searchsorted(ordered, quantiles, side="left") / len(ordered)
    allowed = 1.5 * RANK_ERROR + 1 / len(ordered)
    assert (above >= np.array(ranks) - allowed).all()
    assert (below <= np.array(ranks) + allowed).all()


# ------------------------------------------------------------------------------------------------- bytes


@given(st.lists(SIZES, max_size=6))
def test_what_was_written_is_read_back(sizes: list[int]) -> None:
    made = sketch(*batches_of(sizes))
    data = made.to_bytes()

    read = KllSketch.from_bytes(data)

    assert read.to_bytes() == data
    assert (read.count, read.minimum, read.maximum) == (made.count, made.minimum, made.maximum)
    assert read.points().values.tolist() == made.points().values.tolist()
    assert read.points().cumulated.tolist() == made.points().cumulated.tolist()


def test_bytes_of_datasketches_are_read() -> None:
    read = KllSketch.from_bytes(WRITTEN_BY_DATASKETCHES)

    assert read.points().values.tolist() == [-1.0, 2.5, 3.0]
    assert (read.minimum, read.maximum) == (-1.0, 3.0)


def test_bytes_are_those_of_datasketches_but_for_the_order_of_level_0() -> None:
    sorted_flag = WRITTEN_BY_DATASKETCHES[:3] + b"\2" + WRITTEN_BY_DATASKETCHES[4:-24]

    assert sketch([3.0, -1.0, 2.5]).to_bytes() == sorted_flag + struct.pack("<3d", -1.0, 2.5, 3.0)


WHOLE = sketch(np.random.default_rng(1).normal(size=5_000)).to_bytes()
HEIGHT = WHOLE[18]
BODY = 20 + 4 * HEIGHT + 16


def changed(at: int, form: str, *values: float) -> bytes:
    data = bytearray(WHOLE)
    struct.pack_into(form, data, at, *values)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too short"),
        (WHOLE[:30], "too short"),
        (WHOLE[:-1], "wrong length"),
        (WHOLE + bytes(8), "wrong length"),
        (sketch().to_bytes() + b"\0", "wrong length"),
        (sketch([1.0]).to_bytes()[:-1], "wrong length"),
        (changed(2, "B", 14), "k = 800"),
        (changed(4, "<H", 801), "k = 800"),
        (changed(6, "B", 9), "k = 800"),
        (changed(0, "B", 3), "unknown header"),
        (changed(1, "B", 2), "unknown header"),
        (changed(3, "B", 8), "unknown header"),
        (changed(16, "<H", 400), "unknown header"),
        (changed(18, "B", 0), "unknown header"),
        (changed(18, "B", 32), "unknown header"),
        (sketch().to_bytes()[:3] + b"\5" + sketch().to_bytes()[4:], "unknown header"),
        (changed(8, "<Q", 5_001), "the weights do not add up"),
        (changed(20, "<2I", 9_999, 0), "levels overlap"),
        (changed(BODY - 16, "<d", 0.0), "out of bounds"),
        (changed(BODY - 8, "<d", 0.0), "out of bounds"),
        (changed(BODY - 8, "<d", float("nan")), "out of bounds"),
        (changed(BODY + 80, "<d", float("nan")), "out of bounds"),
        (changed(BODY, "<2d", 1.0, 0.5), "not sorted"),
        (changed(len(WHOLE) - 16, "<2d", 1.0, 0.5), "not sorted"),
        (sketch([1.0]).to_bytes()[:8] + struct.pack("<d", float("nan")), "NaN"),
    ],
)
def test_bytes_that_lie_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(Damaged, match=problem):
        KllSketch.from_bytes(data)


@given(st.sampled_from([0, 1, 2, K, 5_000]), st.data())
def test_changed_bytes_are_refused_or_still_those_of_a_sketch(size: int, data: st.DataObject) -> None:
    raw = bytearray(sketch(*batches_of([size])).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 80) - 1))] = data.draw(st.integers(0, 255))

    try:
        read = KllSketch.from_bytes(bytes(raw))
    except Damaged:
        return
    read.merge(sketch([1.0, 2.0]))
    assert read.points().count == read.count
    assert KllSketch.from_bytes(read.to_bytes()).count == read.count
