"""Packs the code of a job into an archive, and unpacks archives without trusting them."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import subprocess
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol, cast

from falaj.errors import InvalidInput, TooLarge
from falaj.ports.parsers import ByteSource, Parsed, ParserPool
from falaj.records.training.jobs import DIFF_CHARACTERS, CodeOrigin

CODE = "code"
"""The name of the parser, see assembly/parsing.py."""
LARGEST_BYTES = 50 * 1024 * 1024
LARGEST_HEAD_BYTES = 1024 * 1024
MOST_FILES = 20_000
DEEPEST = 100
LONGEST_NAME = 255
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


class CodeFile(NamedTuple):
    """A file of an archive, or a folder, which has no content."""

    path: str
    executable: bool
    content: bytes | None


def parse_code(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """The parser of code archives, see ports/parsers.py: a list of the files, and then their contents."""
    (source,) = sources
    listed, content = [], bytearray()
    for file in read_archive(io.BytesIO(source.read_range(0, source.size_bytes))):
        listed.append([file.path, file.executable, None if file.content is None else len(file.content)])
        content += file.content or b""
    listing = json.dumps(listed).encode()
    return Parsed({"listing_bytes": len(listing)}, listing + content)


def unpack_code(archive: bytes, folder: Path, parsers: ParserPool, *, owner: str) -> None:
    """Unpack `archive`, which the parser process reads, into `folder`. InvalidInput unless all of it is in order."""
    source = ByteSource(len(archive), lambda offset, length: archive[offset : offset + length])
    write_code(parsers.parse(CODE, [source], owner=owner, reserve=_require_moderate), folder)


def write_code(parsed: Parsed, folder: Path) -> None:
    """Write what `parse_code` found. Its paths are checked once more: its process could have been taken over."""
    content = memoryview(parsed.content)
    place = int(parsed.facts["listing_bytes"])
    for path, executable, size in json.loads(bytes(content[:place])):
        target = folder.joinpath(*_inside(path))
        if size is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, content[place : place + size], executable=bool(executable))
        place += size


def read_archive(archive: ByteReader) -> Iterator[CodeFile]:
    """Read the files of an archive. Links, devices and paths that lead out of it are refused."""
    taken, paths = 0, _Paths()
    try:
        with _Unzipped(archive) as zipped, tarfile.open(fileobj=zipped, mode="r:") as tar:
            for count, member in enumerate(_members(tar, zipped), start=1):
                taken += member.size
                if taken > 4 * LARGEST_BYTES or count > MOST_FILES:
                    raise TooLarge(
                        f"the code unpacks to more than {4 * LARGEST_BYTES} bytes or {MOST_FILES} files and folders"
                    )
                paths.add(member)
                yield _read(tar, member)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno in SHORTAGES:
            raise
        raise InvalidInput.at("code", given=str(error), allowed="a tar.gz of files and folders") from error


class _Unzipped(gzip.GzipFile):
    """The decompressed archive up to `until`: tarfile reads whole headers into memory. `last` is what it read last."""

    def __init__(self, archive: ByteReader) -> None:
        super().__init__(fileobj=cast(IO[bytes], archive), mode="rb")
        self.until = LARGEST_HEAD_BYTES
        self.last = b""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0 or self.tell() + size > self.until:
            raise TooLarge(f"the code's archive has a head of more than {LARGEST_HEAD_BYTES} bytes")
        self.last = super().read(size)
        return self.last


def _members(tar: tarfile.TarFile, zipped: _Unzipped) -> Iterator[tarfile.TarInfo]:
    # tarfile takes a header that it does not understand for the end; at the beginning it goes on behind it.
    if tar.firstmember is None:  # type: ignore[attr-defined]
        _require_end(zipped)
    while (member := tar.next()) is not None:
        if member.size < 0:
            raise InvalidInput.at("code", given=f"{member.size} bytes", allowed="0 bytes or more")
        zipped.until = zipped.tell() + member.size + tarfile.RECORDSIZE
        yield member
        zipped.until = zipped.tell() + LARGEST_HEAD_BYTES
    _require_end(zipped)


def _require_end(zipped: _Unzipped) -> None:
    if zipped.last.strip(b"\0"):
        raise tarfile.ReadError("a header that cannot be read")


class _Paths:
    """The paths of an archive. None is there twice, also without regard to case: one would be lost."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: dict[str, str] = {"": ""}

    def add(self, member: tarfile.TarInfo) -> None:
        """Raise InvalidInput if the path is there, or below a file."""
        parts = _inside(member.name)
        path = "/".join(parts)
        above = ["/".join(parts[:count]).casefold() for count in range(1, len(parts))]
        if not self._files.isdisjoint([*above, path.casefold()]):
            raise _not_once(member)
        for folder in above:
            self._folders.setdefault(folder, "")
        known = self._folders.get(path.casefold())
        if member.isdir() and known in (None, "", path):
            self._folders[path.casefold()] = path
        elif known is not None:
            raise _not_once(member)
        else:
            self._files.add(path.casefold())


def _not_once(member: tarfile.TarInfo) -> InvalidInput:
    allowed = "each path once, also without regard to case, and none below a file"
    return InvalidInput.at("code", given=member.name, allowed=allowed)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> CodeFile:
    path = "/".join(_inside(member.name))
    if member.isdir():
        return CodeFile(path, False, None)
    source = tar.extractfile(member) if member.isreg() else None
    if source is None:
        raise InvalidInput.at("code", given=member.name, allowed="files and folders only")
    return CodeFile(path, bool(member.mode & 0o100), source.read())


def _inside(name: str) -> Sequence[str]:
    """Return the parts of a relative path; InvalidInput if it leads out of the archive."""
    path = PurePosixPath(name)
    parts = [part for part in path.parts if part != "."]
    if path.is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise InvalidInput.at("code", given=name, allowed="paths inside the archive")
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
        raise InvalidInput.at("code", given=name, allowed=f"names of at most {LONGEST_NAME} bytes")
    if len(parts) > DEEPEST:
        raise InvalidInput.at("code", given=name, allowed=f"at most {DEEPEST} folders inside each other")
    return parts


def _write(target: Path, content: memoryview, *, executable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(target, flags, 0o700 if executable else 0o600), "wb") as file:
        file.write(content)


def _require_moderate(size_bytes: int) -> None:
    """Refuse a result that no archive within the limits has."""
    if size_bytes > 5 * LARGEST_BYTES:
        raise TooLarge(f"the code unpacks to more than {4 * LARGEST_BYTES} bytes")


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
