"""`falaj deploy` and `falaj endpoints`: deploy model versions, route requests, infer, and give feedback."""

from __future__ import annotations

import csv
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.endpoints_top import top
from falaj.apps.cli.files import read_text
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.messages import (
    Given,
    Message,
    command_with,
    print_message,
    show_or_tell,
    workspace_prefix,
)
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, Fault, InvalidInput, Unavailable
from falaj.records.control.replicas import ServerReplicas
from falaj.records.registry import TensorSpec
from falaj.records.serving import (
    Datatype,
    DeployedEndpoint,
    EndpointStats,
    FeedbackResult,
    InferenceResult,
    Lookup,
    MeasuredVersion,
    Route,
    ServedRoute,
    ShadowDifference,
    ShadowReport,
    VersionStats,
)
from falaj.sdk.platform import Platform

PRESENTATION = Presentation(lists={"endpoint": "endpoints list"})


STARTS_S = 20.0
"""How long the first deployment waits for the address of the model server."""


MissingRules = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[VIEW:]RULE|FEATURE=NUMBER",
        help="For features that are not known: a number, impute or reject. (default: NaN; may be repeated)",
    ),
]
ImputedValues = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FEATURE=NUMBER",
        help="What --missing impute takes, such as the mean of the training set. (may be repeated)",
    ),
]
LongestAges = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[VIEW=]TIME", help="Older features count as not known, such as 1h. (may be repeated)"
    ),
]


def deploy(
    session: Session,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model version, such as churn@3 or churn@champion.",
            autocompletion=completion_of("model_version"),
        ),
    ],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The endpoint. (default: the name of the model)")
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="VARIANT",
            help="A variant of the version that was accepted for this CPU: auto for the fastest, or a recipe such as "
            "int8. (default: original)",
        ),
    ] = None,
    lookup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VIEW[=KEY,…]",
            help="Look up the features of a view by the inputs KEY. (default: the view's keys; may be repeated)",
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The model's columns in order, if the model does not name them. (may be repeated)",
        ),
    ] = None,
    missing: MissingRules = None,
    impute: ImputedValues = None,
    max_age: LongestAges = None,
    scoring: Annotated[
        str | None, typer.Option(metavar="SCORING", help="How labels are scored: log_loss or squared_error.")
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="The workspace of the endpoint.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="The zone that serves it and stores its predictions.")
    ] = None,
) -> None:
    """Serve all requests of an endpoint with a model version; the endpoint is created on first use."""
    given: dict[str, Any] = {"name": name or model.partition("@")[0].rpartition("/")[2], "model": model}
    typed = (("variant", variant), ("scoring", scoring), ("workspace", workspace), ("zone", zone))
    given |= {name: value for name, value in typed if value}
    if lookup or feature or missing or impute or max_age:
        given["lookup"] = _lookup(lookup or [], feature or [], missing or [], impute or [], max_age or [])
    _deploy(session, given)


def _deploy(session: Session, given: dict[str, Any]) -> None:
    operation = all_operations()["endpoints.deploy"]
    parsing.check(operation, given, command="deploy", spelling={"model": "MODEL", "lookup": "--lookup"})
    with session.platform() as platform:
        made = platform.endpoints.deploy(**given)
        if platform.where.startswith("http"):
            made = _with_address(platform, made)
    show_or_tell(session, made, _deployed(made, given))


@PRESENTATION.command("route")
def route(
    session: Session,
    endpoint: arguments.ENDPOINT,
    routes: Annotated[
        list[str],
        typer.Argument(
            metavar="VERSION=WEIGHT…", help="Such as champion=90 4=10; 0 answers by version only."
        ),
    ],
    *,
    sticky: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="One key, one version: request (its id), header (Falaj-Key), parameter:NAME or input:NAME.",
        ),
    ] = None,
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION=PERCENT",
            help="Send copies of so many percent of the requests to a version that never answers. (may be repeated)",
        ),
    ] = None,
    fallback: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="The version that answers where the chosen one fails."),
    ] = None,
) -> None:
    """Split the requests of an endpoint among versions of its model, by weight.

    Shadows and the fallback are those that are given here; the sticky key stays unless one is given.
    """
    operation = all_operations()["endpoints.route"]
    found = [_route(each) for each in routes] + [_shadow(each) for each in shadow or ()]
    given: dict[str, Any] = {"endpoint": endpoint, "routes": _with_fallback(found, fallback)}
    given |= {} if sticky is None else {"sticky": sticky}
    parsing.check(operation, given, command="endpoints route", spelling={"routes": "VERSION=WEIGHT"})
    with session.platform() as platform:
        made = platform.endpoints.route(**given)
    show_or_tell(session, made, _deployed(made, given))


