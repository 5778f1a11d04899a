"""A platform that is backed up, destroyed and restored in this process, and what it holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from falaj.assembly.backup.backup import back_up
from falaj.assembly.backup.restore import RestoreOptions, check_backup, restore
from falaj.assembly.platform import assemble
from falaj.records.backups import BackupResult, RestoreResult
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from platforms import OwnPlatform

NOON = "2026-01-01T12:00:00+00:00"


@contextmanager
def unwatched(_what: str, _total: int | None) -> Iterator[Callable[[int], None]]:
    yield lambda _amount: None


def taken(platform: OwnPlatform, folder: Path, *, keys: Path | None = None, **options: Any) -> BackupResult:
    return back_up(
        platform.platform, platform.home, folder / "backups", keys=keys, watch=unwatched, **options
    )


def restored(folder: Path, config: Path | None = None, **options: Any) -> RestoreResult:
    config = config or folder / "config"
    return restore(
        folder / "backups", folder / "home", config, options=RestoreOptions(**options), watch=unwatched
    )


def checked(folder: Path, config: Path | None = None, **options: Any) -> RestoreResult:
    config = config or folder / "config"
    return check_backup(folder / "backups", config, options=RestoreOptions(**options), watch=unwatched)


def reopened(platform: OwnPlatform) -> OwnPlatform:
    """The platform on the restored home."""
    return OwnPlatform(assemble(platform.home, as_owner=True, clock=platform.clock), platform.clock)


def put_rows(platform: OwnPlatform, name: str, rows: Iterable[tuple[str, float]]) -> str:
    table = pa.table(
        {
            "customer": pa.array([key for key, _ in rows]),
            "at": pa.array([NOON] * len(list(rows))),
            "spend": pa.array([value for _, value in rows]),
        }
    )
    table = table.set_column(1, "at", table["at"].cast(pa.timestamp("us", "UTC")))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return str(platform.put(name, sink.getvalue().to_pybytes()).id)


def fill(platform: OwnPlatform) -> None:
    """A blob, a view with rows that are online, and a training set."""
    platform.put("figures", b"quarterly figures")
    view = FeatureView(
        name="facts",
        entities=("customer",),
        event_time="at",
        columns=(Feature(name="spend", type=ColumnType.FLOAT),),
    )
    platform.features.apply(entities=(Entity(name="customer", key="customer"),), views=(view,))
    platform.features.ingest("facts", data=put_rows(platform, "rows", [("a", 1.5), ("b", 2.5)]))
    platform.features.materialize("facts")
    platform.features.training_set("churn", spine="view:facts", views=("facts",))


def destroy(platform: OwnPlatform) -> None:
    platform.close()
    shutil.rmtree(platform.home.path)


def contents(platform: OwnPlatform) -> dict[str, Any]:
    return {
        "blob": platform.get("figures"),
        "view": platform.features.scan("facts").read_all()["spend"].to_pylist(),
        "training set": platform.features.load("churn").read_all()["facts__spend"].to_pylist(),
        "online": [row.values for row in platform.features.read("facts", keys=("a", "b")).rows],
    }


WHOLE = {
    "blob": b"quarterly figures",
    "view": [1.5, 2.5],
    "training set": [1.5, 2.5],
    "online": [(1.5,), (2.5,)],
}
