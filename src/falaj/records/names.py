"""Identifiers and names: their types, their form, and how a new one is made."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NewType

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

ObjectId = NewType("ObjectId", str)
PrincipalId = NewType("PrincipalId", str)

ROOT = ObjectId("platform")
DEFAULT_WORKSPACE = "default"
DEFAULT_QUEUE = ObjectId("queue_0000000000000000000default")
"""The id of the queue `default`, the same on every platform."""
NAME_RULE = "1 to 128 of a-z, 0-9, '-', '_' and '.', starting and ending with a letter or digit, no '..'"

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_SHIFTS = range(120, -1, -10)
_last_id, _last_id_lock = [0], threading.Lock()
_WORD = r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?"


def new_id(prefix: str) -> ObjectId:
    """`prefix_` and 26 characters that sort by time: 48 bits of milliseconds, 80 random bits.

    Ids that one process makes in the same millisecond are in order, too: each is a random number above the one before.
    """
    value = (int(time.time() * 1000) << 80) | int.from_bytes(os.urandom(10))
    with _last_id_lock:
        if 0 <= _last_id[0] - value < 2 << 80:
            value = _last_id[0] + 1 + int.from_bytes(os.urandom(8))
        _last_id[0] = value
    return ObjectId(f"{prefix}_" + "".join([_PAIRS[(value >> shift) & 1023] for shift in _SHIFTS]))


def repeated_names(names: Iterable[str]) -> list[str]:
    """Return the names that occur twice when case is ignored, as it is in queries."""
    given = list(names)
    counts = Counter(name.casefold() for name in given)
    return [name for name in given if counts[name.casefold()] > 1]


class TextRule:
    """Marks a text of at most `limit` characters that matches `pattern` as a whole; the error says it in `words`."""

    def __init__(self, pattern: str, words: str, *, limit: int) -> None:
        self._pattern = pattern
        self._compiled = re.compile(pattern)
        self._words = words
        self._limit = limit

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, core_schema.str_schema())

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema) | {"pattern": f"^(?:{self._pattern})$", "maxLength": self._limit}

    def _check(self, text: str) -> str:
        if len(text) > self._limit:
            raise ValueError(f"{self._words}; at most {self._limit} characters")
        if not self._compiled.fullmatch(text):
            raise ValueError(self._words)
        return text


Name = Annotated[str, TextRule(rf"(?!.*\.\.){_WORD}", f"a name is {NAME_RULE}", limit=128)]
Jurisdiction = Annotated[str, TextRule("[A-Z]{2}", "a jurisdiction is two capital letters, like AE", limit=2)]
DataClass = Annotated[
    str, TextRule("[a-z][a-z0-9-]*", "a class is a-z, 0-9 and '-', like personal", limit=64)
]
ActionPattern = Annotated[
    str,
    TextRule(r"\*|[a-z]+\.(\*|[a-z_]+)", "an action is group.verb, group.* or *, like blobs.read", limit=96),
]
Reference = Annotated[
    str,
    TextRule(
        rf"(?!.*\.\.)({_WORD}/)?([a-z][a-z_]*:)?{_WORD}(@[a-z0-9.]{{1,64}})?",
        f"a reference is an id, a name or workspace/name; a name is {NAME_RULE}",
        limit=320,
    ),
]
"""An id, a name, or `workspace/name`; with a kind in front (`blob:name`) where any kind may stand."""


@dataclass(frozen=True)
class RefersTo:
    """Marks a parameter as a reference to a stored object of `kind` (none: of any kind)."""

    kind: str | None


@dataclass(frozen=True)
class Withheld:
    """Marks a parameter whose value no record of the call is made from, and no error shows."""


@dataclass(frozen=True)
class PlacedIn:
    """Marks a parameter as the zone in which the operation places bytes of what it refers to."""


WorkspaceRef = Annotated[Reference, RefersTo("workspace")]
UserRef = Annotated[Reference, RefersTo("user")]
SubjectRef = Annotated[Reference, RefersTo("subject")]
"""A subject that can hold a role: a user, a service account or a group."""
GroupRef = Annotated[Reference, RefersTo("group")]
TokenRef = Annotated[Reference, RefersTo("token")]
PolicyRef = Annotated[Reference, RefersTo("policy")]
BlobRef = Annotated[Reference, RefersTo("blob")]
WorkflowRef = Annotated[Reference, RefersTo("work")]
QueueRef = Annotated[Reference, RefersTo("queue")]
AnyRef = Annotated[Reference, RefersTo(None)]
ZoneName = Annotated[Name, PlacedIn()]

Secret = Annotated[str, TextRule("(env|file):.+", "a secret is named by env:NAME or file:PATH", limit=1000)]
"""A reference to a secret: env:NAME or file:PATH. Secrets themselves are never in falaj.toml."""
