"""What an attempt leaves behind, uploaded for its owner. User code had the folder: nothing in it is trusted."""

from __future__ import annotations

import os
import platform as machine
import stat
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from falaj.control.platform import Rooms
from falaj.errors import InvalidInput
from falaj.ports.launcher import Launcher
from falaj.records.names import ObjectId
from falaj.records.tracking import ArtifactPath
from falaj.records.training import JobOutput

CHUNK_BYTES = 1 << 20
MOST_OUTPUTS = 10_000
_path = TypeAdapter(ArtifactPath)


def upload_outputs(
    rooms: Rooms, folder: Path, *, workspace: ObjectId, sources: tuple[str, ...]
) -> tuple[JobOutput, ...]:
    """Every regular file below `folder`, as a staged blob under its path there. Links are not followed."""
    made: list[JobOutput] = []
    for path, handle in output_files(folder):
        with os.fdopen(handle, "rb") as file:
            blob = rooms.blob.upload(
                iter(lambda: file.read(CHUNK_BYTES), b""), workspace=workspace, sources=sources
            )
        made.append(JobOutput(path=path, blob=blob.id))
    return tuple(made)


def output_files(folder: Path) -> Iterator[tuple[str, int]]:
    """The path and an open descriptor of each file; InvalidInput if there are too many or one cannot be named."""
    count = 0
    for root, folders, files, root_fd in os.fwalk(folder, follow_symlinks=False):
        folders.sort()
        for name in sorted(files):
            path = Path(root, name).relative_to(folder).as_posix()
            handle = _open_regular(name, root_fd)
            if handle is None:
                continue
            count += 1
            if count > MOST_OUTPUTS:
                os.close(handle)
                raise InvalidInput.at(
                    "outputs", given=f"more than {MOST_OUTPUTS} files", allowed="fewer; pack them"
                )
            try:
                _path.validate_python(path)
            except ValidationError:
                os.close(handle)
                raise InvalidInput.at("outputs", given=path, allowed="plain file names, no '\\\\'") from None
            yield path, handle


def upload_log(
    rooms: Rooms, launcher: Launcher, attempt: str, *, workspace: ObjectId, sources: tuple[str, ...]
) -> ObjectId:
    """What the attempt printed, as a staged blob."""

    def pieces() -> Iterator[bytes]:
        offset = 0
        while piece := launcher.log(attempt, offset=offset, limit=CHUNK_BYTES):
            offset += len(piece)
            yield piece

    return rooms.blob.upload(pieces(), workspace=workspace, sources=sources).id


@cache
def environment() -> str:
    """The interpreter and the packages that jobs run with, one a line."""
    packages = sorted({f"{each.name}=={each.version}" for each in distributions()}, key=str.lower)
    return "\n".join(
        [
            f"# Python {machine.python_version()}",
            f"# {machine.platform()}",
            f"# {sys.executable}",
            *packages,
            "",
        ]
    )


def _open_regular(name: str, folder: int) -> int | None:
    """The file's descriptor; none where it is not a plain file, or cannot be opened."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None
