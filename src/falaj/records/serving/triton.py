"""The Triton server behind endpoints, as falaj.toml names it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from falaj.records.names import Name, Secret, TextRule
from falaj.records.record import Record

HeaderName = Annotated[
    str, TextRule("[A-Za-z0-9][A-Za-z0-9-]*", "a header is named by letters, digits and -", limit=100)
]
PROTOCOL_HEADERS = (
    "content-length",
    "content-type",
    "host",
    "inference-header-content-length",
    "transfer-encoding",
)


class TritonConfig(Record):
    """A Triton Inference Server that runs versions for endpoints whose engine is `triton`."""

    url: str
    """Its HTTP address, like `https://triton.example.com:8000`; the host must be in `egress.allow`."""
    zone: Name | None = None
    """The zone where it runs, for residency; by default that of this machine."""
    token: Secret | None = None
    """A token that is sent as `Authorization: Bearer …`; read when the model server loads its first version there."""
    headers: Annotated[dict[HeaderName, Secret], Field(max_length=20)] = {}
    """Further headers of each request, like `x-api-key`, each named by env:NAME or file:PATH."""
    ca: Path | None = None
    """PEM file with the certificates of its authority, beside those of the system and of `egress.ca`."""
    connections: Annotated[int, Field(ge=1, le=256)] = 16
    """Connections that each replica of the model server keeps to it, and so its requests at a time."""

    @model_validator(mode="after")
    def _no_header_twice(self) -> TritonConfig:
        named = [each.lower() for each in self.headers]
        taken = {*PROTOCOL_HEADERS, *(("authorization",) if self.token is not None else ())}
        if len({*named}) < len(named) or taken & {*named}:
            raise ValueError(
                "a header is given once, and not one that Falaj sends itself: " + ", ".join(sorted(taken))
            )
        return self
