"""Removes what user code has left in a folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_tree(folder: Path) -> None:
    """Remove a folder that user code has filled, however deep: links in it are not followed, closed folders are opened.

    Folders are moved up to the top before they are emptied, so neither depth nor open files add up. Nobody is left
    who could put a link in the place of one meanwhile.
    """
    if not folder.exists():
        return
    top = open_folder(folder)
    try:
        while inside := empty_folder(top, into=None):
            for name in inside:
                below = open_folder(name, top)
                try:
                    empty_folder(below, into=top)
                finally:
                    os.close(below)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


def empty_folder(folder: int, *, into: int | None) -> list[str]:
    """Unlink what is no folder in `folder`, and move its folders `into` another; the names of those that stay."""
    staying = []
    for name in os.listdir(folder):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
        elif into is None:
            staying.append(name)
        else:
            os.close(open_folder(name, folder))  # a closed one could not be moved
            os.rename(name, f".{os.urandom(16).hex()}", src_dir_fd=folder, dst_dir_fd=into)
    return staying


def open_folder(folder: str | Path, above: int | None = None) -> int:
    """A descriptor of a folder, in which we may change everything from now on; never of what a link leads to."""
    try:
        found = os.open(folder, OPEN_FLAGS, dir_fd=above)
    except PermissionError:  # closed to its owner, whom we are: by its name, a link would be followed
        closed = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)
        finally:
            os.close(closed)
        return os.open(folder, OPEN_FLAGS, dir_fd=above)
    os.fchmod(found, 0o700)
    return found
