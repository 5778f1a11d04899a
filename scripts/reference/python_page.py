"""docs/reference/python.md: the public names of `falaj`, with signature, description and example."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import falaj
from falaj.control.services import service_types
from falaj.governance.operations.operation import Operation, operations_of
from falaj.records.record import Record
from falaj.sdk.platform import Platform
from falaj.training.runtime.agent.job import JobContext
from reference.markdown import block, code, docstring, field_docs, first_sentence, table
from reference.python_examples import EXAMPLES
from reference.type_text import type_text

HEAD = """# Python

`import falaj as fj`. The names on this page are the public ones (`falaj.__all__`); all others may change. The examples
continue one another: together they are a script that runs in an empty folder.

`fj.open` gives a platform in this process, `fj.connect` one over REST; both have the same methods, records and
[errors](errors.md). Every operation is a method of a service, such as `platform.models.promote`. The last section lists
the [services](#services); [REST](rest.md) has the types of their parameters and answers.
"""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Open a platform": ("__version__", "open", "connect"),
    "Define features": ("Entity", "Feature", "Aggregation", "FeatureView"),
    "Use a platform": ("Platform", "once", "verify_export", "FalajError"),
    "Settings of operations": (
        "Lookup",
        "ViewLookup",
        "MonitorWindow",
        "FalseAlarmBudget",
        "AcceptanceBudget",
        "Canary",
        "CanaryTraffic",
        "PredictionColumns",
    ),
    "Train": ("fit", "STOP", "step", "estimate", "verify_certificate"),
    "Write a training script": ("job", "save_model", "export_onnx"),
}

NOTES = {
    "__version__": "The version of Falaj.",
    "STOP": 'The value with which a callback of `fj.fit` ends the training; `FitResult.stopped` is `"asked"` then.',
}
"""Descriptions of names that cannot have a docstring."""

INTRODUCTIONS = {
    "Train": (
        "`Loss` is a function of the model's output and the target, or of the output alone, that returns the mean over "
        "a batch; None where the model computes it. `Data` is a "
        "tensor or NumPy array, a tuple of them (inputs…, target), a data frame of pandas or polars, a map-style "
        "dataset, a DataLoader, a table, or the path of one. "
        "[fit.md](fit.md) has the other types. Training needs torch, and no platform."
    ),
}

LONG = 20
"""Parameters beyond which a signature shows its options as `**options`."""

WIDTH = 100


def python_page() -> str:
    """Return the page."""
    listed = {name for names in SECTIONS.values() for name in names}
    if odd := listed ^ set(falaj.__all__) | (listed ^ EXAMPLES.keys()):
        raise SystemExit(f"python_page, EXAMPLES and falaj.__all__ differ in: {', '.join(sorted(odd))}")
    return "\n\n".join([HEAD.rstrip(), *(_section(title) for title in SECTIONS), _services()])


def _section(title: str) -> str:
    intro = [INTRODUCTIONS[title]] if title in INTRODUCTIONS else []
    return "\n\n".join([f"## {title}", *intro, *map(_entry, SECTIONS[title])])


def _entry(name: str) -> str:
    thing = getattr(falaj, name)
    kind = thing if inspect.isclass(thing) else type(thing)
    parts = [f"### `fj.{name}`"]
    if callable(thing) and thing is not Platform:
        parts.append(block(signature_text(f"fj.{name}", _signature(thing), width=WIDTH)))
    parts.append(NOTES.get(name) or docstring(thing).partition("\n\nOptions\n\n")[0])
    if name == "fit":
        parts.append("[fit.md](fit.md) lists all options, [the runtime](runtime/index.md) explains them.")
    parts += [_members(each) for each in (Platform, JobContext) if kind is each]
    parts += [_result(thing)] if inspect.isfunction(thing) and _dataclass_of(thing) else []
    return "\n\n".join([*parts, block(EXAMPLES[name], "python")])


def _signature(thing: Any) -> inspect.Signature:
    """Return the signature of a function or class; that of a record from its fields."""
    if inspect.isclass(thing) and issubclass(thing, Record):
        kind = inspect.Parameter.KEYWORD_ONLY
        given = [
            inspect.Parameter(
                name,
                kind,
                annotation=field.annotation,
                default=inspect.Parameter.empty if field.is_required() else field.default,
            )
            for name, field in thing.model_fields.items()
        ]
        return inspect.Signature(given)
    found = inspect.signature(thing)
    if inspect.isclass(thing):
        return found.replace(return_annotation=found.empty)
    return found


def signature_text(name: str, signature: inspect.Signature, *, width: int | None = None) -> str:
    """Return a call with its parameters, on one line; with a line for each where it exceeds `width`."""
    given = [each for each in signature.parameters.values() if each.name != "self"]
    pieces = [*_pieces(given)]
    if len(given) > LONG:
        pieces = [*_pieces([each for each in given if each.kind is not each.KEYWORD_ONLY]), "**options"]
    result = signature.return_annotation
    end = "" if result in (signature.empty, None, "None") else f" -> {type_text(result)}"
    line = f"{name}({', '.join(pieces)}){end}"
    if width is None or len(line) <= width:
        return line
    return f"{name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){end}"


def _pieces(given: list[inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters as text, with `*` before the first that must be named."""
    is_marked = False
    for each in given:
        if each.kind is each.KEYWORD_ONLY and not is_marked:
            is_marked = True
            yield "*"
        star = "**" if each.kind is each.VAR_KEYWORD else ""
        kind = "" if each.annotation in (each.empty, "Any") else f": {type_text(each.annotation)}"
        default = "" if each.default is each.empty else f"{' = ' if kind else '='}{_value(each.default)}"
        yield f"{star}{each.name}{kind}{default}"


def _value(default: Any) -> str:
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, timedelta):
        is_days = default == timedelta(days=default.days)
        return (
            f"timedelta(days={default.days})"
            if is_days
            else f"timedelta(seconds={default.total_seconds():g})"
        )
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _members(kind: type) -> str:
    """Return a table of the public methods and properties of a class."""
    rows = []
    for name, member in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        call = name if isinstance(member, property) else signature_text(name, inspect.signature(member))
        rows.append((code(call), first_sentence(member)))
    return table(("member", "what it does"), rows)


