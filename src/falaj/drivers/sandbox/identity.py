"""Uids for jobs: which one a job gets, what that uid can reach, and how a directory becomes its own."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from falaj.drivers.sandbox.refusals import refused_at


def job_uid(directory: Path, spare_uids: range) -> int:
    """The uid, and gid, of the job in `directory`: the same at each start, and drawn for it alone."""
    digest = hashlib.sha256(os.fsencode(directory.resolve())).digest()
    return spare_uids[int.from_bytes(digest[:8]) % len(spare_uids)]


def become(setpriv: str, uid: int) -> list[str]:
    """The command line that turns root into `uid` for good, dying with its parent."""
    identity = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    rights = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    return [setpriv, *identity, *rights, "--pdeathsig=KILL", "--"]


def hand_over(directory: Path, uid: int) -> None:
    """Make a directory that the platform has just filled the property of `uid`, closed to everyone else.

    Only once: after user code has run there, its links could turn a second walk against the platform. Files
    with further hard links keep their owner, since the same bytes lie elsewhere under another name.
    """
    owner = directory.stat().st_uid
    if owner == uid:
        return
    if owner != os.geteuid():
        raise refused_at(
            str(directory), given=f"owned by uid {owner}", allowed="a directory that the platform made"
        )
    for folder, _, files, folder_fd in os.fwalk(directory, topdown=False):
        for name in files:
            entry = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISREG(entry.st_mode) and entry.st_nlink == 1:
                os.chown(name, uid, uid, dir_fd=folder_fd, follow_symlinks=False)
        if folder != str(directory):
            os.chown(folder_fd, uid, uid)
    directory.chmod(0o700)
    os.chown(directory, uid, uid)


def reached(path: Path, uid: int) -> int:
    """The permission bits (4 read, 2 write, 1 enter) that `uid` has on `path`, by the modes along the way."""
    resolved = path.resolve()
    if all(allowed(parent, uid) & 1 for parent in resolved.parents):
        return allowed(resolved, uid)
    return 0


def allowed(path: Path, uid: int) -> int:
    """The permission bits on `path` itself for a uid in the group of the same number only."""
    entry = path.stat()
    if entry.st_uid == uid:
        return entry.st_mode >> 6 & 7
    if entry.st_gid == uid:
        return entry.st_mode >> 3 & 7
    return entry.st_mode & 7


def readable(path: Path, bits: int) -> bool:
    """Whether the permission `bits` suffice for reading `path`: a folder must also be entered."""
    needed = 5 if path.is_dir() else 4
    return bits & needed == needed
