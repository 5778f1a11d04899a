"""Two homes on one PostgreSQL: stores that the second cannot see are refused when it starts, not when they are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.assembly import stores
from falaj.assembly.doctor import examine
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.errors import ConfigInvalid, Conflict
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from platforms import URL_VARIABLE, Clock, OwnPlatform, configuration

MOMENT = pa.timestamp("us", "UTC")
ZONE = '[zones.local]\njurisdiction = "AE"\n'

Open = Callable[..., OwnPlatform]


@pytest.fixture
def open_as(tmp_path: Path, schema_on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open the home of this name on the one database, with further settings of its zone."""
    monkeypatch.setenv(URL_VARIABLE, schema_on_postgres)
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    opened = list[OwnPlatform]()
    keys = f'[keys]\npath = "{tmp_path / "key.json"}"\n'

    def open_home_as(name: str, settings: str = "") -> OwnPlatform:
        home = open_home(tmp_path / name, tmp_path / "config")
        home.toml.write_text(configuration(schema_on_postgres, f"{ZONE}{settings}\n{keys}"))
        opened.append(OwnPlatform(assemble(home, as_owner=True, clock=Clock()), Clock()))
        return opened[-1]

    yield open_home_as
    for each in opened:
        each.close()


def shared(tmp_path: Path, online: str = 'driver = "none"') -> str:
    return f"""
blobs.path = "{tmp_path / "shared" / "blobs"}"
tables.path = "{tmp_path / "shared" / "tables"}"
online = {{ {online} }}
"""


def put_trips(platform: OwnPlatform, km: float = 1.5) -> None:
    view = FeatureView(
        name="trips", entities=("driver",), columns=(Feature(name="km", type=ColumnType.FLOAT),)
    )
    platform.features.apply(
        entities=(Entity(name="driver", key="driver", type=ColumnType.INTEGER),), views=(view,)
    )
    rows = pa.table({"driver": [1], "event_time": pa.array([1], MOMENT), "km": [km]})
    platform.ingest("trips", rows)


@pytest.mark.slow
def test_a_second_home_with_stores_of_its_own_is_refused(open_as: Open) -> None:
    put_trips(open_as("one"))

    with pytest.raises(ConfigInvalid) as caught:
        open_as("two")

    assert [fault.where for fault in caught.value.faults] == [
        "zones.local.blobs",
        "zones.local.tables",
        "zones.local.online",
    ]
    assert "tables.path" in (caught.value.faults[1].fix or "")
    open_as("one").features.scan("trips")


@pytest.mark.slow
def test_doctor_says_so_too(open_as: Open, tmp_path: Path) -> None:
    open_as("one")
    with pytest.raises(ConfigInvalid):
        open_as("two")

    found = {
        name: [each for each in examine(tmp_path / name) if each.check == "stores"] for name in ("one", "two")
    }

    assert [each.status for each in found["one"]] == ["ok"]
    assert [each.status for each in found["two"]] == ["fail"] * 3
    assert all(each.fix for each in found["two"])


@pytest.mark.slow
def test_homes_that_share_their_folders_work_together(open_as: Open, tmp_path: Path) -> None:
    one = open_as("one", shared(tmp_path, online=""))
    put_trips(one)
    one.features.materialize("trips")

    two = open_as("two", shared(tmp_path))

    assert two.features.scan("trips").read_all()["km"].to_pylist() == [1.5]
    put_trips(two, km=2.5)
    assert one.features.scan("trips").read_all().num_rows == 2
    with pytest.raises(Conflict, match="no online store"):
        two.features.read("trips", keys=("1",))


@pytest.mark.slow
def test_homes_on_one_machine_may_share_online_values(open_as: Open, tmp_path: Path) -> None:
    both = shared(tmp_path, online=f'path = "{tmp_path / "shared" / "online"}"')
    one = open_as("one", both)
    put_trips(one)
    one.features.materialize("trips")

    assert open_as("two", both).features.read("trips", keys=("1",)).rows[0].values == (1.5,)


def test_another_machine_may_not_share_the_online_file(
    open_as: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = shared(tmp_path, online=f'path = "{tmp_path / "shared" / "online"}"')
    open_as("one", both)
    monkeypatch.setattr(stores.socket, "gethostname", lambda: "another")

    with pytest.raises(ConfigInvalid) as caught:
        open_as("two", both)

    assert [fault.where for fault in caught.value.faults] == ["zones.local.online"]


def test_a_folder_that_is_not_mounted_is_refused_for_the_second_home(open_as: Open, tmp_path: Path) -> None:
    open_as("one", shared(tmp_path))
    open_as("two", shared(tmp_path)).close()

    with pytest.raises(ConfigInvalid) as caught:
        open_as("two", shared(tmp_path).replace("shared/tables", "empty/tables"))

    assert [fault.where for fault in caught.value.faults] == ["zones.local.tables"]


@pytest.mark.slow
def test_the_home_that_registered_a_store_may_move_it(open_as: Open, tmp_path: Path) -> None:
    one = open_as("one")
    put_trips(one)
    one.close()
    shutil.move(tmp_path / "one" / "tables" / "local", tmp_path / "shared" / "tables")
    shutil.move(tmp_path / "one" / "blobs" / "local", tmp_path / "shared" / "blobs")

    one = open_as("one", shared(tmp_path, online=""))

    assert one.features.scan("trips").read_all().num_rows == 1
    assert open_as("two", shared(tmp_path)).features.scan("trips").read_all().num_rows == 1


def test_a_home_on_its_own_database_opens_without_its_markers(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")
    assemble(home, as_owner=True).close()
    markers = [*home.path.glob("*/*/.store.*"), *home.path.glob("online/*.*")]
    assert len(markers) == 3
    for marker in markers:
        marker.unlink()

    assemble(home, as_owner=True).close()

    assert all(marker.exists() for marker in markers)


@pytest.mark.slow
def test_a_copy_of_a_home_that_runs_elsewhere_is_refused(open_as: Open, tmp_path: Path) -> None:
    put_trips(open_as("one"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")

    with pytest.raises(Conflict, match="A second machine needs a home of its own"):
        open_as("two")

    open_as("one").features.scan("trips")


@pytest.mark.slow
def test_a_home_that_was_moved_goes_on(open_as: Open, tmp_path: Path) -> None:
    first = open_as("one")
    put_trips(first)
    first.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")

    assert open_as("two").features.scan("trips").read_all().num_rows == 1
