"""Homes on one metadata database must see the same stores: one that does not is refused when it starts.

A store has an id, in the database and in a marker file beside its bytes. A home that finds another id there, or none,
looks at another folder. The marker is named after the platform: several platforms may share a folder.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from falaj.assembly import drivers
from falaj.assembly.home import Home, write_once
from falaj.drivers.fsync import make_directories
from falaj.errors import ConfigInvalid, Conflict, Fault
from falaj.governance.audit.log import read_log_id
from falaj.governance.residency.stores import RegisteredStore, register_stores, registered_stores
from falaj.ports.metadata import Database
from falaj.records.config import Config
from falaj.records.names import new_id


class ConfiguredStore(NamedTuple):
    """A store that falaj.toml names; `marker` is none for a bucket or a server, whose address identifies it."""

    zone: str
    kind: str
    place: str
    marker: Path | None


def require_shared_stores(home: Home, config: Config, database: Database) -> None:
    """Register the stores that are new. Raise ConfigInvalid if another home has registered others than this one sees.

    The home that registered a store may move it.
    """
    with database.read() as tx:
        platform, known = read_log_id(tx), registered_stores(tx)
    changed = [
        found
        for each in _stores(home, config, platform)
        if (before := known.get((each.zone, each.kind))) is None or before.home == home.ident
        if (found := _registration(home, each, before)) != before
    ]
    if changed:
        with suppress(Conflict), database.write() as tx:  # another process may register them at the same time
            register_stores(tx, changed)
        with database.read() as tx:
            known = registered_stores(tx)
    if faults := store_faults(home, config, platform, known):
        raise ConfigInvalid(
            "another home on the same metadata database has stores that this one does not see", faults=faults
        )


def store_faults(
    home: Home, config: Config, platform: str, known: dict[tuple[str, str], RegisteredStore]
) -> list[Fault]:
    """Return a fault for each configured store that is not the registered one."""
    configured = _stores(home, config, platform)
    pairs = ((each, known.get((each.zone, each.kind))) for each in configured)
    return [_fault(each, found) for each, found in pairs if found and not _is_same(home, each, found)]


def _is_same(home: Home, configured: ConfiguredStore, registered: RegisteredStore) -> bool:
    is_of_one_machine = configured.kind == "online" and configured.marker is not None
    is_here = not is_of_one_machine or registered.host == socket.gethostname()
    return registered.home == home.ident or (_seen_id(configured) == registered.id and is_here)


def _fault(configured: ConfiguredStore, registered: RegisteredStore) -> Fault:
    setting = f"zones.{configured.zone}.{configured.kind}"
    fixes = {
        "blobs": f"name the same bucket, or a folder that both machines see, as {setting}.path on both",
        "tables": f"move the folder to where both machines see it, and name it as {setting}.path on both",
        "online": f'{setting}.driver = "none" on this machine; homes on one machine may share {setting}.path',
    }
    return Fault(
        where=setting,
        given=configured.place,
        allowed=f"the store that {registered.home} on {registered.host} has in {registered.place}",
        fix=fixes[configured.kind],
    )


def _stores(home: Home, config: Config, platform: str) -> Iterator[ConfiguredStore]:
    for name, zone in config.zones.items():
        if zone.blobs.address is not None:
            yield ConfiguredStore(name, "blobs", zone.blobs.address, None)
        else:
            yield _in_folder(name, "blobs", zone.blobs.path or home.blobs / name, platform)
        with suppress(
            ConfigInvalid
        ):  # a zone elsewhere without tables here: its rows are refused when they come
            yield _in_folder(name, "tables", drivers.tables_folder(home, config, name), platform)
    for name, place in drivers.online_places(home, config):
        marker = None if place.file is None else place.file.with_name(f"{place.file.name}.{platform}")
        yield ConfiguredStore(name, "online", place.address, marker)


def _in_folder(zone: str, kind: str, folder: Path, platform: str) -> ConfiguredStore:
    return ConfiguredStore(zone, kind, str(folder.absolute()), folder / f".store.{platform}")


def _seen_id(configured: ConfiguredStore) -> str | None:
    """Return the id of the store that this home sees; none if it has no marker."""
    if configured.marker is None:
        return configured.place
    try:
        return configured.marker.read_text().strip()
    except FileNotFoundError:
        return None


def _registration(home: Home, configured: ConfiguredStore, before: RegisteredStore | None) -> RegisteredStore:
    ident = _seen_id(configured)
    if ident is None and configured.marker is not None:  # a new store, or one that was restored without it
        ident = _mark(configured.marker, before.id if before is not None else new_id("store"))
    zone, kind, place, _ = configured
    return RegisteredStore(zone, kind, str(ident), home.ident, socket.gethostname(), place)


def _mark(marker: Path, ident: str) -> str:
    """Write the marker unless another process was quicker; return the id in it."""
    make_directories(marker.parent)
    write_once(marker, ident)
    return marker.read_text().strip()
