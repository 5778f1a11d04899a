"""Secrets: values that jobs find in their environment and nobody is shown."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from falaj.records.names import ObjectId, Reference, RefersTo, Withheld
from falaj.records.record import Record

LARGEST_BYTES = 64 * 1024
RULE = f"text in UTF-8 of 1 to {LARGEST_BYTES:,} bytes, without the character NUL"


def _fitting(value: str) -> str:
    size = len(value.encode())
    if not 1 <= size <= LARGEST_BYTES or "\0" in value:
        raise ValueError(f"a secret is {RULE}; this has {size:,} bytes")
    return value


SecretRef = Annotated[Reference, RefersTo("secret")]
SecretValue = Annotated[
    str,
    Withheld(),
    AfterValidator(_fitting),
    Field(
        json_schema_extra={"format": "password", "writeOnly": True, "minLength": 1, "pattern": "^[^\\x00]+$"}
    ),
]


class Secret(Record):
    """A secret: its name, who set it last, and when. No operation returns its value."""

    id: ObjectId
    name: str
    set_by: str
    created_at: datetime
    changed_at: datetime
