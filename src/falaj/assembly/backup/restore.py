"""Make a home from a backup: files first, then the database, and at last the home appears under its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from falaj.assembly import drivers
from falaj.assembly.backup import places
from falaj.assembly.backup.archive import (
    Advance,
    Archive,
    disk_errors,
    require_space,
    write_durably,
)
from falaj.assembly.backup.backup import Watch
from falaj.assembly.backup.places import Folder, Place
from falaj.assembly.config import read_config
from falaj.assembly.home import Home
from falaj.assembly.platform import assemble, local_user
from falaj.drivers.fsync import make_directories, sync_directories, sync_directory
from falaj.drivers.keyfile.keys import public_key_in
from falaj.errors import (
    Conflict,
    Damaged,
    FalajError,
    Fault,
    InvalidInput,
    KeyUnavailable,
    NotFound,
)
from falaj.features import store as feature_store
from falaj.governance import backups
from falaj.governance.audit.log import AuditLog, read_log_id
from falaj.governance.audit.verify import key_id
from falaj.governance.audit.witness import Witness
from falaj.governance.encryption.keyring import Keyring
from falaj.ports.keys import KeyService
from falaj.records.backups import BackupFile, BackupManifest, BackupSignature, RestoreResult
from falaj.records.config import Config, Pkcs11Config
from falaj.records.governance.audit import RestoredFrom
from falaj.records.record import utc_now

MOST_FAULTS = 100


@dataclass(frozen=True)
class RestoreOptions:
    """`name`: of the backup, else the newest. `keys`: where the key file was copied to. `public_key`: that of the
    platform, in hex. `keep_tokens`: they stay valid, also those that were revoked after the backup. `without_damaged`:
    leave out blobs and files of tables that are damaged in the backup."""

    name: str | None = None
    keys: Path | None = None
    public_key: str | None = None
    keep_tokens: bool = False
    without_damaged: bool = False


def check_backup(
    directory: Path, config_dir: Path, *, options: RestoreOptions, watch: Watch
) -> RestoreResult:
    """Read every file of a backup and compare it with its manifest; raise Damaged with all that differ."""
    archive = Archive.open(directory)
    name, manifest, signed = _chosen(archive, options.name)
    signer = _known_signer(Home(directory, config_dir, manifest.home), options)
    if signer is not None:
        _require_signer(signer, signed)
    faults: list[Fault] = []
    with watch("checking", _size(manifest.files)) as advance:
        for file in manifest.files:
            try:
                for _chunk in archive.read(file, advance):
                    pass
            except Damaged as error:
                faults.append(Fault(where=f"{file.place}/{file.name}", given=error.message))
    if faults:
        raise Damaged(
            f"{len(faults)} of the {len(manifest.files)} files of the backup {name} are damaged. If the platform still "
            "runs, remove the named objects and run falaj backup, which copies them again; else restore what there is: "
            "--without-damaged",
            faults=faults[:MOST_FAULTS],
        )
    return _result(archive, name, manifest, signed, signer_known=signer is not None)


def restore(
    directory: Path, path: Path, config_dir: Path, *, options: RestoreOptions, watch: Watch
) -> RestoreResult:
    """Make the home `path` from a backup. Until everything is there, it lies beside it under another name.

    Nothing of the backup is used before it is known that the platform signed it: its falaj.toml names programs and
    places, and who can write to the directory could have written it.
    """
    archive = Archive.open(directory)
    name, manifest, signed = _chosen(archive, options.name)
    _refuse_occupied(path)
    draft = Home(path.with_name(f".{path.name}.restoring"), config_dir, manifest.home)
    if (signer := _known_signer(draft, options)) is None:
        raise _unknown_signer(draft, signed)
    _require_signer(signer, signed)
    for folder in (draft.path, config_dir, draft.key_file.parent, draft.witness.parent):
        make_directories(folder)
    with disk_errors(path), draft.lock():
        _empty(draft)
        try:
            filled = _fill(archive, name, manifest, signed, draft, options, watch)
            sync_directories(draft.path)
            os.rename(draft.path, path)  # also onto an empty folder
        except BaseException:
            shutil.rmtree(draft.path, ignore_errors=True)  # tables lie there in clear
            raise
        sync_directory(path.parent)
    return _result(archive, name, manifest, signed, signer_known=True, home=path, filled=filled)


class _Filled(NamedTuple):
    """How a home was filled: entries of the log that are gone, views whose online values were written again and those
    whose values could not be, with the reason, and files that were left out."""

    lost_entries: int = 0
    views: int = 0
    not_online: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def _fill(
    archive: Archive,
    name: str,
    manifest: BackupManifest,
    signed: BackupSignature,
    draft: Home,
    options: RestoreOptions,
    watch: Watch,
) -> _Filled:
    """Write everything into the home `draft`."""
    require_space(draft.path, _size(manifest.files))
    with watch("restoring", _size(manifest.files)) as advance:
        _write(archive, manifest, {places.SETTINGS: Folder(draft.path)}, advance)
        config = read_config(draft.toml)
        with closing(_open_keys(draft, config, signed, options.keys)) as keys:
            targets = _targets(draft, config, manifest)
            data = places.data_places(draft, config, manifest.log_id) if options.without_damaged else ()
            left_out = _write(archive, manifest, targets, advance, spared=data)
            _sync_folders(targets)
            _load_database(draft, config, manifest)
            lost = _record(draft, config, keys, name, manifest, keep_tokens=options.keep_tokens)
    _set_online_aside(draft, config)
    views, not_online = _rebuild_online(draft, config, watch)
    shutil.rmtree(_unpacked(draft), ignore_errors=True)
    draft.logs.mkdir(mode=0o700, exist_ok=True)
    return _Filled(lost, views, tuple(not_online), tuple(left_out))


def _chosen(archive: Archive, name: str | None) -> tuple[str, BackupManifest, BackupSignature]:
    if name is None:
        names = archive.names()
        if not names:
            raise NotFound(f"{archive.path} has no finished backup; the one that was begun can be run again")
        name = names[-1]
    manifest, signed = archive.load(name)
    return name, manifest, signed.signed


def _known_signer(home: Home, options: RestoreOptions) -> str | None:
    """Return the public key, in hex, of the platform whose backup this is to be, by what is not in the backup.

    None if neither a public key nor a key file was named, and the key file is not where it lies by default.
    """
    if options.public_key is not None:
        return options.public_key
    if options.keys is not None:
        return public_key_in(*_key_copy(home, options.keys)).hex()
    if home.key_file.exists():
        return public_key_in(home.key_file.read_bytes(), home.key_file).hex()
    return None


def _require_signer(public_key: str, signed: BackupSignature) -> None:
    if public_key != signed.public_key:
        found, wanted = (key_id(bytes.fromhex(key)) for key in (public_key, signed.public_key))
        raise KeyUnavailable(
            f"these are other keys: the backup is signed by the key {wanted}, and here is the key {found}; give the "
            "directory of the right key file with --keys. If these are the keys of the platform, somebody has replaced "
            "the backup: restore another one"
        )


def _unknown_signer(home: Home, signed: BackupSignature) -> KeyUnavailable:
    return KeyUnavailable(
        f"there is no key file {home.key_file}: nothing in the backup can be decrypted without it, nor is it known "
        "whether the platform made this backup; name the directory that falaj backup --keys wrote it to: --keys DIR. "
        "If the keys are elsewhere (an HSM, or keys.path), give the platform's public key, which falaj audit key "
        f"shows: --public-key KEY. The backup is signed by the key {key_id(bytes.fromhex(signed.public_key))}"
    )


def _refuse_occupied(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Conflict(
            f"{path} is not empty, and a restore never overwrites a home; move it away first: mv {path} {path}.old"
        )


def _empty(draft: Home) -> None:
    """Remove what an interrupted restore has left."""
    for found in draft.path.iterdir():
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        elif found.name != "lock":
            found.unlink()


def _unpacked(draft: Home) -> Path:
    return draft.path / ".restore"


def _write(
    archive: Archive,
    manifest: BackupManifest,
    targets: dict[str, Place],
    advance: Advance,
    *,
    spared: Container[str] = (),
) -> list[str]:
    """Write the files of `targets`; return those of the places `spared` that are damaged, and were left out."""
    left_out = []
    for file in manifest.files:
        if file.place in targets:
            try:
                targets[file.place].write(file.name, archive.read(file, advance))
            except Damaged:
                if file.place not in spared:
                    raise
                left_out.append(f"{file.place}/{file.name}")
    return left_out


def _sync_folders(targets: dict[str, Place]) -> None:
    """Flush the names of restored files: a zone may have its folder outside of the home."""
    for target in targets.values():
        if isinstance(target, Folder) and target.root.is_dir():
            sync_directories(target.root)


def _targets(draft: Home, config: Config, manifest: BackupManifest) -> dict[str, Place]:
    """Return where everything but the settings goes."""
    unpacked = (places.METADATA, places.WORKFLOWS, places.WITNESS)
    targets: dict[str, Place] = {name: Folder(_unpacked(draft) / name) for name in unpacked}
    targets |= places.data_places(draft, config, manifest.log_id)
    unknown = {file.place for file in manifest.files} - set(targets) - {places.SETTINGS}
    if unknown:
        raise Damaged(
            f"the backup has files of {', '.join(sorted(unknown))}, which its falaj.toml does not name"
        )
    return targets


def _open_keys(draft: Home, config: Config, signed: BackupSignature, copy: Path | None) -> KeyService:
    """Open the keys of the backup, and put the copy of the key file in place if there is none."""
    if not isinstance(config.keys, Pkcs11Config):
        path = config.keys.path or draft.key_file
        if not path.exists():
            if copy is None:
                raise KeyUnavailable(
                    f"there is no key file {path}, and nothing in the backup can be decrypted without it; name the "
                    "directory that falaj backup --keys wrote it to: --keys DIR"
                )
            write_durably(path, _key_copy(draft, copy)[0])
    keys = drivers.open_keys(draft, config, first_start=False)
    try:
        _require_signer(keys.public_key().hex(), signed)
    except BaseException:
        keys.close()
        raise
    return keys


def _key_copy(home: Home, copy: Path) -> tuple[bytes, Path]:
    """Return the bytes of the copied key file, and its path."""
    source = copy / home.key_file.name if copy.is_dir() else copy
    try:
        return source.read_bytes(), source
    except OSError as error:
        raise InvalidInput.at(
            "--keys", given=str(source), allowed=f"a readable key file ({error.strerror})"
        ) from None


def _load_database(draft: Home, config: Config, manifest: BackupManifest) -> None:
    folder = _unpacked(draft) / places.METADATA
    if config.metadata.driver != manifest.metadata:
        raise Conflict(
            f"the backup is of {manifest.metadata}, and falaj.toml in it names {config.metadata.driver}"
        )
    if config.metadata.is_shared:
        drivers.load_metadata(
            draft, config, folder, schema_version=manifest.schema_version, progress=lambda _bytes: None
        )
        return
    os.rename(folder / draft.database.name, draft.database)
    workflows = _unpacked(draft) / places.WORKFLOWS / draft.database.name
    if workflows.exists():
        os.rename(workflows, draft.workflows)


def _record(
    draft: Home, config: Config, keys: KeyService, name: str, manifest: BackupManifest, *, keep_tokens: bool
) -> int:
    """Write the restore into the audit log, as the entry after those of the backup; return how many are lost."""
    witness = config.audit.witness or draft.witness
    heads = _merge_witness(_unpacked(draft) / places.WITNESS / witness.name, witness, manifest.log_id)
    known = max((int(head["size"]) for head in heads), default=0)
    newest = max((datetime.fromisoformat(head["at"]) for head in heads), default=manifest.taken_at)
    at = max(utc_now(), newest + timedelta(microseconds=1))  # older heads are known by their time
    kept = Witness(witness, keys, log_id=manifest.log_id, home=draft.ident)
    remembered = kept.memory()
    restored = RestoredFrom(
        backup=name,
        taken_at=manifest.taken_at,
        size=manifest.tip.size,
        root=manifest.tip.root,
        known=max(known, manifest.tip.size, 0 if remembered is None else remembered.size),
    )
    with closing(drivers.open_metadata(draft, config)) as database:
        keyring = Keyring(database, keys)
        log = AuditLog(database, keys=keys, derive=keyring.derived, log_id=manifest.log_id, witness=kept)
        with database.write() as tx:
            if backups.audit_tip(tx) != manifest.tip or read_log_id(tx) != manifest.log_id:
                raise Damaged("the database in the backup has another audit log than its manifest says")
            recorded = log.recording(tx)
            if not keep_tokens:
                backups.end_credentials(recorded, now=at)
            backups.record_restore(recorded, log, restored, caller=local_user(), at=at)
        log.sign_restored()
    return restored.known - restored.size


def _merge_witness(copy: Path, witness: Path, log_id: str) -> list[dict[str, str]]:
    """Add heads of the backup that the witness does not have; return all heads of this log.

    A witness that outlived the home is never cut: it has heads that were signed after the backup.
    """
    kept = witness.read_text().splitlines() if witness.exists() else []
    new = [line for line in copy.read_text().splitlines() if line not in set(kept)] if copy.exists() else []
    if new:
        write_durably(witness, "".join(f"{line}\n" for line in (*new, *kept)).encode())
    heads = []
    for line in (*new, *kept):
        with suppress(ValueError, KeyError, TypeError):  # a torn line; the verifier names it
            head = json.loads(line)
            if head["log_id"] == log_id and int(head["size"]) and datetime.fromisoformat(head["at"]).tzinfo:
                heads.append(head)
    return heads


def _set_online_aside(draft: Home, config: Config) -> None:
    """Set online stores aside that outlived the home: they have newer values, which older ones would not replace."""
    for _zone, place in drivers.online_places(draft, config):
        place.set_aside("before-restore")


def _rebuild_online(draft: Home, config: Config, watch: Watch) -> tuple[int, list[str]]:
    """Write the values again that were online; return how many views, and why it was not possible for others.

    A table that is not in the backup, or damaged in it, must not keep all the rest from being restored.
    """
    done, failed = 0, []
    with closing(assemble(draft, config=config, as_owner=False)) as platform:
        with platform.database.read() as tx:
            views = feature_store.online_views(tx)
        with watch("writing online features", None) as advance:
            for view in views:
                if not config.zones[view.zone].online.is_here:
                    continue
                try:
                    platform.services.features.online_features.rebuild(view)
                    done += 1
                except FalajError as error:
                    failed.append(f"view {view.definition.name}: {error.message}")
                advance(1)
    return done, failed


def _size(files: Iterable[BackupFile]) -> int:
    return sum(file.size_bytes for file in files)


def _result(
    archive: Archive,
    name: str,
    manifest: BackupManifest,
    signed: BackupSignature,
    *,
    signer_known: bool,
    home: Path | None = None,
    filled: _Filled = _Filled(),  # noqa: B008 - immutable
) -> RestoreResult:
    return RestoreResult(
        directory=str(archive.path),
        name=name,
        public_key=signed.public_key,
        signer_known=signer_known,
        home=None if home is None else str(home),
        taken_at=manifest.taken_at,
        entries=manifest.tip.size,
        files=len(manifest.files),
        size_bytes=_size(manifest.files),
        without_zones=manifest.left_out,
        **filled._asdict(),
    )
