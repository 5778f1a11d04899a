"""`falaj doctor`: check the installation and the home, and suggest fixes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import plural, printable
from falaj.apps.cli.session import Session
from falaj.assembly.doctor import examine
from falaj.errors import InvalidInput
from falaj.records.doctor import Finding

COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


REPAIR = Annotated[
    bool,
    typer.Option(
        "--repair", help="Hash all tables, and rebuild online values that are damaged; no platform may run."
    ),
]


def doctor(session: Session, repair: REPAIR = False) -> int:
    """Check the installation and the home, and suggest fixes; exit 1 if a check failed."""
    if session.url:
        raise InvalidInput("doctor checks this machine; --url does not name a home on it")
    findings = _repair(session) if repair else examine(session.home)
    failed = [finding for finding in findings if finding.status == "fail"]
    if session.json:
        show(findings, as_json=True)
    else:
        _print(findings)
        warned = sum(finding.status == "warn" for finding in findings)
        print(f"\n{plural(len(failed), 'failure')}, {plural(warned, 'warning')}")
    return FAILED if failed else 0


def _repair(session: Session) -> list[Finding]:
    from falaj.assembly.doctor.repair import repair  # the checks run also where the platform cannot be loaded

    return repair(session.home)


def _print(findings: list[Finding]) -> None:
    wide = max(len(finding.check) for finding in findings)
    for finding in findings:
        status = typer.style(f"{finding.status:<4}", fg=COLORS[finding.status])
        typer.echo(f"{status}  {finding.check:<{wide}}  {printable(finding.words)}")
        if finding.fix:
            typer.echo(f"{'':<4}  {'':<{wide}}  fix: {printable(finding.fix)}")


COMMANDS = {"doctor": partial(command, "doctor", doctor)}
