"""`falaj endpoints infer` and `feedback`: request predictions by typed values, and record what came true."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import read_text
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.messages import Given, Message, command_with, print_message, show_or_tell
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, InvalidInput
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import DeployedEndpoint
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.predictions import FeedbackResult, InferenceResult
from falaj.records.serving.tensors import Datatype
from falaj.sdk.platform import Platform

DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "string": "BYTES"}
"""The types of a signature as the protocol names them; those of integers are the same in upper case."""


def infer(
    session: Session,
    endpoint: arguments.ENDPOINT,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE,…",
            help="An input: one value per row; or rows of values, such as 1,2,3/4,5,6 for two rows.",
        ),
    ] = None,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="INPUT", help="A tensor of the protocol. (JSON, or @FILE; may be repeated)"
        ),
    ] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Your own id for this request.")] = None,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Send it to this version only.")
    ] = None,
) -> None:
    """Request predictions from an endpoint. For many or large requests, use its URL with a token."""
    operation = all_operations()["endpoints.infer"]
    typed = {"endpoint": endpoint, "inputs": inputs, "request": request, "version": version}
    given = parsing.parse(operation, typed)
    pairs = [_pair(each) for each in values or ()]
    if not pairs and "inputs" not in given:
        raise InvalidInput.at(
            "NAME=VALUE", allowed="an input at least", fix=f"falaj endpoints infer {endpoint} id=1,2"
        )
    with session.platform() as platform:
        if pairs:
            known = _signature(platform, platform.endpoints.show(endpoint), version)
            given["inputs"] = [*given.get("inputs", ()), *(tensor(*pair, known) for pair in pairs)]
        parsing.check(operation, given)
        answer = platform.endpoints.infer(**given)
    session.show(answer, partial(show_answer, inputs=given["inputs"]))
    if not session.json:
        print_notes(answer)
    if not session.json and answer.prediction:
        rows = max((each.shape[0] for each in answer.outputs if each.shape), default=1)
        first = f"{answer.prediction}.0" if rows > 1 else answer.prediction
        follow = (("next", f"endpoints feedback {endpoint} {first}=1"),)
        print_message(session, Message(f"answered by version {answer.model_version}", follow))


def feedback(
    session: Session,
    endpoint: arguments.ENDPOINT,
    outcomes: Annotated[
        list[str] | None,
        typer.Argument(metavar="PREDICTION=VALUE…", help="The ground truth: a number; 0 or 1 for a class."),
    ] = None,
    *,
    predictions: Annotated[
        list[str] | None,
        typer.Option(
            "--prediction",
            metavar="PREDICTION",
            help='{"id": …, "value": …} (JSON, or @FILE; may be repeated)',
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="CSV with the columns id and value; - for standard input."),
    ] = None,
) -> None:
    """Record the ground truth of predictions; it is joined with the predictions, and scored by version."""
    operation = all_operations()["endpoints.feedback"]
    given = parsing.parse(operation, {"endpoint": endpoint, "predictions": predictions})
    labels = [*given.get("predictions", ()), *(_outcome(each) for each in outcomes or ())]
    given["predictions"] = labels + ([] if file is None else _from_csv(file))
    parsing.check(operation, given, spelling={"predictions": "PREDICTION=VALUE"})
    with session.platform() as platform:
        made = platform.endpoints.feedback(**given)
    show_or_tell(session, made, describe_labels(made, given))


def tensor(name: str, text: str, known: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return the tensor that was typed, of the type in the model's signature, else of the type of its values."""
    spec = known.get(name)
    rows = [row.split(",") for row in text.split("/")]
    flat = [value for row in rows for value in row]
    datatype = _guess(flat) if spec is None else DATATYPES.get(spec.dtype, spec.dtype.upper())
    try:
        data = [_number(value, datatype) for value in flat]
    except ValueError:
        raise InvalidInput.at(name, given=text, allowed=f"values of type {datatype}") from None
    deep = len(rows) > 1 or (spec is not None and len(spec.shape) > 1)
    shape = [len(flat)] if not deep else _shape(name, rows, spec)
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def _shape(name: str, rows: Sequence[Sequence[str]], spec: TensorSpec | None) -> list[int]:
    widths = {len(row) for row in rows}
    wide = spec.shape[-1] if spec is not None and spec.shape else -1
    if wide == 1 and len(rows) == 1:
        return [len(rows[0]), 1]
    if len(widths) > 1 or (wide > 0 and widths != {wide}):
        columns = f" ({', '.join(spec.features)})" if spec is not None and spec.features else ""
        allowed = f"{wide} values a row{columns}" if wide > 0 else "as many values in each row"
        raise InvalidInput.at(
            name, given=f"{'/'.join(str(len(row)) for row in rows)} values", allowed=allowed
        )
    return [len(rows), len(rows[0])]


