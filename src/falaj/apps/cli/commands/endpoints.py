"""`falaj deploy`, and the endpoints of the model server as people read them."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.endpoints_infer import feedback, infer
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.messages import Message, print_message, result_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Fault, InvalidInput
from falaj.records.serving import DeployedEndpoint, EndpointStats, VersionStats
from falaj.sdk.platform import Platform

STARTS_S = 20.0
"""How long the first deployment waits for the model server to say where it is."""

Endpoint = Annotated[str, typer.Argument(metavar="ENDPOINT", help="An endpoint: its name or id.")]


def deploy(
    session: Session,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model version, such as churn@3.")],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The endpoint. (default: as the model is called)")
    ] = None,
    lookup: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VIEW[=KEY,…]",
            help="Read features of a view by the request's inputs KEY. (default: named like its keys; may be repeated)",
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="The model's columns in their order, if it does not say. (may be repeated)"
        ),
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(metavar="NUMBER", help="Stands for features that are not known. (default: NaN)"),
    ] = None,
    scoring: Annotated[
        str | None, typer.Option(metavar="SCORING", help="How labels are scored: log_loss or squared_error.")
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="WORKSPACE", help="Where the endpoint belongs.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Where it answers and keeps predictions.")
    ] = None,
) -> None:
    """Answer all requests for an endpoint with a model version; the endpoint is made on first use."""
    given: dict[str, Any] = {"name": name or model.partition("@")[0].rpartition("/")[2], "model": model}
    given |= {k: v for k, v in (("scoring", scoring), ("workspace", workspace), ("zone", zone)) if v}
    if lookup or feature or missing:
        given["lookup"] = _lookup(lookup or [], feature or [], missing)
    _deploy(session, given)


def _deploy(session: Session, given: dict[str, Any]) -> None:
    operation = all_operations()["endpoints.deploy"]
    parsing.check(operation, given, command="deploy", spelling={"model": "MODEL", "lookup": "--lookup"})
    with session.platform() as platform:
        made = _with_address(platform, platform.endpoints.deploy(**given))
    if session.json:
        show(made, as_json=True)
    elif (said := result_message("endpoints.deploy", made, given)) is not None:
        print_message(session, said)


def route(
    session: Session,
    endpoint: Endpoint,
    routes: Annotated[
        list[str],
        typer.Argument(metavar="VERSION=WEIGHT…", help="Such as 3=90 4=10; 0 answers by version only."),
    ],
) -> None:
    """Divide the requests of an endpoint among versions of its model, by weight, from now on."""
    operation = all_operations()["endpoints.route"]
    given: dict[str, Any] = {"endpoint": endpoint, "routes": [_route(each) for each in routes]}
    parsing.check(operation, given, command="endpoints route", spelling={"routes": "VERSION=WEIGHT"})
    with session.platform() as platform:
        made = platform.endpoints.route(**given)
    if session.json:
        show(made, as_json=True)
    elif (said := result_message("endpoints.route", made, given)) is not None:
        print_message(session, said)


def list_endpoints(
    session: Session,
    *,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace.")] = None,
    after: Annotated[str, typer.Option(metavar="CURSOR", help="Go on behind this cursor.")] = "",
    limit: Annotated[int, typer.Option(metavar="LIMIT", help="At most so many.")] = 100,
) -> None:
    """The endpoints of a workspace."""
    operation = all_operations()["endpoints.list"]
    given: dict[str, Any] = {"workspace": workspace, "after": after, "limit": limit}
    parsing.check(operation, given)
    with session.platform() as platform:
        found = platform.endpoints.list(**given)
    if session.json or not found.items:
        show(found, as_json=session.json)
        return
    show_rows(
        ["name", "model", "routes", "answers at", "changed"],
        [
            [each.name, each.model, shares(each), format_value(each.url), format_value(each.changed_at)]
            for each in found.items
        ],
    )


def show_endpoint(session: Session, endpoint: Endpoint) -> None:
    """Where an endpoint answers, where its requests go, and which of its versions cannot be served, and why."""
    parsing.check(all_operations()["endpoints.show"], {"endpoint": endpoint})
    with session.platform() as platform:
        found = platform.endpoints.show(endpoint)
    if session.json:
        show(found, as_json=True)
        return
    show_fields(_facts(found))
    for wrong in (each for each in found.routes if each.problem):
        print(f"\n{found.model}@{wrong.version} is not served:\n  {format_value(wrong.problem)}")


def show_stats(
    session: Session,
    endpoint: Endpoint,
    *,
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="Since then, such as 2026-11-15T08:00:00Z.")
    ] = None,
) -> None:
    """Requests, errors, latency and scores of each version; the model server reports every few seconds."""
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
    show_rows(headings, [_figures(each) for each in found.versions])


def shares(found: DeployedEndpoint) -> str:
    """The routes of an endpoint as shares of its requests."""
    total = sum(each.weight for each in found.routes) or 1
    return ", ".join(f"{each.version} {each.weight / total:.0%}" for each in found.routes)


def _facts(found: DeployedEndpoint) -> dict[str, str]:
    views = () if found.lookup is None else found.lookup.views
    reads = [f"{view.name or view.view} by {', '.join(view.keys)}" for view in views]
    return {
        "name": found.name,
        "model": found.model,
        "routes": shares(found),
        "answers at": format_value(found.url),
        "looks up": "; ".join(reads) or "-",
        "scoring": format_value(found.scoring),
        "zone": found.zone,
        "label": format_value(found.label),
        "not logged": f"{found.unlogged} predictions",
        "changed": format_value(found.changed_at),
        "id": found.id,
    }


def _figures(each: VersionStats) -> list[str]:
    floats = (each.p50_ms, each.p99_ms, each.score_mean, each.score_variance)
    p50, p99, mean, variance = ("-" if figure is None else f"{figure:.4g}" for figure in floats)
    counts = [str(figure) for figure in (each.requests, each.errors, each.rows)]
    return [each.version, *counts, p50, p99, str(each.labelled), mean, variance]


def _lookup(views: Sequence[str], features: Sequence[str], missing: str | None) -> dict[str, Any]:
    """What was typed, as a Lookup: VIEW, or VIEW=KEY,KEY."""
    parted = [text.partition("=") for text in views]
    found: dict[str, Any] = {
        "views": [{"view": view, "keys": keys.split(",") if keys else []} for view, _, keys in parted],
        "features": list(features),
    }
    return found if missing is None else found | {"missing": missing}


def _route(text: str) -> dict[str, Any]:
    version, _, weight = text.partition("=")
    if weight and not (weight.isascii() and weight.isdigit()):
        fault = Fault(where="VERSION=WEIGHT", given=text, allowed="a whole number behind '='", fix="3=90")
        raise InvalidInput("endpoints route: a route is not valid", faults=[fault])
    return {"version": version, "weight": int(weight) if weight else 100}


def _with_address(platform: Platform, made: DeployedEndpoint) -> DeployedEndpoint:
    """`made` once its address is known: the first deployment on a running platform starts the model server."""
    if made.url is not None or not platform.where.startswith("http"):
        return made
    until = time.monotonic() + STARTS_S
    print("starting the model server …", file=sys.stderr)
    while made.url is None and time.monotonic() < until:
        time.sleep(0.1)
        made = platform.endpoints.show(made.id)
    return made


GROUP_COMMANDS = {
    "list": list_endpoints,
    "show": show_endpoint,
    "route": route,
    "stats": show_stats,
    "infer": infer,
    "feedback": feedback,
}
COMMANDS = {"deploy": partial(command, "deploy", deploy)}
