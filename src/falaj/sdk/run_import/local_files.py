"""Files of runs in a folder of this machine: what is in it, and nothing that a link leads to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from falaj.errors import InvalidInput
from falaj.sdk.run_import.source import SourceFile, SourceNotes

CHUNK_BYTES = 1 << 20


def list_files(folder: Path, notes: SourceNotes) -> list[SourceFile]:
    """Return the regular files in a folder by path; links and devices are noted, and left out."""
    found: list[SourceFile] = []
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    path = Path(entry.path).relative_to(folder).as_posix()
                    found.append(SourceFile(path, entry.stat(follow_symlinks=False).st_size))
                else:
                    notes.add("links and devices among artifacts, which are not followed", entry.path)
    return sorted(found)


def read_file(folder: Path, path: str) -> Iterator[bytes]:
    """Yield the bytes of a file that `list_files` found; a link that has taken its place is refused."""
    try:
        handle = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidInput.at(
            str(folder / path), given=error.strerror, allowed="a file that can be read"
        ) from None
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise InvalidInput.at(str(folder / path), given="no regular file", allowed="a regular file")
        while piece := file.read(CHUNK_BYTES):
            yield piece