@PRESENTATION.command("list")
def list_endpoints(
    session: Session,
    *,
    workspace: arguments.OF_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the endpoints of a workspace."""
    typed = {"workspace": workspace, "after": after, "limit": limit}
    show_page(session, "endpoints.list", typed, _show_endpoints, everything=everything)


def _show_endpoints(found: tuple[DeployedEndpoint, ...]) -> None:
    show_rows(
        ["name", "model", "routes", "address", "changed"],
        [
            [each.name, each.model, shares(each), format_value(each.url), format_value(each.changed_at)]
            for each in found
        ],
    )


@PRESENTATION.command("show")
def show_endpoint(session: Session, endpoint: arguments.ENDPOINT) -> None:
    """Show the address and the routes of an endpoint, and versions that cannot be served, with the reason."""
    parsing.check(all_operations()["endpoints.show"], {"endpoint": endpoint})
    with session.platform() as platform:
        found = platform.endpoints.show(endpoint)
    if session.json:
        show(found, as_json=True)
        return
    show_fields(_facts(found))
    if found.problem:
        print(f"\n{found.name} is not served:\n  {format_value(found.problem)}")
    for wrong in (each for each in found.routes if each.problem):
        print(f"\n{found.model}@{wrong.version} is not served:\n  {format_value(wrong.problem)}")


@PRESENTATION.command("stats")
def show_stats(
    session: Session,
    endpoint: arguments.ENDPOINT,
    *,
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="Since then, such as 2026-11-15T08:00:00Z.")
    ] = None,
) -> None:
    """Show requests, errors, latency and scores of each version; the model server reports every few seconds."""
    operation = all_operations()["endpoints.stats"]
    given: dict[str, Any] = {"endpoint": endpoint} | ({"since": since} if since else {})
    parsing.check(operation, given)
    with session.platform() as platform:
        found: EndpointStats = platform.endpoints.stats(**given)
    if session.json:
        show(found, as_json=True)
        return
    if not found.versions:
        words = f"no request for {found.endpoint} is counted yet; the model server reports every few seconds"
        print_message(session, Message(words, (("next", f"endpoints stats {shlex.quote(endpoint)}"),)))
        return
    score = found.scoring.value.replace("_", " ") if found.scoring else "score"
    headings = ["version", "requests", "errors", "rows", "p50 ms", "p99 ms", "labelled", score, "variance"]
    headings += ["not scored"] if any(each.unscored for each in found.versions) else []
    show_rows(headings, [_figures(each)[: len(headings)] for each in found.versions])


@PRESENTATION.command("shadow-report")
def show_shadows(session: Session, endpoint: arguments.ENDPOINT) -> None:
    """Show how the answers of shadows differ from those that were sent, since the routes changed."""
    parsing.check(all_operations()["endpoints.shadow_report"], {"endpoint": endpoint})
    with session.platform() as platform:
        found: ShadowReport = platform.endpoints.shadow_report(endpoint)
    if session.json:
        show(found, as_json=True)
        return
    if not found.differences:
        words = (
            f"nothing is known of shadows of {found.endpoint} yet; the model server reports every few seconds"
        )
        follow = f"endpoints route {shlex.quote(endpoint)} VERSION=100 --shadow VERSION=PERCENT"
        print_message(session, Message(words, () if found.shadows else (("next", follow),)))
        return
    headings = ["shadow", "against", "requests", "errors", "dropped"]
    headings += ["p50 ms", "p99 ms", "against p50", "against p99"]
    show_rows(headings, [_shadow_figures(each) for each in found.differences])
    print()
    headings = ["shadow", "against", "output", "mean difference", "max", "not finite", "classes that differ"]
    show_rows(headings, [row for each in found.differences for row in _output_figures(each)])
    for each in found.differences:
        if each.problem:
            print(printable(f"\n{each.version} failed on {each.errors} requests:\n  {each.problem}"))


def _shadow_figures(each: ShadowDifference) -> list[str]:
    times = (each.p50_ms, each.p99_ms, each.against_p50_ms, each.against_p99_ms)
    counts = [str(figure) for figure in (each.requests, each.errors, each.dropped)]
    return [each.version, each.against, *counts, *map(_figure, times)]


def _output_figures(each: ShadowDifference) -> list[list[str]]:
    return [
        [
            *(each.version, each.against, printable(output.output)),
            _figure(output.mean_difference),
            _figure(output.max_difference if output.values else None),
            str(output.not_finite),
            "-" if output.disagreement is None else f"{output.disagreement:.2%}",
        ]
        for output in each.outputs
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def shares(found: DeployedEndpoint) -> str:
    """Return the routes of an endpoint as shares of its requests."""
    total = sum(each.weight for each in found.routes) or 1
    return ", ".join(
        f"{each.version} shadow of {each.shadow}%"
        if each.shadow
        else f"{each.version} {each.weight / total:.0%}{' (fallback)' if each.fallback else ''}"
        for each in found.routes
    )


def _facts(found: DeployedEndpoint) -> dict[str, str]:
    views = () if found.lookup is None else found.lookup.views
    reads = [f"{view.name or view.view} by {', '.join(view.keys)}" for view in views]
    return {
        "name": found.name,
        "model": found.model,
        "routes": shares(found),
        "sticky": format_value(found.sticky),
        "address": format_value(found.url),
        "gRPC": format_value(found.grpc),
        "looks up": "; ".join(reads) or "-",
        **({} if found.lookup is None else {"missing": _missing_rule(found.lookup)}),
        "settings": _settings(found),
        **{f"{found.model}@{each.version}": _measured(each) for each in found.measured},
        "scoring": format_value(found.scoring),
        "zone": found.zone,
        "label": format_value(found.label),
        "protected": "no" if found.protected is None else f"approval for {found.protected}",
        "not logged": f"{found.unlogged} predictions",
        "changed": format_value(found.changed_at),
        "id": found.id,
    }


def _settings(found: DeployedEndpoint) -> str:
    """Return what an operator has set, as the options that set it."""
    given = found.settings.model_dump(exclude_none=True)
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in given.items()) or "as measured"


def _measured(each: MeasuredVersion) -> str:
    """Return how a version runs, with what was measured."""
    batches = f"batches of {each.batch_rows} rows" if each.batch_rows > 1 else "no batches"
    place = {"event loop": "on the event loop", "threads": "in threads", "process": "in its own process"}
    return (
        f"{each.run_ms:.3g} ms a run, {each.row_ms:.3g} ms a further row; {batches}, {each.instances} at a time "
        f"{place[each.place]}; waits {each.max_queue_ms:g} ms at most"
    )


def _missing_rule(lookup: Lookup) -> str:
    """Return what the endpoint does about features that are not known."""
    others = "NaN" if lookup.missing is None else format_value(lookup.missing)
    defaults = [f"{name}={value:g}" for name, value in lookup.defaults.items()]
    rules = [
        f"{each.name}: {format_value(each.missing)}" for each in lookup.views if each.missing is not None
    ]
    ages = [f"{each.name} after {format_value(each.max_age)}" for each in lookup.views if each.max_age]
    imputed = [f"imputed {name}={value:g}" for name, value in lookup.imputed.items()]
    return ", ".join([*defaults, *rules, others, *ages, *imputed])


def _figures(each: VersionStats) -> list[str]:
    floats = (each.p50_ms, each.p99_ms, each.score_mean, each.score_variance)
    p50, p99, mean, variance = ("-" if figure is None else f"{figure:.4g}" for figure in floats)
    counts = [str(figure) for figure in (each.requests, each.errors, each.rows)]
    return [each.version, *counts, p50, p99, str(each.labelled), mean, variance, str(each.unscored)]


def _lookup(
    views: Sequence[str],
    features: Sequence[str],
    missing: Sequence[str],
    impute: Sequence[str],
    max_age: Sequence[str],
) -> dict[str, Any]:
    """Return what was typed (VIEW, or VIEW=KEY,KEY) as the fields of a Lookup."""
    parted = [text.partition("=") for text in views]
    by_view: dict[str, dict[str, Any]] = {
        view: {"view": view, "keys": keys.split(",") if keys else []} for view, _, keys in parted
    }
    found: dict[str, Any] = {
        "views": [by_view[view] for view, _, _ in parted],
        "features": list(features),
        "defaults": {},
    }
    for text in missing:
        _add_rule(found, by_view, text)
    if impute:
        found["imputed"] = dict(_number_of(text, "--impute") for text in impute)
    for text in max_age:
        view, equals, age = text.rpartition("=")
        for each in [_named_view(by_view, view, text, "--max-age")] if equals else by_view.values():
            each["max_age"] = parsing.parse_duration(age, "--max-age")
    return found


def _add_rule(found: dict[str, Any], by_view: Mapping[str, dict[str, Any]], text: str) -> None:
    """Add what was typed behind --missing: RULE, VIEW:RULE or FEATURE=NUMBER."""
    if "=" in text:
        where, (name, value) = found["defaults"], _number_of(text, "--missing")
    else:
        view, colon, rule = text.rpartition(":")
        where = _named_view(by_view, view, text, "--missing") if colon else found
        name, value = "missing", rule
        if rule not in ("reject", "impute"):
            _require_number(text, rule, "--missing", "[VIEW:]NUMBER, reject or impute, or FEATURE=NUMBER")
    if name in where:
        raise InvalidInput.at(
            "--missing", given=text, allowed="one rule, one for each view, and one default per feature"
        )
    where[name] = value


def _named_view(by_view: Mapping[str, dict[str, Any]], view: str, text: str, option: str) -> dict[str, Any]:
    if view not in by_view:
        allowed = ", ".join(by_view) or "a view of --lookup"
        raise InvalidInput.at(option, given=text, allowed=f"one of the views {allowed}")
    return by_view[view]


def _number_of(text: str, option: str) -> tuple[str, str]:
    feature, _, value = text.rpartition("=")
    _require_number(text, value, option, "FEATURE=NUMBER")
    return feature, value


def _require_number(text: str, value: str, option: str, allowed: str) -> None:
    try:
        finite = isfinite(float(value))
    except ValueError:
        finite = False
    if not finite:
        raise InvalidInput.at(option, given=text, allowed=allowed)


def _route(text: str) -> dict[str, Any]:
    version, _, weight = text.partition("=")
    if weight and not (weight.isascii() and weight.isdigit()):
        fault = Fault(where="VERSION=WEIGHT", given=text, allowed="a whole number behind '='", fix="3=90")
        raise InvalidInput("endpoints route: a route is not valid", faults=[fault])
    return {"version": version, "weight": int(weight) if weight else 100}


def _shadow(text: str) -> dict[str, Any]:
    version, _, share = text.partition("=")
    percent = share.removesuffix("%") or "100"
    if not (percent.isascii() and percent.isdigit() and 1 <= int(percent) <= 100):
        fault = Fault(where="--shadow", given=text, allowed="VERSION=PERCENT, 1 to 100", fix="--shadow 4=10")
        raise InvalidInput("endpoints route: a shadow is not valid", faults=[fault])
    return {"version": version, "weight": 0, "shadow": int(percent)}


def _with_fallback(routes: list[dict[str, Any]], fallback: str | None) -> list[dict[str, Any]]:
    """Return the routes with the fallback marked; one that is not among them is added with weight 0."""
    if fallback is None:
        return routes
    if all(route["version"] != fallback for route in routes):
        return [*routes, {"version": fallback, "weight": 0, "fallback": True}]
    return [route | {"fallback": True} if route["version"] == fallback else route for route in routes]


def _with_address(platform: Platform, made: DeployedEndpoint) -> DeployedEndpoint:
    """Return `made` once its address is known: the first deployment on a running platform starts the model server.

    Unavailable, with the reason, if it does not start: nothing serves the endpoint then.
    """
    if made.url is not None:
        return made
    until = time.monotonic() + STARTS_S
    print("starting the model server …", file=sys.stderr)
    while made.url is None and made.problem is None and time.monotonic() < until:
        time.sleep(0.1)
        made = platform.endpoints.show(made.id)
    if made.url is None:
        why = made.problem or f"the model server did not start within {STARTS_S:.0f} s"
        fault = Fault(where=f"endpoint {made.name}", given=why, fix=f"falaj endpoints show {made.name}")
        raise Unavailable(f"{made.name} is deployed, but nothing serves it yet", faults=[fault])
    return made


DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL", "string": "BYTES"}
"""The types of a signature as the protocol names them; those of integers are the same in upper case."""


@PRESENTATION.command("infer")
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


@PRESENTATION.command("feedback")
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
    show_or_tell(session, made, _scored(made, given))


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


@PRESENTATION.message("endpoints.deploy", "endpoints.route")
def _deployed(made: DeployedEndpoint, given: Given) -> Message:
    shares = ", ".join(f"{made.model}@{each.version} ({_share(each)})" for each in made.routes)
    where = f"\n  at     {made.url}/infer" if made.url else "\n  at     an address that 'falaj up' assigns"
    undo = " ".join(_typed(made.previous))
    named = shlex.quote(str(given.get("endpoint") or f"{workspace_prefix(given)}{made.name}"))
    back = f"endpoints route {named} {undo}" if made.previous else f"endpoints remove {named}"
    return Message(
        f"{made.name} is served by {shares}{where}",
        (("next", f"endpoints stats {named}"), ("undo", back)),
    )


@PRESENTATION.message("endpoints.configure")
def _configured(made: DeployedEndpoint, given: Given) -> Message:
    named = shlex.quote(str(given["endpoint"]))
    return Message(
        f"{made.name} runs with {_settings(made)}",
        (("next", f"endpoints show {named}"), ("reset", f"endpoints configure {named}")),
    )


@PRESENTATION.message("endpoints.restart")
def _restarted(made: ServerReplicas, given: Given) -> Message:
    words = "the replicas of the model server are being replaced, one after the other; no request fails"
    return Message(words, (("next", "endpoints replicas"),))


def _share(route: ServedRoute) -> str:
    if route.shadow:
        return f"shadow of {route.shadow}%"
    return f"{route.weight}, fallback" if route.fallback else str(route.weight)


def _typed(routes: Sequence[Route]) -> list[str]:
    """Return routes as they are typed."""
    words = [f"{each.version}={each.weight}" for each in routes if not each.shadow]
    words += [f"--shadow {each.version}={each.shadow}" for each in routes if each.shadow]
    return words + [f"--fallback {each.version}" for each in routes if each.fallback]


@PRESENTATION.message("endpoints.remove")
def _removed(made: DeployedEndpoint, given: Given) -> Message:
    undo = f"deploy {made.model}@{made.routes[0].version} --name {made.name}"
    return Message(f"{made.name} is removed; its predictions are kept", (("undo", undo),))


@PRESENTATION.message("endpoints.protect")
def _protected(made: DeployedEndpoint, given: Given) -> Message:
    words = f"{made.name} serves only versions that are approved for {made.protected}"
    follow = f"models approve VERSION --alias {made.protected}"
    return Message(
        words, (("next", follow), ("undo", command_with("endpoints unprotect", given["endpoint"])))
    )


@PRESENTATION.message("endpoints.unprotect")
def _released(made: DeployedEndpoint, given: Given) -> Message:
    undo = command_with("endpoints protect", given["endpoint"])
    return Message(f"{made.name} serves any version again", (("undo", undo),))


@PRESENTATION.message("endpoints.feedback")
def _scored(made: FeedbackResult, given: Given) -> Message:
    unknown = f"; {plural(len(made.unknown), 'prediction')} not in the log (yet)" if made.unknown else ""
    unscored = (
        f"; {len(made.unscored)} without a score: no finite number was predicted" if made.unscored else ""
    )
    return Message(
        f"{plural(made.stored, 'label')} stored, {made.replaced} in place of earlier ones{unknown}{unscored}",
        (("next", command_with("endpoints stats", given["endpoint"])),),
    )


PRESENTATION.commands |= {"top": top}
COMMANDS = {"deploy": partial(command, "deploy", deploy)}