def _guess(values: Sequence[str]) -> str:
    for datatype in ("INT64", "FP64"):
        try:
            [_number(value, datatype) for value in values]
        except ValueError:
            continue
        return datatype
    return "BYTES"


def _number(text: str, datatype: str) -> Any:
    if datatype == "BYTES":
        return text
    if datatype == "BOOL":
        return text.lower() == "true" if text.lower() in ("true", "false") else float(text) != 0
    if "_" in text:  # Python reads 1_7 as 17
        raise ValueError(text)
    return float(text) if datatype.startswith("FP") else int(text)


def _signature(platform: Platform, found: DeployedEndpoint, version: str | None) -> dict[str, TensorSpec]:
    """Return the model's inputs by name, none where the caller may not see them; and the keys of the lookup."""
    chosen = version or max(found.routes, key=lambda each: each.weight).version
    keys = key_inputs(found.lookup)
    try:
        return {each.name: each for each in platform.models.version(f"{found.model}@{chosen}").inputs} | keys
    except FalajError:
        return keys


def key_inputs(lookup: Lookup | None) -> dict[str, TensorSpec]:
    """Return the inputs that are keys, in the types of their views: a text such as 007 is no number."""
    views = () if lookup is None else lookup.views
    kinds = {key: kind for view in views for key, kind in zip(view.keys, view.key_types, strict=False)}
    return {
        key: TensorSpec(name=key, dtype="string" if kind is Datatype.BYTES else "int64", shape=(-1,))
        for key, kind in kinds.items()
    }


def show_answer(answer: InferenceResult, *, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of each output, beside the inputs that have one value per row, such as keys."""
    columns = {each["name"]: each["data"] for each in inputs if len(each["shape"]) == 1}
    for each in answer.outputs:
        width = len(each.data) // each.shape[0] if each.shape and each.shape[0] else 1
        rows = [each.data[at : at + width] for at in range(0, len(each.data), width or 1)]
        keys = {name: values for name, values in columns.items() if len(values) == len(rows)}
        shown = [
            [str(at), *(format_value(values[at]) for values in keys.values()), format_value(row)]
            for at, row in enumerate(rows)
        ]
        show_rows(["row", *map(printable, keys), each.name], shown)


def print_notes(answer: InferenceResult) -> None:
    """Say on stderr why outputs are null or rest on defaults."""
    for gap in answer.missing:
        names = ", ".join(gap.features)
        why = f"{gap.view} has no value for key {gap.key} ({gap.reason.replace('_', ' ')})"
        print(printable(f"row {gap.row}: {names} missing: {why}"), file=sys.stderr)
    listed = len({gap.row for gap in answer.missing})
    if answer.missing_rows > listed:
        print(f"… and {answer.missing_rows - listed} more rows lack features", file=sys.stderr)
    if answer.fallback_from is not None:
        why = f"version {answer.fallback_from} failed ({answer.fallback_reason}); the fallback answered"
        print(printable(why), file=sys.stderr)
    for each in answer.outputs:
        if each.not_finite:
            values = plural(each.not_finite, "value")
            print(printable(f"{values} of {each.name} not finite (NaN or infinite): null"), file=sys.stderr)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise InvalidInput.at(
            "NAME=VALUE", given=text, allowed="a name, '=', and values", fix="customer_id=1,17"
        )
    return name, value


def _outcome(text: str) -> dict[str, Any]:
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise InvalidInput.at(
            "PREDICTION=VALUE", given=text, allowed="the id of a prediction, '=', and a number"
        )
    return {"id": name, "value": value}


def _from_csv(file: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(read_text(file, where="--file").splitlines()))
    if not rows or not {"id", "value"} <= set(rows[0]):
        found = ", ".join(rows[0]) if rows else "no rows"
        raise InvalidInput.at(
            "--file", given=f"{file}: {found}", allowed="rows with the columns id and value"
        )
    return [{"id": row["id"], "value": row["value"]} for row in rows]


def describe_labels(made: FeedbackResult, given: Given) -> Message:
    """Return how many labels were stored and scored."""
    unknown = f"; {plural(len(made.unknown), 'prediction')} not in the log (yet)" if made.unknown else ""
    unscored = (
        f"; {len(made.unscored)} without a score: no finite number was predicted" if made.unscored else ""
    )
    return Message(
        f"{plural(made.stored, 'label')} stored, {made.replaced} in place of earlier ones{unknown}{unscored}",
        (("next", command_with("endpoints stats", given["endpoint"])),),
    )
