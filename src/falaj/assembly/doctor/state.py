"""The checks of what a platform keeps: home, keys, metadata, blobs, policies."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from falaj.assembly import drivers
from falaj.assembly.config import reveal
from falaj.assembly.doctor.findings import LATER, DoctorContext, fail, guarded, ok, warn
from falaj.control.services import all_operations
from falaj.errors import NotFound
from falaj.governance.policy.engine import PolicyEngine, PolicyText
from falaj.ports.blobs import BlobKey
from falaj.records.config import Pkcs11Config, S3Bucket, ZoneConfig
from falaj.records.doctor import Finding
from falaj.records.names import new_id

REACH_S = 3


def check_home(context: DoctorContext) -> Iterable[Finding]:
    path = context.home.path
    if not path.exists():
        yield _unmade_home(path)
    elif not path.is_dir():
        yield fail("home", f"{path} is not a directory", fix="name another with --home or FALAJ_HOME")
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield fail("home", f"{path} cannot be read and written", fix=f"chown -R {os.geteuid()} {path}")
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


def check_zones(context: DoctorContext) -> Iterable[Finding]:
    for name, zone in context.config.zones.items():

        def check(context: DoctorContext, name: str = name, zone: ZoneConfig = zone) -> list[Finding]:
            return [ok(f"zone {name}", _try_zone(context, name, zone))]

        yield from guarded(f"zone {name}", check, context)


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
