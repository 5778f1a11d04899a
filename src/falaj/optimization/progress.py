"""The progress of an optimization job in its log: one line of JSON for each step of a variant."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from falaj.records.record import Record

PREFIX = "variant "
ORIGINAL: Literal["original"] = "original"

VariantStage = Literal["training", "making", "made", "measuring", "measured", "accepted", "refused"]


class VariantProgress(Record):
    """How far one variant is; what has been measured of it so far."""

    name: Annotated[str, Field(max_length=64)]
    stage: VariantStage
    latency_p50_us: float | None = None
    rows_per_s: float | None = None
    best_batch: int | None = None
    size_bytes: int | None = None
    quality: float | None = None
    reason: Annotated[str, Field(max_length=4000)] = ""

    def line(self) -> str:
        return PREFIX + self.model_dump_json(exclude_none=True, exclude_defaults=True)


def parse_progress(line: str) -> VariantProgress | None:
    """Return the progress in a line of the log; None if it is another line."""
    if not line.startswith(PREFIX):
        return None
    try:
        return VariantProgress.model_validate_json(line.removeprefix(PREFIX))
    except ValidationError:
        return None
