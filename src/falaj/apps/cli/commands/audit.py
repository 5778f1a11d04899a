"""`falaj audit`: export the audit log, and verify it, also offline."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_json

from falaj.apps.cli.files import atomic_file, refuse_overwriting
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.errors import FAILED, MISUSED
from falaj.apps.cli.output.messages import Given, Message, print_message
from falaj.apps.cli.output.progress import Advance, progress
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.governance.audit import verify as verifier
from falaj.records.governance.audit import AuditAcceptance, AuditEntry, ExportLine, LogCheck

PRESENTATION = Presentation(
    columns={AuditEntry: ("seq", "at", "caller", "action", "outcome", "rule", "objects")},
    help={
        "action": "An action, such as blobs.read.",
        "before": "Entries before this one.",
        "caller": "Only calls by this principal.",
        "first": "Begin with this entry.",
        "deep": "Check rows, tables and blobs against the log, too.",
        "outcome": "Only calls with this outcome.",
        "reason": "Why the damage is accepted; it stays in the log.",
        "seq": "The number of the entry.",
    },
)


@PRESENTATION.command("export")
def export(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write; - for standard output.")],
    *,
    first: Annotated[str | None, typer.Option(metavar="SEQ", help="Begin with this entry.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Export the log with its signed heads as JSON lines, for offline verification."""
    given = parsing.parse(all_operations()["audit.export"], {"first": first})
    parsing.check(all_operations()["audit.export"], given)
    if file != "-":
        refuse_overwriting(Path(file), force=force)
    with session.platform() as platform:
        key = platform.audit.key()  # first, so that the export contains this read
        lines = iter(platform.audit.export(**given))
        header = next(lines)
        whole = (header.size or 0) - (header.first or 0)
        with progress("exporting", total=whole, unit="entries") as advance:
            if file == "-":
                _write(sys.stdout.buffer.write, header, lines, advance)
                return
            with atomic_file(Path(file), force=force) as target:
                _write(target.write, header, lines, advance)
    if session.json:
        print(to_json({"file": file, "entries": whole, "public_key": key.ed25519}, indent=2).decode())
        return
    text = f"{file}: {plural(whole, 'entry')} of log {header.log_id}"
    print_message(session, Message(text, (("next", f"audit verify {file} --public-key {key.ed25519}"),)))


@PRESENTATION.command("verify")
def verify(
    session: Session,
    export: Annotated[
        str | None,
        typer.Argument(metavar="EXPORT", help="An export or a proof to verify without a platform."),
    ] = None,
    *,
    public_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="64 hex digits, or a file that holds them.")
    ] = None,
    witness: Annotated[str | None, typer.Option(metavar="FILE", help="Signed heads from a witness.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Check rows, tables and blobs against the log, too.")
    ] = False,
) -> int:
    """Verify the platform's log, or an export of it, against its signed heads."""
    if export is not None:
        if deep:
            raise InvalidInput("--deep checks the stores of a platform, which an export does not have")
        return _verify_offline(export, public_key, witness, as_json=session.json)
    if public_key or witness:
        raise InvalidInput(
            "--public-key and --witness check an export; name its file: falaj audit verify EXPORT"
        )
    with session.platform() as platform:
        check = _followed(platform.audit.verify(deep=deep))
    show(check, as_json=True) if session.json else _print_check(check)
    return 0 if check.ok else FAILED


@PRESENTATION.message("audit.accept")
def _accepted(accepted: AuditAcceptance, _given: Given) -> Message:
    found = plural(len(accepted.problems), "problem")
    return Message(f"{found} accepted; the log is signed again at {plural(accepted.size, 'entry')}")


def _followed(checks: Iterable[LogCheck]) -> LogCheck:
    """Show the progress of a check; return its result."""
    rest = iter(checks)
    check, done = next(rest), 0
    with progress("checking", total=check.of, unit="entries") as advance:
        while not check.finished and not check.checked_bytes:
            advance(check.entries - done)
            done = check.entries
            check = next(rest)
    if check.finished:
        return check
    done = 0
    with progress("hashing blobs", total=check.size_bytes, unit="bytes") as advance:
        while not check.finished:
            advance(check.checked_bytes - done)
            done = check.checked_bytes
            check = next(rest)
    return check


def _write(
    write: Callable[[bytes], Any], header: ExportLine, lines: Iterable[ExportLine], advance: Advance
) -> None:
    write(_line(header))
    for line in lines:
        write(_line(line))
        advance(1 if line.entry is not None else 0)


def _line(line: ExportLine) -> bytes:
    return line.model_dump_json(exclude_none=True).encode() + b"\n"


def _verify_offline(export: str, public_key: str | None, witness: str | None, *, as_json: bool) -> int:
    for where, file in (("EXPORT", export), ("--witness", witness)):
        if file is not None and not os.access(file, os.R_OK):
            raise InvalidInput.at(where, given=file, allowed="a file that can be read")
    if public_key is None or not (
        re.fullmatch("[0-9a-fA-F]{64}", public_key) or os.access(public_key, os.R_OK)
    ):
        raise InvalidInput.at(
            "--public-key",
            given=public_key or "nothing",
            allowed="64 hex digits, or a file with them, from a place that the log's operator cannot write to",
            fix="falaj audit key shows it",
        )
    options = [("--public-key", public_key), ("--witness", witness)]
    words = [*(f"{name}={value}" for name, value in options if value), *(["--json"] if as_json else [])]
    with redirect_stderr(io.StringIO()) as printed:
        status = verifier.main([*words, "--", export])
    if status == MISUSED:
        raise InvalidInput(printed.getvalue().removeprefix("error: ").strip())
    return status


def _print_check(check: LogCheck) -> None:
    verdict = "sound" if check.ok else "DAMAGED"
    print(f"{verdict}: {plural(check.entries, 'entry')}, {plural(check.heads, 'signed head')}")
    for sentence in (*check.problems, *check.notes):
        print(f"  {sentence}")
    if check.unsigned_tail:
        print(f"  {plural(check.unsigned_tail, 'entry')} at the end not signed yet")
