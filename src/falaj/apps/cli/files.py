"""Reads and writes the files of commands: clear errors, and atomic writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from falaj.errors import Conflict, InvalidInput

CHUNK_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 20


@contextmanager
def open_input(given: str, *, where: str) -> Iterator[Iterator[bytes]]:
    """Yield the bytes of the file `given`, or of standard input for `-`, in chunks."""
    if given == "-":
        yield chunks(sys.stdin.buffer)
        return
    try:
        file = open(given, "rb")  # noqa: SIM115 - only the opening is translated
        file.peek(1)
    except OSError as error:
        raise unreadable(where, given, error) from None
    with file:
        yield chunks(file)


def read_text(given: str, *, where: str) -> str:
    """Return the text of the file `given`, or of standard input for `-`."""
    with open_input(given, where=where) as pieces:
        raw = bytearray()
        for piece in pieces:
            raw += piece
            if len(raw) > MAX_TEXT_BYTES:
                raise InvalidInput.at(where, given=given, allowed="a text of at most 1 MiB")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InvalidInput.at(where, given=given, allowed="text in UTF-8") from None
    if not text.strip():
        raise InvalidInput.at(where, given=f"{given}, which is empty", allowed="a file that is not empty")
    return text


@contextmanager
def atomic_file(path: Path, *, force: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file to write to; it replaces `path` if the block succeeds, and is removed otherwise."""
    refuse_overwriting(path, force=force)
    if path.exists() and not path.is_file():  # a device or a pipe must not be replaced
        with _created(path, path) as file:
            yield file
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _created(draft, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def output(given: str | None) -> Iterator[IO[bytes]]:
    """Yield the file `given`, or standard output unless that is a terminal."""
    if given and given != "-":
        with atomic_file(Path(given)) as file:
            yield file
        return
    if given is None and sys.stdout.isatty():
        raise InvalidInput("the result is binary, and standard output is a terminal; give --output FILE")
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def refuse_overwriting(path: Path, *, force: bool) -> None:
    """Raise Conflict if `path` exists, unless `force`."""
    if path.exists() and not force:
        raise Conflict(f"{path} exists; --force replaces it")


def unreadable(where: str, given: str, error: OSError) -> InvalidInput:
    return InvalidInput.at(where, given=given, allowed=f"a readable file ({error.strerror})")


def _created(draft: Path, path: Path) -> IO[bytes]:
    try:
        return open(draft, "wb")
    except OSError as error:
        raise InvalidInput.at(
            "FILE", given=str(path), allowed=f"a writable file ({error.strerror})"
        ) from None


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece
