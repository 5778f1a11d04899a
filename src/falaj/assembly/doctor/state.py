"""The checks of what a platform keeps: home, keys, metadata, blobs, policies."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from falaj.assembly import drivers
from falaj.assembly import home as homes
from falaj.assembly.config import reveal
from falaj.assembly.doctor.findings import LATER, DoctorContext, fail, failures, guarded, ok, warn
from falaj.assembly.stores import store_faults
from falaj.control.services import all_operations
from falaj.errors import ConfigInvalid, NotFound
from falaj.governance.audit.log import AuditLog, read_log_id
from falaj.governance.audit.witness import Witness
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.policy.engine import PolicyEngine, PolicyText
from falaj.governance.residency.stores import registered_stores
from falaj.ports.blobs import BlobKey
from falaj.ports.keys import KeyService
from falaj.records.config import Pkcs11Config, S3Bucket, ZoneConfig
from falaj.records.doctor import Finding
from falaj.records.names import new_id

REACH_S = 3


def check_home(context: DoctorContext) -> Iterable[Finding]:
    path = context.home.path
    if path.is_symlink():
        path = path.resolve()  # the folder behind a link is what can block, and what a fix is about
    if not path.exists():
        yield _unmade_home(path)
    elif not path.is_dir():
        yield fail("home", f"{path} is not a directory", fix="name another with --home or FALAJ_HOME")
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield fail("home", f"{path} cannot be read and written", fix=f"chown -R {os.geteuid()} {path}")
    elif not context.is_made and (found := homes.lost_id(path, context.home.config_dir)) is not None:
        yield fail("home", found.message, fix=found.faults[0].fix)
    elif (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        yield warn("home", f"{path} is open to others (mode {mode:04o})", fix=f"chmod 700 {path}")
    else:
        yield ok("home", f"{path}, mode {mode:04o}")


def _unmade_home(path: Path) -> Finding:
    above = next(folder for folder in path.parents if folder.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return ok("home", f"there is no {path} yet; falaj up makes it")
    return fail("home", f"{path} cannot be made in {above}", fix="name another with --home or FALAJ_HOME")


def check_keys(context: DoctorContext) -> Iterable[Finding]:
    keys = context.config.keys
    if isinstance(keys, Pkcs11Config):
        from falaj.drivers.pkcs11.keys import Pkcs11Keys

        Pkcs11Keys.open(keys.module, keys.token, reveal(keys.pin, field="keys.pin")).close()
        yield ok("keys", f"token {keys.token} answers")
        return
    path = keys.path or context.home.key_file
    yield _key_file(context, path) if path.exists() else _missing_key_file(context, path)


def _key_file(context: DoctorContext, path: Path) -> Finding:
    from falaj.drivers.keyfile.keys import KeyFile

    KeyFile.open(path).close()  # refuses one that others can read
    if path.resolve().is_relative_to(context.home.path.resolve()):
        words = f"{path} lies in the home: who copies the home has its keys, too"
        return warn("keys", words, fix="move it elsewhere, and name it as keys.path in falaj.toml")
    return ok("keys", f"{path}, mode 0600, outside the home")


def _missing_key_file(context: DoctorContext, path: Path) -> Finding:
    if not context.has_database:
        return ok("keys", f"the key file is {LATER}")
    words = f"there is no {path}: nothing that is encrypted can be read without it"
    return fail("keys", words, fix="put the copy of the key file back that you keep offline")


def check_metadata(context: DoctorContext) -> Iterable[Finding]:
    import sqlalchemy as sa

    from falaj.drivers.sql.migrate import HEAD, current_version

    if not context.has_database:
        yield ok("metadata", f"the database is {LATER}")
        return
    engine = sa.create_engine(drivers.metadata_url(context.home, context.config))
    try:
        found = current_version(engine)
    finally:
        engine.dispose()
    if found is not None and found > HEAD:
        words = f"the database has schema {found}; this version of Falaj knows {HEAD}"
        yield fail("metadata", words, fix="install the newer Falaj that was used before")
    elif found != HEAD:
        yield warn("metadata", f"schema {found or 'none'}; the next start brings it to {HEAD}")
    else:
        yield ok("metadata", f"{engine.url.render_as_string(hide_password=True)} answers, schema {HEAD}")


def check_stores(context: DoctorContext) -> Iterable[Finding]:
    """Whether the stores are those that other homes on the same database use."""
    from falaj.drivers.sql.database import open_database

    if not context.is_made or not context.config.metadata.is_shared:
        return
    database = open_database(drivers.metadata_url(context.home, context.config))
    try:
        with database.read() as tx:
            platform, known = read_log_id(tx), registered_stores(tx)
    finally:
        database.close()
    faults = store_faults(context.home, context.config, platform, known)
    yield from failures("stores", ConfigInvalid("stores", faults=faults)) if faults else ()
    if not faults:
        yield ok("stores", "all homes on this database see the same ones")


def check_audit(context: DoctorContext) -> Iterable[Finding]:
    """Look for entries that are not the platform's, a lost witness and a rolled-back database; it signs nothing."""
    import sqlalchemy as sa

    from falaj.drivers.sql.database import open_database
    from falaj.drivers.sql.migrate import HEAD, current_version

    if not context.has_database or not context.is_made:
        yield ok("audit", f"the log is {LATER}")
        return
    url = drivers.metadata_url(context.home, context.config)
    engine = sa.create_engine(url)
    found = current_version(engine)
    engine.dispose()
    if found != HEAD:
        return  # `check_metadata` says so
    with closing(open_database(url)) as database, closing(_open_keys(context)) as keys:
        with database.read() as tx:
            log_id = read_log_id(tx)
        path = context.config.audit.witness or context.home.witness
        witness = Witness(path, keys, log_id=log_id, home=context.home.ident)
        known = witness.memory()
        if known is not None and str(path) not in known.files:
            yield ok("audit", f"the witness is {path} from the next start on")
            return
        derive = Keyring(database, keys).derived
        log = AuditLog(database, keys=keys, derive=derive, log_id=log_id, witness=witness)
        problems = log.damage()["problems"]
    for problem in problems:
        yield fail("audit", problem, fix="falaj audit verify names what was changed")
    if not problems:
        yield ok("audit", f"log {log_id} can be signed; its witness is {path}")


