"""Reads YAML with the line of every value; only the plain part of the language is allowed.

Values are read as YAML 1.2 has them: `yes`, `2:30` and `2026-01-01` are text. Anchors, aliases, tags and keys that
stand twice are faults, so that a document says what it seems to say and is no larger than it looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from falaj.errors import Fault, InvalidInput, shorten

LARGEST_BYTES = 1 << 20
DEEPEST = 20

Location = tuple[str, ...]

_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "~": None, "": None}
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]{1,300}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]{1,5})?")


class YamlDocument(NamedTuple):
    """The content of a file, and the line of each value."""

    path: Path
    values: dict[str, Any]
    lines: dict[Location, int]
    texts: dict[Location, str]
    """Values as text: 1.10 is not 1.1 where text is meant."""

    def place(self, at: Location) -> str:
        """`file:line field` for a field, or for the nearest thing around it."""
        near = at
        while near and near not in self.lines:
            near = near[:-1]
        return f"{self.path}:{self.lines.get(near, 1)} {'.'.join(at)}".rstrip()


def read_yaml(path: Path) -> YamlDocument:
    """Return the mapping in `path`; raise InvalidInput with all its faults as YAML."""
    reader = _Reader(path)
    try:
        values = reader.document(yaml.parse(_text(path), Loader=yaml.SafeLoader))
    except yaml.reader.ReaderError as error:
        raise InvalidInput.at(str(path), given=f"the character {error.character!r}", allowed="text") from None
    except yaml.MarkedYAMLError as error:
        raise _unreadable(path, error) from None
    if reader.faults:
        count = f"{len(reader.faults)} fault{'s' * (len(reader.faults) != 1)}"
        raise InvalidInput(f"{path}: {count} in the YAML", faults=reader.faults)
    return YamlDocument(path, values, reader.lines, reader.texts)


class _Reader:
    """Builds values from events; faults are collected, and reading continues after them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: dict[Location, int] = {}
        self.texts: dict[Location, str] = {}
        self.faults: list[Fault] = []

    def document(self, events: Iterator[Event]) -> dict[str, Any]:
        found: Any = None
        for event in events:
            if isinstance(event, DocumentStartEvent) and found is not None:
                self._fault(event, (), "a second document", "one job a file")
                break
            if isinstance(event, NodeEvent):
                found = self._node(event, events, (), 0)
            elif isinstance(event, StreamEndEvent):
                break
        if not isinstance(found, dict) and not self.faults:
            given = "nothing" if found is None else shorten(found)
            self._note(1, (), given, "fields of a job, one a line, like 'script: train.py'")
        return found if isinstance(found, dict) else {}

    def _node(self, event: Event, events: Iterator[Event], at: Location, depth: int) -> Any:
        if depth > DEEPEST:
            line = event.start_mark.line + 1
            allowed = f"at most {DEEPEST} levels inside each other"
            raise InvalidInput.at(f"{self._path}:{line}", given="a deeper one", allowed=allowed)
        if isinstance(event, AliasEvent):
            self._fault(event, at, f"*{event.anchor}", "the value itself; aliases are not read here")
            return None
        if getattr(event, "anchor", None):
            self._fault(event, at, f"&{event.anchor}", "the value alone; anchors are not read here")
        if getattr(event, "tag", None) not in (None, "!"):
            self._fault(event, at, shorten(event.tag), "a value without a tag")
        if isinstance(event, MappingStartEvent):
            return self._mapping(events, at, depth)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(events, at, depth)
        assert isinstance(event, ScalarEvent)  # noqa: S101 - the only kind of node that is left
        self.texts[at] = event.value
        return _plain(event.value) if event.implicit[0] and event.style is None else event.value

    def _mapping(self, events: Iterator[Event], at: Location, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key in events:
            if isinstance(key, MappingEndEvent):
                break
            name = self._key(key, events, at, depth)
            line, value_at = key.start_mark.line + 1, (*at, name)
            if name in first:
                self._note(line, value_at, f"{name}, a second time", f"once; it stands on line {first[name]}")
            else:
                first[name] = self.lines[value_at] = line
            value = self._node(next(events), events, value_at, depth + 1)
            found.setdefault(name, value)
        return found

    def _key(self, key: Event, events: Iterator[Event], at: Location, depth: int) -> str:
        if isinstance(key, ScalarEvent):
            self._refuse_marks(key, at)
            return str(key.value)
        self._fault(key, at, "a key that is no word", "a word, a colon, and a value")
        self._node(key, events, at, depth + 1)
        return f"key of line {key.start_mark.line + 1}"

    def _refuse_marks(self, key: ScalarEvent, at: Location) -> None:
        if key.anchor or key.tag not in (None, "!"):
            self._fault(key, at, f"a key with {key.tag or '&' + str(key.anchor)}", "a plain word")

    def _sequence(self, events: Iterator[Event], at: Location, depth: int) -> list[Any]:
        found: list[Any] = []
        for event in events:
            if isinstance(event, SequenceEndEvent):
                break
            item_at = (*at, str(len(found)))
            self.lines[item_at] = event.start_mark.line + 1
            found.append(self._node(event, events, item_at, depth + 1))
        return found

    def _fault(self, event: Event, at: Location, given: str, allowed: str) -> None:
        self._note(event.start_mark.line + 1, at, given, allowed)

    def _note(self, line: int, at: Location, given: str, allowed: str) -> None:
        if len(self.faults) < 50:
            where = f"{self._path}:{line} {'.'.join(at)}".rstrip()
            self.faults.append(Fault(where=where, given=given, allowed=allowed))


def _plain(text: str) -> Any:
    """Return the value of an unquoted scalar: a YAML keyword, a number, or text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        allowed = f"a readable file of YAML ({error.strerror})"
        raise InvalidInput.at("--file", given=str(path), allowed=allowed) from None
    if len(raw) > LARGEST_BYTES:
        raise InvalidInput.at(str(path), given="more than 1 MiB", allowed="a job in at most 1 MiB of YAML")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        given = f"byte {error.start} is no UTF-8"
        raise InvalidInput.at(str(path), given=given, allowed="a file of YAML in UTF-8") from None


def _unreadable(path: Path, error: yaml.MarkedYAMLError) -> InvalidInput:
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    problem = " ".join(str(part) for part in (error.context, error.problem) if part)
    if "'\\t'" in problem:
        fix = "put spaces where tabs are"
        return InvalidInput.at(f"{path}:{line}", given="a tab", allowed="spaces; YAML takes no tabs", fix=fix)
    return InvalidInput.at(f"{path}:{line}", given=problem, allowed="YAML, like 'script: train.py'")
