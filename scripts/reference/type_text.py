"""Types as text, as a reader would write them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any


def type_text(annotation: Any) -> str:
    """Return a type as text: without constraints; an enumeration by its values, which may be given instead."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, str):
        return annotation
    if origin is typing.Annotated:
        return type_text(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_text(each) for each in inner))
    if origin is typing.Literal:
        return " | ".join(_quoted(each) for each in inner)
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return " | ".join(_quoted(each.value) for each in annotation)
    if origin in (Callable, typing.get_origin(Callable[..., Any])):
        *given, result = inner
        taken = ", ".join(type_text(each) for each in given[0]) if isinstance(given[0], list) else "..."
        return f"Callable[[{taken}], {type_text(result)}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_text(each) for each in inner)}]"
    return str(getattr(annotation, "__name__", annotation))


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
