"""The directory of backups: files by their SHA-256, shared by all backups, and one signed manifest for each."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from falaj.drivers.fsync import sync_directory
from falaj.errors import Conflict, Damaged, HomeBusy, InvalidInput, NotFound, Unavailable
from falaj.governance.audit.verify import signed_by
from falaj.records.backups import BackupFile, BackupManifest, SignedBackup, backup_message
from falaj.records.sizes import format_size

CHUNK_BYTES = 1 << 20
MARK = "falaj-backup.json"
FORMAT = 1

Advance = Callable[[int], None]


class Archive:
    """The directory of the backups of one platform."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects = path / "objects"
        self._manifests = path / "manifests"
        self.drafts = path / "drafts"
        """Files that are being written; an interrupted backup leaves some."""
        self._changed: set[Path] = set()

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Return the archive at `path`; raise InvalidInput if there is none."""
        if not (path / MARK).exists():
            raise InvalidInput.at("DIR", given=str(path), allowed="a directory that falaj backup has made")
        return cls(path)

    @classmethod
    def prepare(cls, path: Path, *, log_id: str) -> Archive:
        """Return the archive at `path`, which is created in an empty directory; raise Conflict for any other one."""
        with disk_errors(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark = path / MARK
            if mark.exists():
                known = _log_id(mark)
                if known != log_id:
                    raise Conflict(
                        f"{path} holds backups of another platform ({known}); name another directory"
                    )
            elif any(path.iterdir()):
                raise Conflict(f"{path} is neither empty nor a directory of backups; name another one")
            else:
                path.chmod(0o700)
                write_durably(mark, json.dumps({"format": FORMAT, "log_id": log_id}).encode())
        return cls(path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the archive alone; what an interrupted backup left unfinished is removed."""
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise HomeBusy(f"another falaj backup writes to {self.path}; wait for its end") from None
            shutil.rmtree(self.drafts, ignore_errors=True)
            with disk_errors(self.path):
                for folder in (self.drafts, self._objects, self._manifests):
                    folder.mkdir(mode=0o700, exist_ok=True)
                try:
                    yield
                finally:
                    shutil.rmtree(self.drafts, ignore_errors=True)

    def has(self, file: BackupFile) -> bool:
        with suppress(FileNotFoundError):
            return self._object(file.sha256).stat().st_size == file.size_bytes
        return False

    def add(self, chunks: Iterable[bytes], advance: Advance) -> tuple[str, int]:
        """Store bytes; return their SHA-256 and their number. Bytes that are stored already are not stored again."""
        digest, size, draft = hashlib.sha256(), 0, self.drafts / "object"
        with draft.open("wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                file.write(chunk)
                advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        path = self._object(digest.hexdigest())
        path.parent.mkdir(mode=0o700, exist_ok=True)
        draft.chmod(0o400)
        draft.rename(path)
        self._changed |= {path.parent, self._objects}
        return digest.hexdigest(), size

    def read(self, file: BackupFile, advance: Advance) -> Iterator[bytes]:
        """Yield the bytes of a file; raise Damaged at the end if they are not what was backed up."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._object(file.sha256).open("rb") as stored:
                while chunk := stored.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    advance(len(chunk))
                    yield chunk
        except OSError as error:
            raise self._damaged(file, f"cannot be read ({error.strerror})") from None
        if (digest.hexdigest(), size) != (file.sha256, file.size_bytes):
            raise self._damaged(file, "has other bytes than were backed up")

    def names(self) -> list[str]:
        """Return the finished backups, oldest first."""
        return sorted(path.stem for path in self._manifests.glob("*.json"))

    def publish(self, name: str, signed: SignedBackup) -> None:
        """Finish a backup: from now on it can be restored, also after a power cut."""
        for folder in self._changed:
            sync_directory(folder)
        self._changed.clear()
        write_durably(self._manifests / f"{name}.json", signed.model_dump_json().encode(), aside=self.drafts)

    def newest(self, *, public_key: str) -> BackupManifest | None:
        """Return the manifest of the newest backup that `public_key` signed, whose files need not be copied again.

        Who can write to the directory can sign a manifest with a key of their own, and name other bytes in it.
        """
        for name in reversed(self.names()):
            with suppress(Damaged):
                manifest, signed = self.load(name)
                if signed.signed.public_key == public_key:
                    return manifest
        return None

    def prune(self, keep: int) -> int:
        """Remove all but the `keep` newest backups, and the files that only those had; return the freed bytes.

        Raise Damaged, and remove no files, if a manifest cannot be read: its files would look unused.
        """
        for name in self.names()[:-keep]:
            (self._manifests / f"{name}.json").unlink()
        sync_directory(self._manifests)
        used = {file.sha256 for name in self.names() for file in self.load(name)[0].files}
        unused = [path for path in self._objects.glob("*/*") if path.name not in used]
        freed = sum(path.stat().st_size for path in unused)
        for path in unused:
            path.unlink()
        return freed

    def load(self, name: str) -> tuple[BackupManifest, SignedBackup]:
        """Return a manifest and its signature, which fits; raise Damaged if it does not.

        Whether the key is that of the platform is for the caller to say.
        """
        path = self._manifests / f"{name}.json"
        try:
            signed = SignedBackup.model_validate_json(path.read_bytes())
            manifest = BackupManifest.model_validate_json(signed.manifest)
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none"
            raise NotFound(f"there is no backup {name} in {self.path}; there are: {known}") from None
        except (ValidationError, OSError, UnicodeDecodeError) as error:
            what = str(error).partition("\n")[0]
            raise Damaged(
                f"the manifest {path} is damaged ({what}); restore an earlier backup: --backup NAME"
            ) from None
        digest = hashlib.sha256(signed.manifest.encode()).hexdigest()
        parts = bytes.fromhex(signed.signed.public_key), bytes.fromhex(signed.signed.signature)
        if not signed_by(*parts, backup_message(manifest.log_id, digest)):
            raise Damaged(f"the manifest {path} was changed: its signature does not fit")
        if name != manifest.name:
            raise Damaged(f"the manifest {path} was renamed: it is that of the backup {manifest.name}")
        return manifest, signed

    def _object(self, sha256: str) -> Path:
        return self._objects / sha256[:2] / sha256

    def _damaged(self, file: BackupFile, what: str) -> Damaged:
        return Damaged(
            f"{self._object(file.sha256)} {what}: {file.place}/{file.name} of this backup is damaged; restore another "
            "backup (--backup NAME), back up again (falaj backup replaces a damaged file once it is removed), or leave "
            "it out: --without-damaged"
        )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Translate a full disk and missing rights at `path` into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = format_size(shutil.disk_usage(_existing(path)).free)
            raise Unavailable(
                f"the disk of {path} is full ({free} free); free some space, or name another directory, and run the "
                "same command again: what was copied is kept"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO):
            raise Unavailable(
                f"{error.filename or path} cannot be read or written: {error.strerror}"
            ) from error
        raise


def require_space(path: Path, size_bytes: int) -> None:
    """Raise Unavailable unless `size_bytes` fit on the disk of `path`."""
    free = shutil.disk_usage(_existing(path)).free
    if free < size_bytes:
        raise Unavailable(
            f"the disk of {path} has {format_size(free)} free, and {format_size(size_bytes)} are needed; free some "
            "space, or name another directory"
        )


def write_durably(path: Path, data: bytes, *, aside: Path | None = None) -> None:
    """Write a file as a whole or not at all, and sync it to disk."""
    draft = (aside or path.parent) / f".{path.name}.{os.getpid()}"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def _log_id(mark: Path) -> str:
    """Return the id of the platform whose backups lie beside `mark`."""
    try:
        return str(json.loads(mark.read_bytes())["log_id"])
    except (ValueError, KeyError, TypeError):
        raise Damaged(
            f"{mark} is damaged: it says whose backups these are; name another directory, or check them with "
            f"falaj restore {mark.parent} --check"
        ) from None


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
