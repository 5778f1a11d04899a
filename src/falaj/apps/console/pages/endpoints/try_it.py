"""The form that sends one request to an endpoint: made from the signature of its versions, or from its lookup."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nicegui import ui

from falaj.apps.console.components.states import error_card, fact
from falaj.apps.console.components.tables import TableColumn, TableRow, data_table
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import number
from falaj.errors import FalajError, InvalidInput
from falaj.records.registry import ModelVersion
from falaj.records.serving.endpoints import DeployedEndpoint
from falaj.records.serving.predictions import InferenceResult, InferInput
from falaj.records.serving.tensors import Datatype

DATATYPES = {
    "bool": Datatype.BOOL,
    "string": Datatype.BYTES,
    "float16": Datatype.FP16,
    "bfloat16": Datatype.BF16,
    "float32": Datatype.FP32,
    "float64": Datatype.FP64,
    **{
        f"{sign}{bits}": Datatype(f"{sign}{bits}".upper())
        for sign in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
"""The types of the protocol, by those of signatures."""
MOST_FIELDS = 40
"""An input with more columns is one field with all values, separated by commas."""
SHOWN_VALUES = 200


@dataclass(frozen=True)
class TryInput:
    """One input of a request of one row; `columns` has the name of each value that has a field of its own."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    columns: tuple[str, ...]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class TryForm:
    """The fields of a request."""

    inputs: tuple[TryInput, ...]
    versions: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What a version answered."""

    version: str
    prediction: str
    outputs: tuple[tuple[str, str, str], ...]
    """Name, type with shape, and values of each output."""
    notes: tuple[str, ...]


def try_form(endpoint: DeployedEndpoint, version: ModelVersion | None) -> TryForm:
    """Return the form for an endpoint, one of whose versions is `version`."""
    versions = tuple(route.version for route in endpoint.routes if route.problem is None and not route.shadow)
    if endpoint.lookup is not None:
        return TryForm(_lookup_inputs(endpoint, version), versions)
    inputs = [] if version is None else version.inputs
    return TryForm(
        tuple(_input(each.name, each.dtype, each.shape, each.features) for each in inputs), versions
    )


def _input(name: str, dtype: str, shape: Sequence[int], features: Sequence[str]) -> TryInput:
    """Return an input for one row: every dimension of any size is 1."""
    sizes = tuple(1 if size < 1 else size for size in shape) or (1,)
    count = math.prod(sizes)
    columns = tuple(features) if len(features) == count else tuple(f"{name}[{at}]" for at in range(count))
    shown = () if count > MOST_FIELDS else (name,) if count == 1 and not features else columns
    return TryInput(name, DATATYPES.get(dtype, Datatype.FP32), sizes, shown)


def _lookup_inputs(endpoint: DeployedEndpoint, version: ModelVersion | None) -> tuple[TryInput, ...]:
    """Return the keys of the views, and the features that come from the request."""
    lookup = endpoint.lookup
    if lookup is None:
        return ()
    found: dict[str, TryInput] = {}
    looked_up: set[str] = set()
    for view in lookup.views:
        for at, key in enumerate(view.keys):
            kind = view.key_types[at] if at < len(view.key_types) else Datatype.BYTES
            found.setdefault(key, TryInput(key, kind, (1, 1), (key,)))
        prefix = view.name or view.view.rpartition("/")[2].partition("@")[0]
        looked_up |= {f"{prefix}__{feature}" for feature in view.features}
    bare = Counter(feature for view in lookup.views for feature in view.features)
    looked_up |= {feature for feature, views in bare.items() if views == 1}
    computed = {each.name for each in lookup.request_features}
    for of_version in lookup.versions:
        computed |= {each.name for each in of_version.request_features}
    features = lookup.features or (version.inputs[0].features if version and version.inputs else ())
    for name in features:
        if name not in looked_up and name not in computed and name not in found:
            found[name] = TryInput(name, Datatype.FP64, (1, 1), (name,))
    return tuple(found.values())


def infer_inputs(form: TryForm, typed: Sequence[Sequence[str]]) -> tuple[InferInput, ...]:
    """Return the tensors of what was typed: a text for each field of each input, or one with all values."""
    found, faults = [], []
    for each, texts in zip(form.inputs, typed, strict=True):
        words = [*texts] if each.columns else [word.strip() for word in texts[0].split(",") if word.strip()]
        if len(words) != each.values:
            faults.append((each.name, f"{len(words)} values", f"{each.values} values, separated by commas"))
            continue
        values: list[object] = []
        for name, word in zip(each.columns or (each.name,) * len(words), words, strict=True):
            try:
                values.append(
                    _value(word.strip() if each.datatype is not Datatype.BYTES else word, each.datatype)
                )
            except ValueError:
                faults.append((name, word or "nothing", _allowed(each.datatype)))
        found.append(InferInput(name=each.name, shape=each.shape, datatype=each.datatype, data=values))
    if faults:
        where, given, allowed = faults[0]
        raise InvalidInput.at(where, given=given[:100], allowed=allowed)
    return tuple(found)


def _value(word: str, datatype: Datatype) -> object:
    if datatype is Datatype.BYTES:
        return word
    if datatype is Datatype.BOOL:
        if word.lower() not in ("true", "false", "0", "1"):
            raise ValueError
        return word.lower() in ("true", "1")
    if datatype.value.startswith(("INT", "UINT")):
        return int(word)
    value = float(word)
    if not math.isfinite(value):
        raise ValueError
    return value


def _allowed(datatype: Datatype) -> str:
    if datatype is Datatype.BOOL:
        return "true or false"
    return "a whole number" if datatype.value.startswith(("INT", "UINT")) else "a number"


def answer_view(found: InferenceResult) -> Answer:
    """Return what is shown of an answer."""
    notes = []
    if found.fallback_from is not None:
        notes.append(f"version {found.fallback_from} failed ({found.fallback_reason}), so this one answered")
    if found.missing_rows:
        missing = sorted({name for each in found.missing for name in each.features})
        notes.append(f"features without a value: {', '.join(missing)[:300]}")
    if found.feature_age_s is not None:
        notes.append(f"oldest feature: {number(found.feature_age_s)} s")
    return Answer(
        version=found.model_version,
        prediction=found.prediction or "–",
        outputs=tuple(
            (
                each.name,
                f"{each.datatype} {[*each.shape]}",
                json.dumps(each.data[:SHOWN_VALUES])[1:-1] + (" …" if len(each.data) > SHOWN_VALUES else ""),
            )
            for each in found.outputs
        ),
        notes=tuple(notes),
    )


# ------------------------------------------------------------------------------------------- drawing


def draw_form(context: PageContext, endpoint: str, form: TryForm) -> None:
    """Draw the form, and below it what was answered."""
    if not form.inputs:
        ui.label("The versions do not say which inputs they take.").classes("muted")
        return
    fields: list[list[ui.input]] = []
    with ui.element("div").classes("form"):
        for each in form.inputs:
            if each.columns != (each.name,):
                ui.label(f"{each.name}, {each.datatype} {[*each.shape]}").classes(
                    "muted small wrap whole-row"
                )
            default = (
                "" if each.datatype is Datatype.BYTES else "false" if each.datatype is Datatype.BOOL else "0"
            )
            boxes = []
            for name in each.columns or (each.name,):
                text = default if each.columns else ", ".join([default] * each.values)
                label = f"{name}, {each.datatype}" if each.columns == (each.name,) else name
                box = ui.input(label, value=text).props("dense outlined")
                box.props["data-input"] = name
                boxes.append(box if each.columns else box.classes("whole-row"))
            fields.append(boxes)
    with ui.element("div").classes("toolbar gap-above"):
        choices = {"": "as routed", **{version: f"version {version}" for version in form.versions}}
        chosen = ui.select(choices, value="", label="Answered by").props("dense outlined").classes("chooser")
        send = ui.button("Send", icon="send").props("unelevated data-action=endpoints.infer")
    answered = ui.element("div").props("data-part=answer role=status")

    async def press() -> None:
        typed = [[str(box.value or "") for box in boxes] for boxes in fields]
        version = str(chosen.value) or None
        answered.clear()
        with answered:
            try:
                inputs = infer_inputs(form, typed)
                found = await context.ask(
                    lambda p: p.endpoints.infer(endpoint, inputs=inputs, version=version)
                )
            except FalajError as error:
                error_card(error)
                return
            _draw_answer(answer_view(found))

    send.on_click(press)


def _draw_answer(answer: Answer) -> None:
    with ui.element("dl").classes("facts"):
        fact("answered by", f"version {answer.version}")
        fact("prediction", answer.prediction, mono=True)
    columns = [
        TableColumn("name", "Output"),
        TableColumn("type", "Type", "mono"),
        TableColumn("values", "Values", "mono"),
    ]
    rows = [
        TableRow(str(at), {"name": name, "type": kind, "values": values})
        for at, (name, kind, values) in enumerate(answer.outputs)
    ]
    data_table(columns, rows, title="Outputs")
    for note in answer.notes:
        ui.label(note).classes("muted small wrap")
