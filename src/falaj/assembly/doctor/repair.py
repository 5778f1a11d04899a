"""`falaj doctor --repair`: hash every table, rebuild online values from the tables, and say what else can be done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from falaj.assembly import drivers
from falaj.assembly.config import read_config
from falaj.assembly.doctor.findings import fail, failures, ok, warn
from falaj.assembly.home import Home, find_home
from falaj.assembly.platform import LocalPlatform, assemble
from falaj.errors import FalajError, InvalidInput
from falaj.features import store
from falaj.features.table_versions.published import check_tables
from falaj.records.doctor import Finding


def repair(path: Path | None = None) -> list[Finding]:
    """Check and mend what the home at `path` keeps. Raise HomeBusy if a platform runs on it."""
    home = find_home(path)
    if home is None:
        raise InvalidInput.at("home", given=str(path or "the default"), allowed="a home, made by falaj up")
    with home.lock():
        try:
            damaged = _set_aside_damaged(home)
            platform = assemble(home, as_owner=True)
        except FalajError as error:
            return failures("platform", error)
        try:
            return [*_check_tables(platform), *_rebuild_online(platform, damaged)]
        finally:
            platform.close()


def _check_tables(platform: LocalPlatform) -> Iterator[Finding]:
    sound = 0
    for each, error in check_tables(platform.services.features.backends):
        if error is None:
            sound += 1
        else:
            yield from failures(f"{each.subject}", error)
    yield ok("tables", f"{sound} are what was written")


def _set_aside_damaged(home: Home) -> dict[str, str | None]:
    """Set damaged online stores aside; return where they are kept, by zone."""
    places = drivers.online_places(home, read_config(home.toml))
    return {name: place.set_aside("damaged") for name, place in places if not place.is_sound()}


def _rebuild_online(platform: LocalPlatform, damaged: dict[str, str | None]) -> Iterator[Finding]:
    online = platform.services.features.online_features
    for zone, kept in damaged.items():
        fix = None if kept is None else f"{kept} is what it was; remove it"
        yield warn("online", f"the store of zone {zone} was damaged", fix=fix)
    with platform.database.read() as tx:
        views = store.online_views(tx)
    for view in views:
        name = f"view {view.definition.name}"
        if not platform.config.zones[view.zone].online.is_here:
            continue
        try:
            if online.has_values(view):
                yield ok("online", f"{name} is what was written")
            else:
                yield ok("online", f"{name} was rebuilt from its table: {online.rebuild(view)} keys")
        except FalajError as error:
            yield fail("online", f"{name} cannot be rebuilt: {error.message}", fix="repair its table first")
