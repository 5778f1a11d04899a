"""Back a home up while its platform runs: first the database at one moment, then the files that it refers to."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from falaj.assembly import drivers
from falaj.assembly.backup import places
from falaj.assembly.backup.archive import Advance, Archive, require_space, write_durably
from falaj.assembly.backup.places import FoundFile, Place
from falaj.assembly.config import read_config
from falaj.assembly.home import Home
from falaj.errors import InvalidInput, NotFound
from falaj.features.table_versions.published import published_files, published_tables
from falaj.governance import backups
from falaj.governance.blobs.contents import living_blobs
from falaj.governance.residency.stores import bound_zones
from falaj.ports.metadata import Transaction
from falaj.records.backups import (
    AuditTip,
    BackupFile,
    BackupHold,
    BackupManifest,
    BackupResult,
    BackupSignature,
    SignedBackup,
)
from falaj.records.config import Config, Pkcs11Config
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import NOWHERE
from falaj.records.record import utc_now
from falaj.version import VERSION

EXTEND_EVERY_S = 60.0

Watch = Callable[[str, int | None], AbstractContextManager[Advance]]
"""Shows the progress of something that has so many bytes."""


class BackupOperations(Protocol):
    """The operations of the platform that a backup calls; it need not run in this process."""

    def begin_backup(self) -> BackupHold: ...

    def extend_backup(self, backup: str) -> BackupHold: ...

    def finish_backup(self, backup: str, manifest: str) -> BackupSignature: ...


def back_up(
    platform: BackupOperations,
    home: Home,
    directory: Path,
    *,
    keys: Path | None,
    watch: Watch,
    keep: int | None = None,
    zone: str | None = None,
) -> BackupResult:
    """Copy the home into `directory`, and its key file into `keys`. What earlier backups have is not copied again.

    With `keep`, only so many of the newest backups stay. `zone` is where `directory` lies, by default that of this
    machine: stores with data that may not lie there are left out.

    The order makes the copy consistent: stored bytes are held, then the database is copied as it is at one moment,
    and then the files, which never change once the database refers to them (see decision 0024).
    """
    config = read_config(home.toml)
    _refuse_places(home, config, directory, keys)
    jurisdiction = _jurisdiction(config, zone)
    hold = platform.begin_backup()
    archive = Archive.prepare(directory, log_id=hold.log_id)
    with archive.writing():
        held = _Held(platform, hold)
        moment = _copy_databases(home, config, archive, held, watch, jurisdiction=jurisdiction)
        run = _BackupRun(archive, archive.newest(public_key=hold.public_key), held)
        sources = _sources(home, config, archive, hold.log_id)
        run.copy({name: each for name, each in sources.items() if name not in moment.left_out()}, watch)
        manifest = _manifest(home, config, hold, moment, run)
        text = manifest.model_dump_json()
        signed = platform.finish_backup(hold.id, hashlib.sha256(text.encode()).hexdigest())
        archive.publish(manifest.name, SignedBackup(manifest=text, signed=signed))
        freed = 0 if keep is None else archive.prune(keep)
    copied_keys = _copy_keys(home, config, keys)
    return BackupResult(
        directory=str(directory),
        name=manifest.name,
        taken_at=manifest.taken_at,
        entries=moment.tip.size,
        files=len(manifest.files),
        size_bytes=sum(file.size_bytes for file in manifest.files),
        copied_files=run.copied_files,
        copied_bytes=run.copied_bytes,
        freed_bytes=freed,
        keys=copied_keys,
        missing=manifest.missing,
        damaged=manifest.damaged,
        left_out=tuple(
            f"zone {zone}: {found.address} ({found.label.describe()})" for zone, found in moment.bound.items()
        ),
    )


class _Moment(NamedTuple):
    """The database at the moment of its copy: the tip of its log, and the files that it refers to."""

    at: datetime
    tip: AuditTip
    schema_version: str
    tables: frozenset[tuple[str, str]]
    """Tables by place and name: each has a log."""
    blobs: dict[tuple[str, str], int]
    """The stored sizes of blobs, by place and name."""
    table_files: dict[tuple[str, str], str]
    """The SHA-256 of files of tables, by place and name."""
    bound: dict[str, StoredObject]
    """Zones with data that may not lie where the backup does, each with an object that may not."""

    def left_out(self) -> set[str]:
        """Return the places that are not copied."""
        return {place for zone in self.bound for place in (places.blobs_of(zone), places.tables_of(zone))}

    def expects(self, key: tuple[str, str]) -> bool:
        """Tell whether the file or table `key`, by place and name, is to be in the backup."""
        return key[0] not in self.left_out()


@dataclass
class _Held:
    """The hold on stored bytes, which is extended while work goes on."""

    platform: BackupOperations
    hold: BackupHold
    extended_at: float = field(default_factory=time.monotonic)

    def extend(self) -> None:
        if time.monotonic() - self.extended_at > EXTEND_EVERY_S:
            self.platform.extend_backup(self.hold.id)
            self.extended_at = time.monotonic()

    def following(self, advance: Advance) -> Advance:
        def both(amount: int) -> None:
            advance(amount)
            self.extend()

        return both


@dataclass
class _BackupRun:
    """Copies files into the archive, except those that the last backup has and that have not changed since."""

    archive: Archive
    last: BackupManifest | None
    held: _Held
    files: list[BackupFile] = field(default_factory=list)
    copied_files: int = 0
    copied_bytes: int = 0

    def copy(self, sources: dict[str, Place], watch: Watch) -> None:
        known = {(file.place, file.name): file for file in (self.last.files if self.last else ())}
        left: list[tuple[str, Place, FoundFile]] = []
        for place, source in sources.items():
            for found in source.files():
                before = known.get((place, found.name))
                self.held.extend()
                if before is not None and _is_same(before, found) and self.archive.has(before):
                    self.files.append(before)
                else:
                    left.append((place, source, found))
        total = sum(found.size_bytes for *_, found in left)
        require_space(self.archive.path, total)
        with watch("copying", total) as advance:
            for place, source, found in left:
                self._add(place, source, found, self.held.following(advance))

    def _add(self, place: str, source: Place, found: FoundFile, advance: Advance) -> None:
        try:
            sha256, size = self.archive.add(source.read(found.name), advance)
        except NotFound:  # it was never referred to, or `missing` names it
            return
        self.copied_files += 1
        self.copied_bytes += size
        self.files.append(
            BackupFile(place=place, name=found.name, size_bytes=size, sha256=sha256, stamp=found.stamp)
        )


def _is_same(before: BackupFile, found: FoundFile) -> bool:
    return (before.size_bytes, before.stamp) == (found.size_bytes, found.stamp)


def _refuse_places(home: Home, config: Config, directory: Path, keys: Path | None) -> None:
    """Raise InvalidInput for a directory that would be lost with the home, and for keys beside the data."""
    if _overlap(directory, home.path):
        raise InvalidInput.at(
            "DIR", given=str(directory), allowed=f"a directory apart from the home {home.path}"
        )
    if keys is None:
        return
    for other, what in ((directory, "the backup"), (home.path, "the home")):
        if _overlap(keys, other):
            raise InvalidInput.at(
                "--keys",
                given=str(keys),
                allowed=f"a directory apart from {what} {other}: who has both can read everything",
            )
    if isinstance(config.keys, Pkcs11Config):
        raise InvalidInput.at(
            "--keys",
            given=str(keys),
            allowed="nothing: the keys are in the token "
            f"{config.keys.token}, and are backed up as its maker says",
        )


def _jurisdiction(config: Config, zone: str | None) -> str:
    """Return the jurisdiction of the directory; NOWHERE if nothing says in which zone it is."""
    name = zone or config.machine_zone
    if name is not None and name not in config.zones:
        raise InvalidInput.at("--zone", given=name, allowed=", ".join(config.zones))
    return NOWHERE if name is None else config.zones[name].jurisdiction


def _overlap(one: Path, other: Path) -> bool:
    one, other = one.resolve(), other.resolve()
    return one.is_relative_to(other) or other.is_relative_to(one)


def _copy_databases(
    home: Home, config: Config, archive: Archive, held: _Held, watch: Watch, *, jurisdiction: str
) -> _Moment:
    """Copy the workflows, then the metadata: a step that the workflows have forgotten is repeated without effect."""
    size = home.database.stat().st_size if home.database.exists() else None
    require_space(archive.path, 2 * (size or 0))
    with watch("copying the database", size) as advance:
        progress = held.following(advance)
        drivers.copy_workflows(home, config, _folder(archive, places.WORKFLOWS), progress)
        ask = partial(_read_moment, default_zone=config.default_zone, jurisdiction=jurisdiction)
        return drivers.copy_metadata(home, config, _folder(archive, places.METADATA), ask, progress)


def _folder(archive: Archive, name: str) -> Path:
    path = archive.drafts / name
    path.mkdir(mode=0o700)
    return path


def _read_moment(tx: Transaction, *, default_zone: str, jurisdiction: str) -> _Moment:
    return _Moment(
        at=utc_now(),
        tip=backups.audit_tip(tx),
        schema_version=str(tx.execute_sql("SELECT version_num FROM alembic_version")[0][0]),
        tables=frozenset(
            (places.tables_of(each.zone or default_zone), each.table) for each in published_tables(tx)
        ),
        blobs={(places.blobs_of(zone or default_zone), key): size for zone, key, size in living_blobs(tx)},
        table_files={
            (places.tables_of(zone or default_zone), name): sha256
            for zone, name, sha256 in published_files(tx)
        },
        bound={zone or default_zone: found for zone, found in bound_zones(tx, jurisdiction).items()},
    )


def _sources(home: Home, config: Config, archive: Archive, log_id: str) -> dict[str, Place]:
    """Return the places in the order in which they are copied."""
    return {
        places.METADATA: places.Folder(archive.drafts / places.METADATA),
        places.WORKFLOWS: places.Folder(archive.drafts / places.WORKFLOWS),
        places.WITNESS: places.witness_place(home, config),
        places.SETTINGS: places.settings_place(home, config),
        **places.data_places(home, config, log_id),
    }


def _manifest(
    home: Home, config: Config, hold: BackupHold, moment: _Moment, run: _BackupRun
) -> BackupManifest:
    return BackupManifest(
        log_id=hold.log_id,
        home=home.ident,
        version=VERSION,
        schema_version=moment.schema_version,
        metadata=config.metadata.driver,
        taken_at=moment.at,
        tip=moment.tip,
        files=tuple(run.files),
        missing=tuple(sorted(_missing(moment, run.files))),
        damaged=tuple(sorted(_damaged(moment, run.files))),
        left_out=tuple(sorted(moment.bound)),
    )


def _missing(moment: _Moment, files: list[BackupFile]) -> Iterator[str]:
    """Yield what the database refers to and the backup does not have: the platform had lost it before."""
    names = {(file.place, file.name) for file in files}
    logs = {
        (file.place, file.name.partition(f"/{places.DELTA_LOG}/")[0])
        for file in files
        if f"/{places.DELTA_LOG}/" in file.name
    }
    expected = moment.blobs.keys() | moment.table_files.keys()
    gone = filter(moment.expects, (expected - names) | (moment.tables - logs))
    yield from (f"{place}/{name}" for place, name in gone)


def _damaged(moment: _Moment, files: list[BackupFile]) -> Iterator[str]:
    """Yield the files that are not what was written: a blob of another size, a file of a table with other bytes."""
    for file in files:
        key = file.place, file.name
        if (
            moment.blobs.get(key, file.size_bytes) != file.size_bytes
            or moment.table_files.get(key, file.sha256) != file.sha256
        ):
            yield f"{file.place}/{file.name}"


def _copy_keys(home: Home, config: Config, keys: Path | None) -> str | None:
    if keys is None or isinstance(config.keys, Pkcs11Config):
        return None
    keys.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = keys / home.key_file.name
    write_durably(target, (config.keys.path or home.key_file).read_bytes())
    return str(target)
