"""`falaj endpoints`: list and show endpoints, their statistics and shadows, and say what has changed."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.endpoints_deploy import describe_deployed, route
from falaj.apps.cli.commands.endpoints_infer import describe_labels, feedback, infer
from falaj.apps.cli.commands.endpoints_top import top
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.control.replicas import ServerReplicas
from falaj.records.serving.endpoints import DeployedEndpoint
from falaj.records.serving.lookups import Lookup
from falaj.records.serving.settings import MeasuredVersion
from falaj.records.serving.shadows import ShadowDifference, ShadowReport
from falaj.records.serving.statistics import EndpointStats, VersionStats

PRESENTATION = Presentation(lists={"endpoint": "endpoints list"})


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
        **({} if found.lookup is None else _lookup_facts(found.lookup)),
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


def _lookup_facts(lookup: Lookup) -> dict[str, str]:
    """Return what the endpoint computes, and what it does about features that are not known."""
    facts = {
        f"computes for {each.version}": "; ".join(
            f"{made.name} = {made.expression}" for made in each.request_features
        )
        for each in lookup.versions
        if each.request_features
    }
    facts["missing"] = _missing_rule(lookup)
    for each in lookup.versions:
        if values := ", ".join(f"{name}={value:.6g}" for name, value in each.imputed.items()):
            facts[f"imputes for {each.version}"] = f"{values} (typical of {each.source})"
    return facts


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


PRESENTATION.commands |= {"route": route, "infer": infer, "feedback": feedback, "top": top}
PRESENTATION.messages |= {
    "endpoints.deploy": describe_deployed,
    "endpoints.route": describe_deployed,
    "endpoints.feedback": describe_labels,
}
