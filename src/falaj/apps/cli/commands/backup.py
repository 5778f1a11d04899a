"""`falaj backup` and `falaj restore`: copy a home while its platform runs, and make one from the copy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.messages import Message, command_with, show_or_tell
from falaj.apps.cli.output.progress import Advance, progress
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session, local_platform
from falaj.assembly.backup.backup import back_up
from falaj.assembly.backup.restore import RestoreOptions, check_backup
from falaj.assembly.backup.restore import restore as restore_home
from falaj.assembly.home import find_home
from falaj.errors import InvalidInput
from falaj.governance.audit.verify import read_key
from falaj.records.backups import BackupResult, RestoreResult
from falaj.records.places import default_config_dir, default_home
from falaj.records.sizes import format_size

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The directory of the backups.")]


def backup(
    session: Session,
    directory: Directory,
    *,
    keys: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Copy the key file here, apart from the data. Else it is left out."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="N", help="Remove all but the N newest backups. Else all of them stay."),
    ] = None,
    zone: Annotated[
        str | None,
        typer.Option(metavar="ZONE", help="The zone that DIR is in. Else that of this machine."),
    ] = None,
) -> int:
    """Copy the platform on this machine into a directory, while it runs; only what is new is copied."""
    path, kept = _home(session), _kept(keep)
    home = find_home(path)
    if home is None:
        raise InvalidInput.at("home", given=str(path), allowed="a directory that holds a platform")
    with local_platform(path) as platform:
        done = back_up(
            platform.platform,
            home,
            Path(directory).absolute(),
            keys=None if keys is None else Path(keys).absolute(),
            watch=_watch,
            keep=kept,
            zone=zone,
        )
    show_or_tell(session, done, _backed_up(done))
    return FAILED if done.missing or done.damaged or done.left_out else 0


def restore(
    session: Session,
    directory: Directory,
    *,
    backup: Annotated[
        str | None, typer.Option(metavar="NAME", help="This backup instead of the newest.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="DIR", help="The directory with the copy of the key file.")
    ] = None,
    public_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The key that signs backups, in hex or in a file, where there is no key file."
        ),
    ] = None,
    keep_tokens: Annotated[
        bool,
        typer.Option("--keep-tokens", help="Leave tokens valid, also those revoked after the backup."),
    ] = False,
    without_damaged: Annotated[
        bool,
        typer.Option("--without-damaged", help="Leave out blobs and rows that are damaged in the backup."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only read the whole backup, and compare it with its manifest.")
    ] = False,
) -> int:
    """Make the home again from a backup; a home that is not empty is never overwritten."""
    source, config_dir = Path(directory).absolute(), default_config_dir().absolute()
    options = RestoreOptions(
        name=backup,
        keys=None if keys is None else Path(keys),
        public_key=None if public_key is None else _public_key(public_key),
        keep_tokens=keep_tokens,
        without_damaged=without_damaged,
    )
    if check:
        found = check_backup(source, config_dir, options=options, watch=_watch)
        show_or_tell(session, found, _checked(found))
        return 0
    done = restore_home(source, _home(session).absolute(), config_dir, options=options, watch=_watch)
    show_or_tell(session, done, _restored(done, keep_tokens=keep_tokens))
    return FAILED if done.left_out or done.not_online else 0


def _home(session: Session) -> Path:
    if session.url:
        raise InvalidInput("this command acts on a home on this machine; --url does not name one")
    return session.home or default_home()


def _kept(text: str | None) -> int | None:
    if text is None or (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        return None if text is None else int(text)
    raise InvalidInput.at("--keep", given=text, allowed="1 to 9999")


def _public_key(given: str) -> str:
    try:
        return read_key(given).hex()
    except (OSError, ValueError):
        raise InvalidInput.at(
            "--public-key",
            given=given,
            allowed="64 hex digits, or a file with them, from elsewhere than the backup",
            fix="falaj audit key shows it",
        ) from None


def _backed_up(done: BackupResult) -> Message:
    lines = [
        f"backup {done.name}: {plural(done.files, 'file')}, {format_size(done.size_bytes)}, "
        f"{plural(done.entries, 'entry')} of the audit log; {format_size(done.copied_bytes)} copied now",
        f"the key file is in {done.keys}"
        if done.keys
        else "the keys are not in it, and nothing can be decrypted without them: --keys DIR copies them elsewhere",
    ]
    if done.freed_bytes:
        lines.append(f"{format_size(done.freed_bytes)} of older backups removed")
    lines += [f"missing on the platform, and so in the backup: {each}" for each in done.missing]
    lines += [f"damaged on the platform, and so in the backup: {each}" for each in done.damaged]
    lines += [f"left out, since it may not lie where the backup does: {each}" for each in done.left_out]
    if done.left_out:
        lines.append("back it up where it may lie, into another directory: --zone ZONE says where that is")
    return Message("\n".join(lines), (("check", command_with("restore", done.directory, "--check")),))


def _checked(found: RestoreResult) -> Message:
    text = f"{found.name} is sound: {plural(found.files, 'file')}, {format_size(found.size_bytes)}"
    if not found.signer_known:
        text += (
            f"\nit is signed by the key {found.public_key}, and nothing here says whether that is the platform's: "
            "--keys DIR or --public-key KEY compares it"
        )
    return Message(text)


def _restored(done: RestoreResult, *, keep_tokens: bool) -> Message:
    lines = [
        f"{done.home} is restored from backup {done.name}: {plural(done.files, 'file')}, "
        f"{plural(done.entries, 'entry')} of the audit log, online values of {plural(done.views, 'view')}"
    ]
    if done.lost_entries:
        lines.append(f"{plural(done.lost_entries, 'entry')} of the audit log after the backup are gone")
    since = f"{done.taken_at:%Y-%m-%d %H:%M:%S} UTC"
    lines.append(
        f"roles, policies and tokens are as they were at {since}"
        + ("" if keep_tokens else "; all tokens have ended, so that none that was revoked works again")
    )
    lines += [f"not in the backup: blobs and tables of zone {each}" for each in done.without_zones]
    lines += [f"damaged in the backup, and left out: {each}" for each in done.left_out]
    lines += [f"not online any more: {each}" for each in done.not_online]
    return Message("\n".join(lines), (("check", "audit verify"), ("next", "up")))


def _watch(what: str, total: int | None) -> AbstractContextManager[Advance]:
    return progress(what, total=total, unit="bytes" if total is not None else "entries")


COMMANDS = {
    "backup": partial(command, "backup", backup),
    "restore": partial(command, "restore", restore),
}
