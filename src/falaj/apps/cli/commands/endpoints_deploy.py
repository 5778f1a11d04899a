"""`falaj deploy` and `falaj endpoints route`: which versions of a model answer, and from which features."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.messages import Given, Message, show_or_tell, workspace_prefix
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Fault, InvalidInput, Unavailable
from falaj.records.serving.endpoints import DeployedEndpoint, Route, ServedRoute
from falaj.sdk.platform import Platform

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
        help="What --missing impute takes. (default: typical of the training set or view; may be repeated)",
    ),
]
RequestFeatures = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=EXPRESSION",
        help="A feature computed from inputs and features. (default: those of the training set; may be repeated)",
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
    request_feature: RequestFeatures = None,
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
    if lookup or feature or missing or impute or max_age or request_feature:
        given["lookup"] = _lookup(lookup or [], feature or [], missing or [], impute or [], max_age or [])
        if request_feature:
            given["lookup"]["request_features"] = parsing.parse_request_features(request_feature)
    _deploy(session, given)


def _deploy(session: Session, given: dict[str, Any]) -> None:
    operation = all_operations()["endpoints.deploy"]
    parsing.check(operation, given, command="deploy", spelling={"model": "MODEL", "lookup": "--lookup"})
    with session.platform() as platform:
        made = platform.endpoints.deploy(**given)
        if platform.where.startswith("http"):
            made = _with_address(platform, made)
    show_or_tell(session, made, describe_deployed(made, given))


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
    show_or_tell(session, made, describe_deployed(made, given))


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


def describe_deployed(made: DeployedEndpoint, given: Given) -> Message:
    """Return which versions answer, where, and how to go back."""
    shares = ", ".join(f"{made.model}@{each.version} ({_share(each)})" for each in made.routes)
    where = f"\n  at     {made.url}/infer" if made.url else "\n  at     an address that 'falaj up' assigns"
    undo = " ".join(_typed(made.previous))
    named = shlex.quote(str(given.get("endpoint") or f"{workspace_prefix(given)}{made.name}"))
    back = f"endpoints route {named} {undo}" if made.previous else f"endpoints remove {named}"
    return Message(
        f"{made.name} is served by {shares}{where}",
        (("next", f"endpoints stats {named}"), ("undo", back)),
    )


def _share(route: ServedRoute) -> str:
    if route.shadow:
        return f"shadow of {route.shadow}%"
    return f"{route.weight}, fallback" if route.fallback else str(route.weight)


def _typed(routes: Sequence[Route]) -> list[str]:
    """Return routes as they are typed."""
    words = [f"{each.version}={each.weight}" for each in routes if not each.shadow]
    words += [f"--shadow {each.version}={each.shadow}" for each in routes if each.shadow]
    return words + [f"--fallback {each.version}" for each in routes if each.fallback]


COMMANDS = {"deploy": partial(command, "deploy", deploy)}
