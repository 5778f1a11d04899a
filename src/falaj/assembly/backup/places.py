"""The places of a home whose files are copied: where they lie, and in which order they are listed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from falaj.assembly import drivers
from falaj.assembly.home import Home
from falaj.errors import ConfigInvalid, Damaged, NotFound
from falaj.ports.blobs import BlobKey, BlobStore
from falaj.records.config import Config

CHUNK_BYTES = 1 << 20
DELTA_LOG = "_delta_log"

METADATA = "metadata"
WORKFLOWS = "workflows"
WITNESS = "witness"
SETTINGS = "home"


class FoundFile(NamedTuple):
    """A file in a place; `stamp` changes when the file does."""

    name: str
    size_bytes: int
    stamp: str


class Place(Protocol):
    """Files that a backup copies, and a restore writes again. `read` raises NotFound for one that has gone.

    A file whose `chunks` raise is not written.
    """

    def files(self) -> Iterator[FoundFile]: ...

    def read(self, name: str) -> Iterator[bytes]: ...

    def write(self, name: str, chunks: Iterable[bytes]) -> None: ...


@dataclass(frozen=True)
class Folder:
    """A folder with all that is in it, or with the files named by `only`."""

    root: Path
    only: tuple[str, ...] | None = None

    def files(self) -> Iterator[FoundFile]:
        """Yield the files; those of Delta logs first, so that all data that a listed log names is listed, too."""
        if self.only is not None:
            yield from (found for name in self.only for found in self._found(self.root / name))
            return
        for in_logs in (True, False):
            for folder, _folders, names in os.walk(self.root):
                if (Path(folder).name == DELTA_LOG) == in_logs:
                    yield from (found for name in sorted(names) for found in self._found(Path(folder, name)))

    def read(self, name: str) -> Iterator[bytes]:
        try:
            with (self.root / name).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except FileNotFoundError:
            raise NotFound(f"{self.root / name} has gone") from None

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        path = self.root / name
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise Damaged(f"the backup names a file outside of {self.root}: {name!r}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _found(self, path: Path) -> Iterator[FoundFile]:
        try:
            facts = path.stat()
        except FileNotFoundError:
            return
        yield FoundFile(path.relative_to(self.root).as_posix(), facts.st_size, str(facts.st_mtime_ns))


@dataclass(frozen=True)
class StoredBlobs:
    """The blobs of one platform in a zone, as they are stored: encrypted."""

    store: BlobStore
    prefix: str

    def files(self) -> Iterator[FoundFile]:
        for blob in self.store.list(self.prefix):
            yield FoundFile(blob.key, blob.size_bytes, blob.modified_at.isoformat())

    def read(self, name: str) -> Iterator[bytes]:
        return self.store.read(BlobKey(name))

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        try:
            found = self.store.size(BlobKey(name))
        except NotFound:
            self.store.write(BlobKey(name), chunks)
            return
        # The store outlived the home, or an earlier restore was interrupted.
        if found != sum(len(chunk) for chunk in chunks):
            raise Damaged(f"blob {name} exists, and has another size than in the backup; remove it")


def data_places(home: Home, config: Config, log_id: str) -> dict[str, Place]:
    """Return the places of blobs and tables."""
    found: dict[str, Place] = {}
    for name, zone in config.zones.items():
        found[blobs_of(name)] = StoredBlobs(drivers.open_blobs(home, name, zone), f"{log_id}/")
        with suppress(ConfigInvalid):  # a zone that has no place for tables has none
            found[tables_of(name)] = Folder(drivers.tables_folder(home, config, name))
    return found


def settings_place(home: Home, config: Config) -> Folder:
    """Return the files of the home that say how it is set up."""
    policies = tuple(str(path.relative_to(home.path)) for path in drivers.policy_files(home, config))
    return Folder(home.path, only=(home.toml.name, "id", home.serving.name, *policies))


def witness_place(home: Home, config: Config) -> Folder:
    path = config.audit.witness or home.witness
    return Folder(path.parent, only=(path.name,))


def blobs_of(zone: str) -> str:
    return f"blobs/{zone}"


def tables_of(zone: str) -> str:
    return f"tables/{zone}"
