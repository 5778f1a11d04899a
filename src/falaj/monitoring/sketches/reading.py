"""Read the KLL sketches of columns, and reject bytes that are invalid or contradict their record."""

from __future__ import annotations

from falaj.errors import Damaged
from falaj.records.monitoring.sketches import FeatureSketch
from falaj.records.quantiles.kll import KllSketch, Points


def read_points(feature: FeatureSketch) -> Points:
    """Return the points of a numeric `feature`. Raise Damaged as `read_sketch` does."""
    return read_sketch(feature).points()


def read_sketch(feature: FeatureSketch) -> KllSketch:
    """Return the sketch of a numeric `feature`. Raise Damaged if its bytes are invalid or contradict the record."""
    try:
        sketch = KllSketch.from_bytes(feature.sketch or b"")
    except Damaged as problem:
        raise Damaged(f"the sketch of {feature.name!r} is damaged: {problem.message}") from None
    if sketch.count != feature.count:
        raise Damaged(f"the sketch of {feature.name!r} has another number of values than its record")
    if sketch.count and (sketch.minimum, sketch.maximum) != (feature.minimum, feature.maximum):
        raise Damaged(f"the sketch of {feature.name!r} has another minimum or maximum than its record")
    return sketch
