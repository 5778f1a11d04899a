"""Reads the .proto files beside it into descriptors: the part of the language that they use, without a compiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

_TOKEN = re.compile(r'"[^"]*"|[A-Za-z_][\w.]*|\d+|[{}()<>=;,]')
_COMMENT = re.compile(r"//[^\n]*")

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    name: getattr(Field, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int64", "uint64", "int32", "uint32", "bool", "string", "bytes")
}


def read_schema(path: Path, *, package: str | None = None) -> Any:
    """Return the FileDescriptorProto of a .proto file; `package` replaces that of the file."""
    tokens = _Tokens(_TOKEN.findall(_COMMENT.sub("", path.read_text())))
    file = descriptor_pb2.FileDescriptorProto(name=f"falaj/{path.name}")
    for word in tokens:
        if word == "syntax":
            file.syntax = tokens.skip("=").next().strip('"')
            tokens.skip(";")
        elif word == "package":
            file.package = package or tokens.peek()
            tokens.next()
            tokens.skip(";")
        elif word == "message":
            _read_message(tokens, file.message_type.add())
        elif word == "enum":
            _read_enum(tokens, file.enum_type.add())
        elif word == "service":
            _read_service(tokens, file.service.add(), file.package)
        else:
            raise ValueError(f"{path.name}: unexpected '{word}'")
    if package is not None:
        file.name = f"falaj/{package.rpartition('.')[2]}/{path.name}"
    names = _type_names(file.message_type, f".{file.package}") | _type_names(
        file.enum_type, f".{file.package}"
    )
    for message in file.message_type:
        _resolve(message, f".{file.package}", names)
    return file


class _Tokens:
    def __init__(self, words: list[str]) -> None:
        self._words, self._at = words, 0

    def __iter__(self) -> Iterator[str]:
        while self._at < len(self._words):
            yield self.next()

    def next(self) -> str:
        self._at += 1
        return self._words[self._at - 1]

    def peek(self) -> str:
        return self._words[self._at]

    def skip(self, word: str) -> _Tokens:
        if self.next() != word:
            raise ValueError(f"'{word}' is missing before '{self._words[self._at - 1]}'")
        return self


def _read_message(tokens: _Tokens, message: Any) -> None:
    message.name = tokens.next()
    tokens.skip("{")
    while (word := tokens.next()) != "}":
        if word == "message":
            _read_message(tokens, message.nested_type.add())
        elif word == "enum":
            _read_enum(tokens, message.enum_type.add())
        elif word == "oneof":
            message.oneof_decl.add(name=tokens.next())
            tokens.skip("{")
            while (kind := tokens.next()) != "}":
                field = _read_field(tokens, message, kind)
                field.oneof_index = len(message.oneof_decl) - 1
        elif word == "map":
            _read_map(tokens, message)
        elif word == "repeated":
            _read_field(tokens, message, tokens.next()).label = Field.LABEL_REPEATED
        else:
            _read_field(tokens, message, word)


def _read_field(tokens: _Tokens, message: Any, kind: str) -> Any:
    field = message.field.add(name=tokens.next(), number=int(tokens.skip("=").next()))
    field.label = Field.LABEL_OPTIONAL
    field.json_name = _camel(field.name)
    _set_type(field, kind)
    tokens.skip(";")
    return field


def _read_map(tokens: _Tokens, message: Any) -> None:
    key = tokens.skip("<").next()
    value = tokens.skip(",").next()
    name = tokens.skip(">").next()
    entry = message.nested_type.add(name=_camel(f"_{name}_entry"))
    entry.options.map_entry = True
    for number, (part, kind) in enumerate((("key", key), ("value", value)), 1):
        _set_type(entry.field.add(name=part, number=number, label=Field.LABEL_OPTIONAL, json_name=part), kind)
    field = message.field.add(name=name, number=int(tokens.skip("=").next()), label=Field.LABEL_REPEATED)
    field.json_name = _camel(name)
    _set_type(field, entry.name)
    tokens.skip(";")


def _set_type(field: Any, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type_name = kind


def _read_enum(tokens: _Tokens, enum: Any) -> None:
    enum.name = tokens.next()
    tokens.skip("{")
    while (word := tokens.next()) != "}":
        enum.value.add(name=word, number=int(tokens.skip("=").next()))
        tokens.skip(";")


def _read_service(tokens: _Tokens, service: Any, package: str) -> None:
    service.name = tokens.next()
    tokens.skip("{")
    while tokens.next() == "rpc":
        method = service.method.add(name=tokens.next())
        method.client_streaming, method.input_type = _read_stream(tokens, package)
        tokens.skip("returns")
        method.server_streaming, method.output_type = _read_stream(tokens, package)
        tokens.skip(";")


def _read_stream(tokens: _Tokens, package: str) -> tuple[bool, str]:
    word = tokens.skip("(").next()
    is_stream = word == "stream"
    name = tokens.next() if is_stream else word
    tokens.skip(")")
    return is_stream, f".{package}.{name}"


def _type_names(types: Any, scope: str) -> dict[str, bool]:
    """Return the full names of messages (true) and enums (false)."""
    found = {}
    for each in types:
        name = f"{scope}.{each.name}"
        is_message = isinstance(each, descriptor_pb2.DescriptorProto)
        found[name] = is_message
        if is_message:
            found |= _type_names(each.nested_type, name) | _type_names(each.enum_type, name)
    return found


def _resolve(message: Any, scope: str, names: dict[str, bool]) -> None:
    """Give the fields of a message the full names of their types, looked up from the inside out."""
    scope = f"{scope}.{message.name}"
    for field in message.field:
        if field.type_name:
            place = scope
            while f"{place}.{field.type_name}" not in names:
                if not place:
                    raise ValueError(f"unknown type {field.type_name}")
                place = place.rpartition(".")[0]
            field.type_name = f"{place}.{field.type_name}"
            field.type = Field.TYPE_MESSAGE if names[field.type_name] else Field.TYPE_ENUM
    for nested in message.nested_type:
        _resolve(nested, scope, names)


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
