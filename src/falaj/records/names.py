"""Identifiers and names: their types, their form, and how a new one is made."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import Annotated, NewType

from pydantic import AfterValidator, Field, StringConstraints

ObjectId = NewType("ObjectId", str)
PrincipalId = NewType("PrincipalId", str)

ROOT = ObjectId("platform")
DEFAULT_WORKSPACE = "default"
NAME_RULE = "1 to 128 of a-z, 0-9, '-', '_' and '.', starting and ending with a letter or digit, no '..'"

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_WORD = r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?"
_NAME = re.compile(_WORD)
_REFERENCE = re.compile(rf"({_WORD}/)?([a-z]+:)?{_WORD}(@[a-z0-9.]{{1,64}})?")


def new_id(prefix: str) -> ObjectId:
    """`prefix_` and 26 characters that sort by time: 48 bits of milliseconds, 80 random bits."""
    value = (int(time.time() * 1000) << 80) | int.from_bytes(os.urandom(10))
    return ObjectId(f"{prefix}_" + "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5)))


def _check_name(text: str) -> str:
    if ".." in text or not _NAME.fullmatch(text):
        raise ValueError(f"a name is {NAME_RULE}")
    return text


def _check_reference(text: str) -> str:
    if ".." in text or not _REFERENCE.fullmatch(text):
        raise ValueError(f"a reference is an id, a name or workspace/name; a name is {NAME_RULE}")
    return text


Name = Annotated[
    str,
    StringConstraints(max_length=128),
    AfterValidator(_check_name),
    Field(json_schema_extra={"pattern": f"^{_WORD}$"}),
]
Jurisdiction = Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}$"), Field(examples=["AE"])]
DataClass = Annotated[str, StringConstraints(max_length=64, pattern=r"^[a-z][a-z0-9-]*$")]
ActionPattern = Annotated[str, StringConstraints(max_length=96, pattern=r"^(\*|[a-z]+\.(\*|[a-z_]+))$")]


@dataclass(frozen=True)
class RefersTo:
    """Marks a parameter as a reference to a stored object of `kind` (none: of any kind)."""

    kind: str | None


@dataclass(frozen=True)
class PlacedIn:
    """Marks a parameter as the zone in which the operation places bytes of what it refers to."""


Reference = Annotated[
    str,
    StringConstraints(max_length=320),
    AfterValidator(_check_reference),
    Field(json_schema_extra={"pattern": f"^{_REFERENCE.pattern}$"}),
]
"""An id, a name, or `workspace/name`; with a kind in front (`blob:name`) where any kind may stand."""

WorkspaceRef = Annotated[Reference, RefersTo("workspace")]
UserRef = Annotated[Reference, RefersTo("user")]
SubjectRef = Annotated[Reference, RefersTo("subject")]
"""Whoever can hold a role: a user, a service account or a group."""
GroupRef = Annotated[Reference, RefersTo("group")]
TokenRef = Annotated[Reference, RefersTo("token")]
PolicyRef = Annotated[Reference, RefersTo("policy")]
BlobRef = Annotated[Reference, RefersTo("blob")]
WorkRef = Annotated[Reference, RefersTo("work")]
AnyRef = Annotated[Reference, RefersTo(None)]
ZoneName = Annotated[Name, PlacedIn()]
