"""Files into the platform and back: `falaj blobs put` and `falaj blobs get`."""

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
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.progress import Advance, count_bytes, progress
from falaj.apps.cli.output.results import show
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import AlreadyExists, Damaged, Fault, Interrupted, InvalidInput
from falaj.records.governance.blobs import Blob
from falaj.records.sizes import format_size
from falaj.sdk.platform import Platform


def put(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file; - for standard input.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help=arguments.HELP["name"])],
    *,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where it belongs.")] = None,
    zone: Annotated[str | None, typer.Option(metavar="ZONE", help="Where its bytes lie.")] = None,
    source: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help=arguments.HELP["sources"])
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ONLY", help=arguments.HELP["only"])] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", metavar="CLASS", help=arguments.HELP["classes"])
    ] = None,
) -> None:
    """Store a file, encrypted, under a name; its restrictions and those of its sources go with it."""
    upload, commit = all_operations()["blobs.upload"], all_operations()["blobs.commit"]
    typed = {"workspace": workspace, "zone": zone, "sources": source, "only": only, "classes": classes}
    where = parsing.parse(upload, typed, command="blobs put")
    parsing.check(upload, where | {"data": file}, command="blobs put")
    parsing.check(commit, {"blob": "staged", "name": name}, command="blobs put", spelling={"name": "NAME"})
    total = None if file == "-" or not os.path.isfile(file) else os.path.getsize(file)
    with open_input(file, where="FILE") as pieces, session.platform() as platform:
        with progress(f"storing {name}", total=total, unit="bytes") as advance:
            staged = platform.blobs.upload(count_bytes(pieces, advance), **where)
        stored = _name_it(session, platform, staged, name)
    present(session, commit, {"name": name, "workspace": workspace}, stored)


def get(
    session: Session,
    blob: Annotated[str, typer.Argument(metavar="BLOB", help="A blob: its name or id.")],
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="Where to; - for standard output. Else its name, here."),
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Fetch a blob into a file. A download that broke off goes on where it stopped."""
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
        print_message(session, Message(f"{target}: {format_size(found.size_bytes)}, its digest checked"))


def _name_it(session: Session, platform: Platform, staged: Blob, name: str) -> Blob:
    try:
        return platform.blobs.commit(staged.id, name=name)
    except AlreadyExists as error:
        fix = session.full_command(f"blobs commit {staged.id} --name OTHER")
        fault = Fault(where="NAME", given=name, allowed="a name that is free", fix=fix)
        raise AlreadyExists(f"{error.message}; the bytes are staged for a day", faults=[fault]) from None


def _target(file: str | None, found: Blob) -> Path:
    """Where a download goes: the file, or the blob's name in the folder."""
    path = Path(file or ".")
    target = path / Path(found.name).name if path.is_dir() else path
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InvalidInput.at("FILE", given=str(target), allowed="a file in a folder that you may write to")
    return target


def _to_stdout(platform: Platform, found: Blob, advance: Advance) -> None:
    for chunk in count_bytes(_read_on(platform, found, 0), advance):
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def _download(platform: Platform, found: Blob, target: Path, advance: Advance) -> None:
    """Fetch into a part beside `target`, go on with one that is there, and publish it when its digest is right."""
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
        raise Interrupted(f"{error.message}; the same command goes on where it stopped") from None
    finally:
        if part.exists() and found.size_bytes and not part.stat().st_size:
            part.unlink()  # refused before the first byte
    if digest.hexdigest() != found.sha256:
        part.unlink()
        raise Damaged(f"what came of {found.name} is not what was stored: its digest differs; fetch it again")
    part.replace(target)


def _hash_part(part: Path, digest: Any, *, limit: int) -> int:
    """How many bytes of an earlier download can be kept; they go into `digest`."""
    if not part.exists() or part.stat().st_size > limit:
        return 0
    with open(part, "rb") as file:
        for piece in chunks(file):
            digest.update(piece)
        return file.tell()


def _read_on(platform: Platform, found: Blob, start: int) -> Iterator[bytes]:
    """The bytes from `start` on; a stream that breaks off is taken up again as long as it moves."""
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


GROUP_COMMANDS = {"put": put, "get": get}
