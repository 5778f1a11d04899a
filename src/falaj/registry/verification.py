"""Check a version's bytes against its manifest, and tell how far the check is."""

from __future__ import annotations

from collections.abc import Iterator

from falaj.errors import FalajError
from falaj.ports.metadata import Database
from falaj.records.registry import ModelFile, ModelVersion, VersionCheck
from falaj.registry.files import ModelBlobSource, require_same, verified

REPORT_BYTES = 64 << 20


def check_files(version: ModelVersion, source: ModelBlobSource, database: Database) -> Iterator[VersionCheck]:
    """Hash every file; the last word is the verdict."""
    checked, reported = 0, 0
    problems: list[str] = []
    for file in version.files:
        try:
            for size_bytes in _sizes(file, source, database):
                checked += size_bytes
                if checked - reported >= REPORT_BYTES:
                    reported = checked
                    yield _state(version, checked, problems, finished=False)
        except FalajError as error:
            problems.append(error.message if file.path in error.message else f"{file.path}: {error.message}")
    yield _state(version, checked, problems, finished=True)


def _sizes(file: ModelFile, source: ModelBlobSource, database: Database) -> Iterator[int]:
    with database.read() as tx:
        blob = source.facts(tx, file.blob)
    require_same(file, blob)
    yield from (len(chunk) for chunk in verified(file, source.read(blob)))


def _state(version: ModelVersion, checked: int, problems: list[str], *, finished: bool) -> VersionCheck:
    return VersionCheck(
        version=version.reference,
        finished=finished,
        ok=finished and not problems,
        checked_bytes=checked,
        size_bytes=version.size_bytes,
        problems=tuple(problems),
    )
