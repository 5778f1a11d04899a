"""Packs the code of a job into an archive, and unpacks archives without trusting them."""

from __future__ import annotations

import errno
import gzip
import io
import os
import subprocess
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol, cast

from falaj.errors import InvalidInput, TooLarge
from falaj.records.training.jobs import DIFF_CHARACTERS, CodeOrigin

LARGEST_BYTES = 50 * 1024 * 1024
LARGEST_HEAD_BYTES = 1024 * 1024
MOST_FILES = 20_000
DEEPEST = 100
SKIPPED = {".git", "__pycache__", ".venv", ".falaj", "node_modules"}
GIT_SECONDS = 60
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of the machine, not of the archive."""


@dataclass(frozen=True)
class PackedCode:
    """A tar.gz of a script and what lies beside it; `script` is its path in there."""

    archive: bytes
    script: str
    origin: CodeOrigin
    files: int


def pack_code(script: str | Path) -> PackedCode:
    """Pack the script with its code: the files below its folder that git does not ignore; without a repository, the
    Python files of that folder."""
    path = Path(script)
    if not path.is_file():
        allowed = "a Python script that is there"
        raise InvalidInput.at(
            "script", given=str(script), allowed=allowed, fix="falaj train path/to/train.py"
        )
    folder = path.resolve().parent
    name = path.resolve().name
    commit = _git(folder, "rev-parse", "HEAD")
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", ".")
    if listed is None:
        files = [each.name for each in sorted(folder.glob("*.py")) if each.is_file()]
    else:
        files = [each for each in listed.split("\0") if each and _belongs(folder, each)]
    names = sorted({name, *files})
    origin = CodeOrigin(commit=commit and commit.strip(), diff=_diff(folder) if commit else "")
    return PackedCode(archive=_archive(folder, names), script=name, origin=origin, files=len(names))


class ByteReader(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unpack_code(archive: ByteReader, folder: Path) -> None:
    """Unpack `archive` into `folder`. Links, devices and paths that lead out of it are refused."""
    taken = 0
    try:
        with _Unzipped(archive) as zipped, tarfile.open(fileobj=zipped, mode="r:") as tar:
            for count, member in enumerate(_members(tar, zipped), start=1):
                taken += member.size
                if taken > 4 * LARGEST_BYTES or count > MOST_FILES:
                    raise TooLarge(
                        f"the code unpacks to more than {4 * LARGEST_BYTES} bytes or {MOST_FILES} files and folders"
                    )
                _extract(tar, member, folder)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise
        raise InvalidInput.at("code", given=str(error), allowed="a tar.gz of files and folders") from error


class _Unzipped(gzip.GzipFile):
    """The decompressed archive up to `until`: tarfile reads whole headers into memory."""

    def __init__(self, archive: ByteReader) -> None:
        super().__init__(fileobj=cast(IO[bytes], archive), mode="rb")
        self.until = LARGEST_HEAD_BYTES

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or self.tell() + size > self.until:
            raise TooLarge(f"the code's archive has a head of more than {LARGEST_HEAD_BYTES} bytes")
        return super().read(size)


def _members(tar: tarfile.TarFile, zipped: _Unzipped) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        if member.size < 0:
            raise InvalidInput.at("code", given=f"{member.size} bytes", allowed="0 bytes or more")
        zipped.until = zipped.tell() + member.size + tarfile.RECORDSIZE
        yield member
        zipped.until = zipped.tell() + LARGEST_HEAD_BYTES


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    target = folder.joinpath(*_inside(member.name))
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
    elif member.isreg():
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, tar.extractfile(member), executable=bool(member.mode & 0o100))
    else:
        raise InvalidInput.at("code", given=member.name, allowed="files and folders only")


def _inside(name: str) -> Sequence[str]:
    """Return the parts of a relative path; InvalidInput if it leads out of the archive."""
    path = PurePosixPath(name)
    parts = [part for part in path.parts if part != "."]
    if path.is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise InvalidInput.at("code", given=name, allowed="paths inside the archive")
    if len(parts) > DEEPEST:
        raise InvalidInput.at("code", given=name, allowed=f"at most {DEEPEST} folders inside each other")
    return parts


def _write(target: Path, source: IO[bytes] | None, *, executable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o700 if executable else 0o600), "wb") as file:
        while source is not None and (piece := source.read(1 << 20)):
            file.write(piece)


def _archive(folder: Path, names: Iterable[str]) -> bytes:
    """Return the archive of these files; the same files give the same bytes."""
    total, raw = 0, io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for count, name in enumerate(names, start=1):
            path = folder / name
            facts = path.stat()
            total += facts.st_size
            _refuse_large(folder, total, count, name)
            member = tarfile.TarInfo(name)
            member.size, member.mode = facts.st_size, 0o755 if facts.st_mode & 0o100 else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    return raw.getvalue()


def _refuse_large(folder: Path, total: int, count: int, name: str) -> None:
    if total > LARGEST_BYTES or count > MOST_FILES:
        raise TooLarge.at(
            "code",
            given=f"{folder}: more than {total // 2**20} MiB with {name}",
            allowed=f"{LARGEST_BYTES // 2**20} MiB and {MOST_FILES} files",
            fix="have git ignore data and results, or put the script into a folder of its own; data are inputs: "
            "--dataset NAME=blob:NAME",
        )


def _belongs(folder: Path, name: str) -> bool:
    """Return whether the path is a file (git also lists deleted ones) that belongs to the code."""
    path = folder / name
    return path.is_file() and not path.is_symlink() and not SKIPPED & set(PurePosixPath(name).parts)


def _diff(folder: Path) -> str:
    """Return the changes since the commit; files that git does not track are not shown."""
    changed = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".") or ""
    return changed.replace("\0", "")[:DIFF_CHARACTERS]


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None without git, a repository or a commit."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=GIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
