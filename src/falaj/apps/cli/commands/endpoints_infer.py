"""`falaj endpoints infer` and `feedback`, with values as people type them instead of tensors in JSON."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import read_text
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.messages import Message, print_message, result_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, InvalidInput
from falaj.records.registry import TensorSpec
from falaj.records.serving import DeployedEndpoint, InferenceResult
from falaj.sdk.platform import Platform

ENDPOINT = Annotated[str, typer.Argument(metavar="ENDPOINT", help="An endpoint: its name or id.")]
DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "string": "BYTES"}
"""The types of a signature in the words of the protocol; those of whole numbers are the same in capitals."""


def infer(
    session: Session,
    endpoint: ENDPOINT,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE,…",
            help="An input: a value a row; or rows of values, 1,2,3/4,5,6 for two of three.",
        ),
    ] = None,
    *,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="INPUT", help="A tensor of the protocol. (JSON, or @FILE; may be repeated)"
        ),
    ] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Your own name for this request.")] = None,
    version: Annotated[str | None, typer.Option(metavar="VERSION", help="Ask this version only.")] = None,
) -> None:
    """Ask an endpoint for predictions. Small requests; programs in a hurry ask its URL, by the same rights."""
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
    session.show(answer, _show_answer)
    if not session.json and answer.prediction:
        rows = max((each.shape[0] for each in answer.outputs if each.shape), default=1)
        first = f"{answer.prediction}.0" if rows > 1 else answer.prediction
        follow = (("next", f"endpoints feedback {endpoint} {first}=1"),)
        print_message(session, Message(f"answered by version {answer.model_version}", follow))


def feedback(
    session: Session,
    endpoint: ENDPOINT,
    outcomes: Annotated[
        list[str] | None,
        typer.Argument(metavar="PREDICTION=VALUE…", help="What came true: a number; 0 or 1 for a class."),
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
    """Say what came true for predictions; it is joined with what was predicted, and scored by version."""
    operation = all_operations()["endpoints.feedback"]
    given = parsing.parse(operation, {"endpoint": endpoint, "predictions": predictions})
    told = [*given.get("predictions", ()), *(_outcome(each) for each in outcomes or ())]
    given["predictions"] = told + ([] if file is None else _from_csv(file))
    parsing.check(operation, given, spelling={"predictions": "PREDICTION=VALUE"})
    with session.platform() as platform:
        made = platform.endpoints.feedback(**given)
    said = result_message("endpoints.feedback", made, given)
    if session.json or said is None:
        show(made, as_json=session.json)
    else:
        print_message(session, said)


def tensor(name: str, text: str, known: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """The tensor that was typed: of the type that the model says, or of the one that all its values have."""
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
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower()) or float(text) != 0
    return float(text) if datatype.startswith("FP") else int(text)


def _signature(platform: Platform, found: DeployedEndpoint, version: str | None) -> dict[str, TensorSpec]:
    """The model's inputs by name, as far as the caller may see them."""
    asked = version or max(found.routes, key=lambda each: each.weight).version
    try:
        return {each.name: each for each in platform.models.version(f"{found.model}@{asked}").inputs}
    except FalajError:
        return {}


def _show_answer(answer: InferenceResult) -> None:
    for each in answer.outputs:
        width = len(each.data) // each.shape[0] if each.shape and each.shape[0] else 1
        rows = [each.data[at : at + width] for at in range(0, len(each.data), width or 1)]
        show_rows(["row", each.name], [[str(at), format_value(row)] for at, row in enumerate(rows)])


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
