"""`falaj models card`, `bom`, `diff`, `alias` and `check-gates`: what is known of versions and of aliases."""

from __future__ import annotations

import json
from datetime import UTC, datetime, time
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_exact, format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.records.models.cards import FactChange, ModelCard, VersionDiff
from falaj.records.models.gates import GateCheckReport, PromotionEvidence
from falaj.records.registry import AliasState

FORMATS = ("md", "json")
VERSION = Annotated[
    str, typer.Argument(metavar="VERSION", help="A model version, such as churn@3 or churn@champion.")
]


def card(
    session: Session,
    version: VERSION,
    *,
    as_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="md or json.")] = "md",
) -> None:
    """Print the model card of a version: as Markdown, or all of its facts as JSON."""
    _check("models.card", {"model": version})
    if as_format not in FORMATS:
        allowed = " or ".join(FORMATS)
        raise InvalidInput.at("--format", given=as_format, allowed=allowed, fix="--format md")
    with session.platform() as platform:
        found = platform.models.card(version)
    if as_format == "json":
        show(found, as_json=True)
    else:
        session.show(found, _print_card)


def _print_card(found: ModelCard) -> None:
    print("\n".join(printable(line) for line in found.markdown.splitlines()))


def bom(session: Session, version: VERSION) -> None:
    """Print the bill of materials of a version: a CycloneDX 1.6 document."""
    _check("models.bom", {"model": version})
    with session.platform() as platform:
        found = platform.models.bom(version)
    print(json.dumps(found.document, indent=2))


def diff(
    session: Session,
    version: VERSION,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The version to compare it with.")],
) -> None:
    """Compare two versions in all that is known of them: what differs, and the metrics of both."""
    _check("models.diff", {"model": version, "other": other})
    with session.platform() as platform:
        found = platform.models.diff(version, other)
    session.show(found, _show_diff)


def _show_diff(found: VersionDiff) -> None:
    heads = ["", found.before, found.after]
    sections: list[tuple[str, tuple[FactChange, ...]]] = [
        ("fact", found.facts),
        ("file", found.files),
        ("tensor", found.signature),
        ("parameter", found.params),
        ("package", found.packages),
        ("environment", found.environment),
    ]
    printed = 0
    if found.metrics:
        rows = [
            [each.name, _number(each.before), _number(each.after), _signed(each.difference)]
            for each in found.metrics
        ]
        show_rows(["metric", *heads[1:], "difference"], rows)
        printed += 1
    for title, changes in sections:
        if changes:
            print("\n" * bool(printed), end="")
            rows = [[each.name, each.before or "-", each.after or "-"] for each in changes]
            show_rows([title, *heads[1:]], rows)
            printed += 1
    if found.card:
        print("\n" * bool(printed), end="")
        print("\n".join(printable(line) for line in found.card))
    elif not printed:
        print(f"{found.before} and {found.after} do not differ")


def _number(value: float | None) -> str:
    return "-" if value is None else format_exact(value)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.6g}"


def alias(
    session: Session,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model: its name or id.", autocompletion=completion_of("model")
        ),
    ],
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias, such as champion.")],
    *,
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Then, not now: 2026-05-03 is the end of that day, in UTC."),
    ] = None,
) -> None:
    """Show where an alias points, or pointed at a time: since when, by whom, and on which evidence."""
    given: dict[str, Any] = {"model": model, "alias": alias, "at": _moment(at)}
    _check("models.alias", given)
    with session.platform() as platform:
        found = platform.models.alias(model, alias, at=given["at"])
    session.show(found, _show_alias)


def _moment(text: str | None) -> datetime | None:
    """Return a moment; without an offset it is in UTC, and a day stands for its end."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        allowed = "a day like 2026-05-03, or a moment like 2026-05-03T12:00Z"
        raise InvalidInput.at("--at", given=text, allowed=allowed, fix="--at 2026-05-03") from None
    if len(text) <= len("2026-05-03"):
        return datetime.combine(found.date(), time.max, tzinfo=UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _show_alias(found: AliasState) -> None:
    fields = {
        "model": found.model,
        "alias": found.alias,
        "at": format_value(found.at),
        "version": found.version or "none",
    }
    change = found.change
    if change is not None:
        fields |= {"since": format_value(change.at), "by": change.by, "move": change.move.value}
        fields |= {"previous": change.previous or "-"}
        fields |= {} if change.evidence is None else _evidence(change.evidence)
    show_fields(fields)


def _evidence(found: PromotionEvidence) -> dict[str, str]:
    gates = [f"{each.gate} ({'passed' if each.passed else 'waived'}: {each.value})" for each in found.gates]
    sources = [source.describe() for each in found.gates for source in each.sources]
    return {
        "approved by": ", ".join(found.approved_by) or "-",
        "gates": "; ".join(gates) or "none",
        "metrics": "; ".join(dict.fromkeys(sources)) or "-",
        "waived": "; ".join(f"by {each.by}: {each.reason}" for each in found.waivers) or "-",
        "label": found.label.describe(),
        "manifest": f"sha256 {found.manifest_sha256}",
        "card": f"sha256 {found.card_sha256}",
    }


def check_gates(
    session: Session,
    version: VERSION,
    *,
    alias: Annotated[str, typer.Option(metavar="ALIAS", help="The alias whose gates are checked.")],
) -> int:
    """Check whether a version passes the gates of an alias; exit 1 if it does not."""
    _check("models.check_gates", {"model": version, "alias": alias})
    with session.platform() as platform:
        found = platform.models.check_gates(version, alias=alias)
    session.show(found, _show_gates)
    return 0 if found.passed else 1


def _show_gates(found: GateCheckReport) -> None:
    if not found.results:
        print(f"{found.alias} has no gates")
        return
    verdicts = {True: "passed", False: "failed"}
    rows = [
        [each.gate, "waived" if each.waived else verdicts[each.passed], each.value, each.allowed]
        for each in found.results
    ]
    show_rows(["gate", "result", "value", "allowed"], rows)
    for source in dict.fromkeys(source for each in found.results for source in each.sources):
        print(f"  metric {printable(source.describe())}")
    for each in found.results:
        if each.refuses and each.fix:
            print(f"  fix    {printable(each.fix)}")


def _check(operation: str, given: dict[str, Any]) -> None:
    parsing.check(all_operations()[operation], given)
