"""Stages the directory of an attempt: its code, its decrypted inputs, and a folder for its outputs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from falaj.control.services import Services
from falaj.errors import InvalidInput, TooLarge
from falaj.governance import objects
from falaj.ports.metadata import Database
from falaj.ports.parsers import ParserPool
from falaj.records.governance.objects import StoredObject
from falaj.records.training.jobs import JobSpec
from falaj.training.code_archive import LARGEST_BYTES, unpack_code
from falaj.training.store import JobRow

CheckStop = Callable[[], None]
"""Called between the parts of long work; raises if the work is to stop."""


def stage(
    services: Services,
    database: Database,
    row: JobRow,
    directory: Path,
    *,
    parsers: ParserPool,
    check_stop: CheckStop,
) -> None:
    """Fill `directory` on behalf of the current caller. It appears when it is complete; an existing one is kept."""
    if directory.exists():
        return
    draft = _draft(directory)
    try:
        for name in ("code", "inputs", "outputs"):
            (draft / name).mkdir(mode=0o700)
        if row.code is not None:
            unpack_code(
                _code_archive(services.blobs.read(row.code)), draft / "code", parsers, owner=row.behalf
            )
            _require_script(row.spec, draft / "code")
        for name, found in _inputs(database, row).items():
            check_stop()
            write_input(services, found, draft / "inputs", name)
        check_stop()
        os.rename(draft, directory)
    except OSError:
        if not directory.exists():  # else another thread has staged it meanwhile, with the same result
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _draft(directory: Path) -> Path:
    """Return an empty folder beside `directory`. The cleanup of an earlier attempt may remove the parent meanwhile."""
    while True:
        with suppress(FileNotFoundError):
            make_traversable(directory.parent)
            return Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))


def make_traversable(folder: Path) -> None:
    """Create a folder that other users may traverse but not list."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(exist_ok=True)
        missing.chmod(0o711)


def make_readable(folder: Path) -> None:
    """Create a folder that a job with another uid may read. The platform's umask would close it."""
    make_traversable(folder.parent)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)


def write_input(services: Services, found: StoredObject, folder: Path, name: str) -> None:
    """Write the content of `found` as the input `name`."""
    if found.kind == "dataset":
        _write_parquet(services.features.load(found.id), folder / f"{name}.parquet")
    elif found.kind == "view":
        _write_parquet(services.features.scan(found.id), folder / f"{name}.parquet")
    elif found.kind == "model_version":
        for file in services.models.version(found.id).files:
            target = folder / name / file.path
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_bytes(services.models.read(found.id, file.path), target)
    else:
        _write_bytes(services.blobs.read(found.id), folder / f"{name}{Path(found.name).suffix}")


def _inputs(database: Database, row: JobRow) -> dict[str, StoredObject]:
    with database.read() as tx:
        found = {name: objects.by_id(tx, ident) for name, ident in row.inputs.items()}
    gone = [name for name, each in found.items() if each is None]
    if gone:
        raise InvalidInput.at(f"inputs.{gone[0]}", given=row.inputs[gone[0]], allowed="an existing object")
    return {name: each for name, each in found.items() if each is not None}


def _require_script(spec: JobSpec, code: Path) -> None:
    if spec.script is not None and not (code / spec.script).is_file():
        there = sorted(path.relative_to(code).as_posix() for path in code.rglob("*.py"))
        known = ", ".join(there[:10]) or "no Python file"
        raise InvalidInput.at("script", given=spec.script, allowed=f"a file of the code, which has {known}")


def _write_bytes(pieces: Iterable[bytes], target: Path) -> None:
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        for piece in pieces:
            file.write(piece)


def _write_parquet(table: Any, target: Path) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(target, table.schema) as writer:
        for batch in table:
            writer.write_batch(batch)
    target.chmod(0o600)


def _code_archive(pieces: Iterator[bytes]) -> bytes:
    """Return the whole archive, which is not larger than the code that it holds."""
    archive = bytearray()
    for piece in pieces:
        archive += piece
        if len(archive) > LARGEST_BYTES:
            raise TooLarge(f"the archive of the code has more than {LARGEST_BYTES} bytes")
    return bytes(archive)
