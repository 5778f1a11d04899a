"""Uploads the outputs and the log of an attempt. User code wrote the folder: nothing in it is trusted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from falaj.control.services import Services
from falaj.errors import InvalidInput
from falaj.ports.launcher import Launcher
from falaj.records.names import ObjectId
from falaj.records.tracking import ArtifactPath
from falaj.records.training.jobs import JobOutput

CHUNK_BYTES = 1 << 20
MOST_OUTPUTS = 10_000
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FOLDER = FILE | os.O_DIRECTORY
KEEP_FOLDER = "write into the folder FALAJ_OUTPUTS, and do not replace the folder itself"
_path = TypeAdapter(ArtifactPath)


def upload_outputs(
    services: Services,
    folder: Path,
    *,
    workspace: ObjectId,
    sources: tuple[str, ...],
    zone: str | None = None,
) -> tuple[JobOutput, ...]:
    """Upload every regular file below `folder` as a staged blob. Links are not followed."""
    made: list[JobOutput] = []
    for path, handle in output_files(folder):
        with os.fdopen(handle, "rb") as file:
            blob = services.blobs.upload(
                iter(lambda: file.read(CHUNK_BYTES), b""), workspace=workspace, sources=sources, zone=zone
            )
        made.append(JobOutput(path=path, blob=blob.id))
    return tuple(made)


def output_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the path and an open descriptor of each file; InvalidInput if there are too many or one is unreadable."""
    try:
        top = os.open(folder, FOLDER)
    except OSError as error:
        raise _refused(
            "the folder itself", f"a folder that can be read ({error.strerror})", KEEP_FOLDER
        ) from None
    yield from _files_in(top, "", itertools.count(1))


def _files_in(folder: int, above: str, seen: Iterator[int]) -> Iterator[tuple[str, int]]:
    """Yield the files of an open folder, then those of its subfolders, by name; close the folder.

    Names come from user code: entries are counted while they are read, and a path that is too long is refused.
    """
    try:
        found = {entry.name: entry for entry in _counted(folder, seen)}
        for name in sorted(found, key=lambda name: (found[name].is_dir(follow_symlinks=False), name)):
            if found[name].is_file(follow_symlinks=False):
                path = _checked(f"{above}{name}")
                yield path, _opened(name, folder, path, FILE)
            elif found[name].is_dir(follow_symlinks=False):
                path = _checked(f"{above}{name}")
                yield from _files_in(_opened(name, folder, path, FOLDER), f"{path}/", seen)
    finally:
        os.close(folder)


def _counted(folder: int, seen: Iterator[int]) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if next(seen) > MOST_OUTPUTS:
                raise _refused(f"more than {MOST_OUTPUTS} files and folders", "fewer", "pack them")
            yield entry


def _checked(path: str) -> str:
    try:
        path.encode()  # names need not be text
        return _path.validate_python(path)
    except (UnicodeEncodeError, ValidationError):
        shown = path.encode(errors="backslashreplace").decode()
        raise _refused(shown, "plain names, no '\\', and paths of at most 500 characters") from None


def _opened(name: str, folder: int, path: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        allowed = f"files and folders that can be read ({error.strerror})"
        raise _refused(path, allowed, "chmod -R u+rwX the outputs") from None


def _refused(given: str, allowed: str, fix: str | None = None) -> InvalidInput:
    return InvalidInput.at("outputs", given=given, allowed=allowed, fix=fix)


def upload_log(
    services: Services,
    launcher: Launcher,
    attempt: str,
    *,
    workspace: ObjectId,
    sources: tuple[str, ...],
    zone: str | None = None,
) -> ObjectId:
    """Upload the output of the attempt's processes as a staged blob."""

    def pieces() -> Iterator[bytes]:
        offset = 0
        while piece := launcher.log(attempt, offset=offset, limit=CHUNK_BYTES):
            offset += len(piece)
            yield piece

    return services.blobs.upload(pieces(), workspace=workspace, sources=sources, zone=zone).id