def _dataclass_of(function: Any) -> type | None:
    """Return the dataclass that a function returns, if it is one."""
    module = sys.modules[function.__module__]
    found = getattr(module, str(inspect.signature(function).return_annotation), None)
    return found if inspect.isclass(found) and is_dataclass(found) and found is not Platform else None


def _result(function: Any) -> str:
    kind: Any = _dataclass_of(function)
    docs = field_docs(kind)
    rows = [(code(each.name), code(type_text(each.type)), docs.get(each.name, "")) for each in fields(kind)]
    for name, member in vars(kind).items():
        if isinstance(member, property) and member.fget is not None:
            result = inspect.signature(member.fget).return_annotation
            rows.append((code(name), code(type_text(result)), first_sentence(member)))
    return f"`{kind.__name__}`: {docstring(kind)}\n\n" + table(("field", "type", "meaning"), rows)


def _services() -> str:
    """Return the section of all services, with the methods of each."""
    parts = ["## Services", "Each is an attribute of the platform. A parameter after `*` is given by name."]
    for group, kind in service_types().items():
        public = [each for each in operations_of(kind).values() if not each.internal]
        rows = [(code(_method(each)), each.summary) for each in public]
        parts.append(f"### `platform.{group}`\n\n{table(('method', 'what it does'), rows)}")
    return "\n\n".join(parts)


def _method(operation: Operation) -> str:
    bare = [each.replace(annotation=each.empty) for each in operation.parameters.values()]
    return f"{operation.verb}({', '.join(_pieces(bare))})"
