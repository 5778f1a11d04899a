"""`falaj blobs`: upload and download files, and manage blobs."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import chunks, open_input, refuse_overwriting
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import present
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, print_message, workspace_prefix
from falaj.apps.cli.output.progress import Advance, count_bytes, progress
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import AlreadyExists, Damaged, Fault, Interrupted, InvalidInput
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.blobs import Blob
from falaj.records.sizes import format_size
from falaj.sdk.platform import Platform

PRESENTATION = Presentation(
    columns={Blob: ("name", "size_bytes", "zone", "label", "created_at", "committed", "id")},
    help={
        "length": "Read at most so many bytes.",
        "offset": "Begin at this byte.",
        "older_than": "Keep what is younger.",
        "sources": "What the bytes were made from: an id, or kind:name.",
    },
    examples={"sources": "blob:NAME"},
    lists={"blob": "blobs list"},
    creating=frozenset({"put"}),
)


@PRESENTATION.command("put")
def put(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file; - for standard input.")],
    name: arguments.NAME,
    *,
    workspace: arguments.IN_WORKSPACE = None,
    zone: arguments.IN_ZONE = None,
    source: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help=PRESENTATION.help["sources"])
    ] = None,
    only: arguments.ONLY = None,
    classes: arguments.CLASSES = None,
) -> None:
    """Store a file, encrypted, under a name; it gets the label of its sources and its own restrictions."""
    upload, commit = all_operations()["blobs.upload"], all_operations()["blobs.commit"]
    typed = {"workspace": workspace, "zone": zone, "sources": source, "only": only, "classes": classes}
    where = parsing.parse(upload, typed, command="blobs put")
    parsing.check(upload, where | {"data": file}, command="blobs put")
    parsing.check(commit, {"blob": "staged", "name": name}, command="blobs put", spelling={"name": "NAME"})
    total = None if file == "-" or not os.path.isfile(file) else os.path.getsize(file)
    with open_input(file, where="FILE") as pieces, session.platform() as platform:
        with progress(f"storing {name}", total=total, unit="bytes") as advance:
            staged = platform.blobs.upload(count_bytes(pieces, advance), **where)
        stored = _commit(session, platform, staged, name)
    present(session, commit, {"name": name, "workspace": workspace}, stored)


@PRESENTATION.command("get")
def get(
    session: Session,
    blob: Annotated[str, typer.Argument(metavar="BLOB", help="A blob: its name or id.")],
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="The file to write; - for standard output. (default: its name, in this folder)",
        ),
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Download a blob to a file. An interrupted download resumes where it stopped."""
    parsing.check(all_operations()["blobs.read"], {"blob": blob}, command="blobs get")
    with session.platform() as platform:
        found = platform.blobs.show(blob)
        with progress(f"fetching {found.name}", total=found.size_bytes, unit="bytes") as advance:
            if file == "-":
                _to_stdout(platform, found, advance)
                return
            target = _target(file, found)
            refuse_overwriting(target, force=force)
            _download(platform, found, target, advance)
    if session.json:
        show(found, as_json=True)
    else:
        print_message(session, Message(f"{target}: {format_size(found.size_bytes)}, digest verified"))


def _commit(session: Session, platform: Platform, staged: Blob, name: str) -> Blob:
    try:
        return platform.blobs.commit(staged.id, name=name)
    except AlreadyExists as error:
        fix = session.full_command(f"blobs commit {staged.id} --name OTHER")
        fault = Fault(where="NAME", given=name, allowed="a name that is free", fix=fix)
        raise AlreadyExists(f"{error.message}; the bytes are staged for a day", faults=[fault]) from None


def _target(file: str | None, found: Blob) -> Path:
    """Return the file that a download writes: the given one, or the blob's name in the given folder."""
    path = Path(file or ".")
    target = path / Path(found.name).name if path.is_dir() else path
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InvalidInput.at("FILE", given=str(target), allowed="a file in a writable folder")
    return target


def _to_stdout(platform: Platform, found: Blob, advance: Advance) -> None:
    for chunk in count_bytes(_read_on(platform, found, 0), advance):
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def _download(platform: Platform, found: Blob, target: Path, advance: Advance) -> None:
    """Download to a partial file beside `target`, or resume one; rename it once its digest is verified."""
    part = target.with_name(f".{target.name}.{found.id}.part")
    digest = hashlib.sha256()
    held = _hash_part(part, digest, limit=found.size_bytes)
    advance(held)
    try:
        with open(part, "ab") as file:
            file.truncate(held)
            for chunk in count_bytes(_read_on(platform, found, held), advance):
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
    except Interrupted as error:
        raise Interrupted(f"{error.message}; the same command resumes where it stopped") from None
    finally:
        if part.exists() and found.size_bytes and not part.stat().st_size:
            part.unlink()  # refused before the first byte
    if digest.hexdigest() != found.sha256:
        part.unlink()
        raise Damaged(f"the download of {found.name} is damaged: its digest differs; download it again")
    part.replace(target)


def _hash_part(part: Path, digest: Any, *, limit: int) -> int:
    """Return how many bytes of an earlier download can be kept, and add them to `digest`."""
    if not part.exists() or part.stat().st_size > limit:
        return 0
    with open(part, "rb") as file:
        for piece in chunks(file):
            digest.update(piece)
        return file.tell()


def _read_on(platform: Platform, found: Blob, start: int) -> Iterator[bytes]:
    """Yield the bytes from `start` on; an interrupted stream is resumed as long as it makes progress."""
    while start < found.size_bytes:
        before = start
        try:
            for chunk in platform.blobs.read(found.id, offset=start):
                start += len(chunk)
                yield chunk
        except Interrupted:
            if start == before:
                raise
        else:
            return


@PRESENTATION.message("blobs.upload")
def _staged(made: Blob, given: Given) -> Message:
    return Message(
        f"{format_size(made.size_bytes)} staged in zone {made.zone} as {made.id}, deleted in a day unless committed",
        (("next", f"blobs commit {made.id} --name NAME"),),
    )


@PRESENTATION.message("blobs.commit")
def _committed(made: Blob, given: Given) -> Message:
    named = f"{workspace_prefix(given)}{made.name}" if "workspace" in given else made.id
    stored = f"{format_size(made.size_bytes)} in zone {made.zone}, {made.label.describe()}"
    return Message(
        f"blob {made.name} is stored: {stored}\n  sha256 {made.sha256}",
        (("next", f"blobs get {named}"), ("undo", f"blobs delete {named}")),
    )


@PRESENTATION.message("blobs.delete")
def _deleted(made: Blob, given: Given) -> Message:
    return Message(
        f"blob {made.name} is deleted; its {format_size(made.size_bytes)} are freed by the next cleanup",
        (("next", "blobs cleanup --older-than 1m"),),
    )


@PRESENTATION.message("blobs.copy")
def _copying(made: WorkflowRun, given: Given) -> Message:
    return Message(
        f"work {made.id} copies {given['blob']} to zone {given['zone']}",
        (("next", f"workflows watch {made.id}"),),
    )


@PRESENTATION.message("blobs.cleanup")
def _swept(made: Any, given: Given) -> Message:
    return Message(f"{plural(made.removed, 'leftover')} removed")
