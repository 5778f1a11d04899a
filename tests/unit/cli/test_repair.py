"""`falaj doctor --repair`: online values are rebuilt, and damaged tables are named with what can be done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import falaj as fj
from command_line import CommandLine, command_line
from falaj.errors import Damaged

pytestmark = pytest.mark.slow

MOMENT = pa.timestamp("us", "UTC")
KEYS = tuple(str(number) for number in range(100))


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    """A home with a view of two ingestions, of which the first is online."""
    with command_line(tmp_path, capsys) as line:
        with fj.open(line.home) as platform:
            platform.apply(
                [
                    fj.Entity(name="driver", key="driver", type="integer"),
                    fj.FeatureView(
                        name="trips", entities=("driver",), columns=(fj.Feature(name="km", type="float"),)
                    ),
                ]
            )
            platform.ingest("trips", trips(100, at=0))
            platform.features.materialize("trips")
            platform.ingest("trips", trips(1, at=1000))
        yield line


def trips(count: int, *, at: int) -> pa.Table:
    times = pa.array([at + number for number in range(count)], MOMENT)
    return pa.table({"driver": range(count), "event_time": times, "km": [n + at * 1.0 for n in range(count)]})


def online_values(home: Path) -> Any:
    with fj.open(home) as platform:
        return platform.features.read("trips", keys=KEYS)


def test_a_sound_home_is_left_alone(falaj: CommandLine) -> None:
    before = online_values(falaj.home)

    ran = falaj("doctor", "--repair")

    assert ran.status == 0
    assert "view trips is what was written" in ran.out
    assert online_values(falaj.home) == before


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_online_values_are_rebuilt_as_they_were(falaj: CommandLine, harm: str) -> None:
    before = online_values(falaj.home)
    file = falaj.home / "online" / "local"
    content = file.read_bytes()
    if harm == "lose":
        file.unlink()
    else:
        file.write_bytes(content[:9000] if harm == "cut" else content.replace(b"\0" + b"57", b"\0" + b"5x"))
    with pytest.raises(Damaged):
        online_values(falaj.home)

    ran = falaj("doctor", "--repair")

    assert ran.status == 0
    assert "view trips was rebuilt from its table: 100 keys" in ran.out
    assert online_values(falaj.home) == before
    assert (falaj.home / "online" / "local.damaged").exists() is (harm != "lose")


@pytest.mark.slow
def test_a_damaged_table_is_named_with_what_can_be_done(falaj: CommandLine) -> None:
    file = next((falaj.home / "tables").rglob("part-*.parquet"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    ran = falaj("doctor", "--repair")

    assert ran.status == 1
    assert "view trips" in ran.out
    assert file.name in ran.out
    assert "from a backup" in ran.out


def test_a_home_that_is_held_is_not_repaired(falaj: CommandLine) -> None:
    with fj.open(falaj.home):
        ran = falaj("doctor", "--repair")

    assert ran.status == 1
    assert "home.busy" in ran.err


ZONE_ELSEWHERE = """
[zones.local]
jurisdiction = "AE"
default = true

[zones.far]
jurisdiction = "DE"
blobs = { driver = "s3", bucket = "falaj", endpoint = "http://127.0.0.1:9" }

[node]
zone = "local"
"""


def test_a_zone_without_tables_here_does_not_keep_the_others_from_being_repaired(falaj: CommandLine) -> None:
    (falaj.home / "falaj.toml").write_text(ZONE_ELSEWHERE)
    (falaj.home / "online" / "local").unlink()

    ran = falaj("doctor", "--repair")

    assert ran.status == 0, ran.out
    assert "view trips was rebuilt from its table: 100 keys" in ran.out