def _open_keys(context: DoctorContext) -> KeyService:
    return drivers.open_keys(context.home, context.config, first_start=False)


def check_zones(context: DoctorContext) -> Iterable[Finding]:
    for name, zone in context.config.zones.items():

        def check(context: DoctorContext, name: str = name, zone: ZoneConfig = zone) -> list[Finding]:
            return [ok(f"zone {name}", _try_zone(context, name, zone))]

        yield from guarded(f"zone {name}", check, context)
        yield from _misplaced(context, name, zone)
    if context.config.machine_zone is None:
        words = (
            "this machine names none of several zones: what a label restricts neither runs nor is served here"
        )
        yield warn("node", words, fix=f'[node] zone = "{context.config.default_zone}" in falaj.toml')


def _misplaced(context: DoctorContext, name: str, zone: ZoneConfig) -> Iterable[Finding]:
    """Yield what of a zone lies on this machine although the zone is elsewhere."""
    config, home = context.config, context.home
    folder = zone.blobs.path
    for what, named in (("tables", zone.tables.path), ("online", zone.online.path)):
        own = named or (None if folder is None else folder / what / name)
        if own is not None and (left := home.path / what / name).exists():
            words = f"{left} lies in the home, and not in the zone's folder"
            yield warn(f"zone {name}", words, fix=f"falaj down; mkdir -p {own.parent}; mv {left} {own}")
    in_home = zone.blobs.address is None and folder is None
    if in_home and config.machine_zone not in (None, name):
        words = f"its bytes lie in the home, on this machine, which is in zone {config.machine_zone}"
        yield warn(f"zone {name}", words, fix=f"name a folder in it: zones.{name}.blobs.path")


def _try_zone(context: DoctorContext, name: str, zone: ZoneConfig) -> str:
    """Write and delete in a folder, ask in a bucket; what was found."""
    if isinstance(zone.blobs, S3Bucket):
        _reach(zone.blobs)
        with suppress(NotFound):
            drivers.open_blobs(context.home, name, zone).size(BlobKey("doctor"))
        return f"bucket {zone.blobs.bucket} answers ({zone.jurisdiction})"
    if not context.is_made and zone.blobs.path is None:
        return f"its folder is {LATER}"
    store = drivers.open_blobs(context.home, name, zone)
    trial = BlobKey(new_id("doctor"))
    store.write(trial, [b"doctor"])
    store.delete(trial)
    return f"blobs can be written and deleted ({zone.jurisdiction})"


def _reach(bucket: S3Bucket) -> None:
    """Fail soon where nothing listens: the store itself would try for a minute."""
    if bucket.endpoint is not None:
        scheme, _, rest = bucket.endpoint.partition("://")
        host, _, port = rest.partition("/")[0].partition(":")
        number = int(port or (443 if scheme == "https" else 80))
        socket.create_connection((host, number), timeout=REACH_S).close()


def check_policies(context: DoctorContext) -> Iterable[Finding]:
    if not context.config.policies:
        return
    engine = PolicyEngine(all_operations().values())
    files = drivers.policy_files(context.home, context.config)
    for path in files:
        engine.confined(PolicyText(str(path), path.read_text()))
    if files:
        yield ok("policies", f"{', '.join(path.name for path in files)} can be used")
    else:
        named = ", ".join(context.config.policies)
        yield warn("policies", f"no file fits {named}", fix=f"put it into {context.home.path}")
