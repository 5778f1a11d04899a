"""The base of all records: frozen, strict about unknown fields, times in UTC."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen fact. Unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def utc_now() -> datetime:
    return datetime.now(UTC)
