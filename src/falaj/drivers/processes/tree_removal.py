"""Removes folders that user code has filled."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def remove_tree(folder: Path) -> None:
    """Remove `folder`, however deep it is. Links are not followed, and folders without permissions are opened.

    Folders are moved up to the top before they are emptied, so that the number of open files does not grow with the
    depth. The user's processes have ended, so that nobody can replace a folder by a link meanwhile.
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
    """Unlink all files in `folder`, move its folders `into` another one, and return the names that remain."""
    staying = []
    for name in os.listdir(folder):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
        elif into is None:
            staying.append(name)
        else:
            os.close(open_folder(name, folder))  # one without permissions could not be moved
            os.rename(name, f".{os.urandom(16).hex()}", src_dir_fd=folder, dst_dir_fd=into)
    return staying


def open_folder(folder: str | Path, above: int | None = None, *, needed: int = stat.S_IRWXU) -> int:
    """Return a descriptor of a folder of ours, whose owner has at least the permissions `needed` then.

    Never follow a link.
    """
    try:
        found = os.open(folder, OPEN_FLAGS, dir_fd=above)
    except PermissionError:  # not even readable; chmod by name would follow a link
        closed = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)
        finally:
            os.close(closed)
        return os.open(folder, OPEN_FLAGS, dir_fd=above)
    status = os.fstat(found)
    if status.st_uid == os.geteuid() and status.st_mode & needed != needed:
        os.fchmod(found, 0o700)
    return found
