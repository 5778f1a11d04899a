"""Features on the command line: `falaj apply` and `falaj features …`, with their errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import falaj as fj
from command_line import CommandLine, command_line, make_template

TOML = """
[[entity]]
name = "driver"
type = "integer"

[[view]]
name = "trips"
entities = ["driver"]
columns = {km = "float", car = "text"}
ttl = "36500d"
source = "trips.csv"

[[view]]
name = "sums"
entities = ["driver"]
columns = {km = "float"}

[[view.aggregation]]
name = "km_7d"
column = "km"
function = "mean"
window = "7d"
"""

CSV = """driver,event_time,km,car
1,2024-06-01T08:00:00Z,1.5,red
2,2024-06-01T08:00:00Z,2.5,blue
1,2024-06-02T08:00:00Z,3.5,
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def home_with_rows(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the definitions applied, and rows in trips."""
    folder = tmp_path_factory.mktemp("furnished")
    shutil.copytree(template, folder, dirs_exist_ok=True)
    (folder / "features.toml").write_text(TOML)
    (folder / "trips.csv").write_text(CSV)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        with fj.open(folder / "home") as platform:
            platform.apply(folder)
            platform.ingest("trips", folder / "trips.csv")
    return folder


@pytest.fixture
def used(home_with_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=home_with_rows) as line:
        yield line


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        (line.folder / "features.toml").write_text(TOML)
        (line.folder / "trips.csv").write_text(CSV)
        yield line


@pytest.mark.slow
def test_definitions_are_applied_and_rows_are_ingested_joined_and_served(falaj: CommandLine) -> None:
    dry = falaj.done("apply", "--dry-run")
    applied = falaj.done("apply")
    again = falaj.done("apply", "features.toml")
    ingested = falaj.done(*applied.out.split("falaj ")[1].splitlines()[0].split())
    twice = falaj.done("features", "ingest", "sums", "trips.csv", "trips.csv", "--again")
    online = falaj.done(*twice.out.split("falaj ")[1].split())
    read = falaj.done("features", "read", "sums", "1", "3")
    from_file = falaj.done("features", "training-set", "a", "--spine", "trips.csv", "--views", "trips,sums")
    from_view = falaj.json(
        "features", "training-set", "b", "--spine", "trips", "--views", "sums", "--since", "2024-06-02"
    )

    assert "3 definitions would change" in dry.out
    assert "3 definitions changed" in applied.out
    assert "nothing has changed" in again.out
    assert ingested.out.startswith("trips: 3 rows added, 3 now, in version 1\n")
    assert twice.out.startswith("sums: 6 rows added, 6 now")
    assert online.out.startswith("sums: 2 keys online")
    assert read.out.splitlines() == [
        "key  event                 km_7d",
        "1    2024-06-02 08:00:00Z  2.5",
        "3    -                     -",
    ]
    assert from_file.out.startswith("training set a is ready: 3 rows, 7 columns, 2 views")
    assert (from_view["rows"], from_view["columns"][-1]) == (1, "sums__km_7d")
    assert falaj.done("features", "list").out.splitlines()[2].split()[:6] == [
        "sums",
        "1",
        "driver",
        "1",
        "6",
        "yes",
    ]
    assert "mean of km over 7d" in falaj.done("features", "show", "sums").out


@pytest.mark.slow
def test_a_file_is_added_once_and_what_was_assumed_is_said(falaj: CommandLine) -> None:
    falaj.done("apply")
    (falaj.folder / "naive.csv").write_text("driver,event_time,km,car,size\n9,2024-06-01 08:00:00,1,red,2\n")

    first = falaj.done("features", "ingest", "trips", "naive.csv")
    second = falaj.done("features", "ingest", "trips", "naive.csv")
    refused = falaj("features", "ingest", "trips", "naive.csv", "--strict")

    assert first.out.splitlines()[:3] == [
        "trips: 1 row added, 1 now, in version 1",
        "  note   naive.csv: event_time: 1 timestamp without a time zone, read as UTC",
        "  note   naive.csv: size: not a column of the view, left out",
    ]
    assert "note   naive.csv: was added before, 20" in second.out
    assert "trips: 0 rows added, 1 now" in second.out
    assert (refused.status, "strict is on" in refused.err) == (2, True)


@pytest.mark.slow
def test_a_changed_view_says_what_becomes_of_its_rows(used: CommandLine) -> None:
    (used.folder / "features.toml").write_text(TOML.replace('car = "text"', 'colour = "text"'))

    dry = used.done("apply", "--dry-run", "--keep-rows", "none")
    applied = used.done("apply")

    assert "  note   trips: 3 rows of version 1 not kept: as asked" in dry.out
    kept = ["3 rows of version 1 kept", "colour is new, and null in them", "car is removed"]
    assert "".join(f"  note   trips: {note}\n" for note in kept) in applied.out
    assert "features materialize trips" in applied.out


def test_a_changed_view_lists_its_changes(falaj: CommandLine) -> None:
    falaj.done("apply")
    (falaj.folder / "features.toml").write_text(TOML.replace('"7d"', '"8d"'))

    changes = falaj.json("apply")

    assert [(each["name"], each["change"], each["version"]) for each in changes] == [
        ("driver", "unchanged", None),
        ("trips", "unchanged", 1),
        ("sums", "changed", 2),
    ]
    assert changes[2]["differences"] == ["aggregations"]


def test_every_fault_of_a_file_is_shown_and_nothing_is_applied(falaj: CommandLine) -> None:
    wrong = TOML.replace('"36500d"', '"7 days"').replace('"mean"', '"mode"').replace("km_7d", "__x")
    (falaj.folder / "features.toml").write_text(wrong)

    ran = falaj("apply")

    assert ran.status == 2
    assert "features.toml:10 view[0].ttl" in ran.err
    assert 'fix      ttl = "7d"' in ran.err
    assert "features.toml:21 view[1].aggregation[0].function" in ran.err
    assert falaj.json("features", "list")["items"] == []


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("apply none.toml", 2, "none.toml"),
        ("apply trips.csv", 2, "a TOML or Python file"),
        ("features ingest trips none.csv", 2, "No such file"),
        ("features ingest trips empty.csv", 2, "which is empty"),
        ("features ingest none trips.csv", 1, "there is no view 'none'"),
        ("features ingest trips wrong.csv", 2, "view trips.km"),
        ("features ingest trips trips.csv wrong.csv", 2, "already ingested: trips.csv"),
        ("features training-set t --spine none.csv --views trips", 2, "No such file"),
        ("features training-set t --spine none --views trips", 1, "view:none"),
        ("features training-set t --spine trips.csv --views none", 1, "there is no view 'none'"),
        ("features training-set t --spine trips.csv --views sums", 1, "has no rows"),
        ("features training-set t --spine wrong.csv --views trips", 2, "spine.driver"),
        ("features training-set t --spine trips --views trips --since soon", 2, "--since"),
        ("features training-set T --spine trips --views trips", 2, "NAME"),
        ("features show none", 1, "there is no view 'none'"),
        ("features show trips --version 9", 1, "has no version 9"),
        ("features read trips 1", 1, "features.materialize"),
        ("features read none 1", 1, "there is no view 'none'"),
        ("features materialize sums", 1, "has no rows"),
    ],
)
def test_wrong_input_is_refused_with_a_message(
    used: CommandLine, command: str, status: int, words: str
) -> None:
    (used.folder / "empty.csv").touch()
    (used.folder / "wrong.csv").write_text("a,event_time\n1,2024-06-01T08:00:00Z\n")

    ran = used(*command.split())

    assert ran.status == status
    assert words in ran.err
    if "training-set" in command:
        assert used.json("features", "training-sets")["items"] == []


@pytest.mark.slow
def test_sql_that_reads_files_is_refused(falaj: CommandLine) -> None:
    (falaj.folder / "features.toml").write_text(
        TOML.replace('source = "trips.csv"', "sql = \"SELECT * FROM read_csv('trips.csv')\"")
    )
    falaj.done("apply")

    ran = falaj("features", "ingest", "trips", "trips.csv")

    assert ran.status == 2
    assert "a query over source and nothing else" in ran.err
    assert falaj.json("features", "show", "trips")["table_version"] is None


MORE = "driver,event_time,km,car\n1,2024-06-01T09:00:00Z,7.5,\n"
SPINE = "driver,event_time\n1,2024-06-01T10:00:00Z\n"


@pytest.mark.slow
def test_the_files_of_a_first_load_are_history_and_later_rows_are_known_when_they_come_in(
    falaj: CommandLine,
) -> None:
    falaj.done("apply")
    (falaj.folder / "more.csv").write_text(MORE)
    (falaj.folder / "spine.csv").write_text(SPINE)

    first = falaj.done("features", "ingest", "sums", "trips.csv", "more.csv")
    falaj.done("features", "ingest", "trips", "trips.csv")
    late = falaj.done("features", "ingest", "trips", "more.csv")
    made = falaj.done("features", "training-set", "a", "--spine", "spine.csv", "--views", "trips,sums")
    falaj.done("features", "load", "a", "--output", "a.arrow")

    rows = pa.ipc.open_stream((falaj.folder / "a.arrow").read_bytes()).read_all().to_pydict()
    assert "known from" not in first.out + made.out
    assert "; known from 20" in late.out.splitlines()[0]
    assert "--backfill" in late.out
    assert (rows["trips__km"], rows["sums__km_7d"]) == ([1.5], [4.5])
    assert "known at    ingestion: when rows came in" in falaj.done("features", "show", "trips").out


@pytest.mark.slow
def test_a_back_fill_is_history_as_well(falaj: CommandLine) -> None:
    falaj.done("apply")
    (falaj.folder / "more.csv").write_text(MORE)
    falaj.done("features", "ingest", "trips", "trips.csv")

    done = falaj.json("features", "ingest", "trips", "more.csv", "--backfill")

    assert [each["known_from"] for each in done] == [None]


@pytest.mark.slow
def test_a_view_by_event_time_is_named_when_it_is_joined(falaj: CommandLine) -> None:
    (falaj.folder / "features.toml").write_text(TOML.replace("ttl =", 'known_at = "event_time"\nttl ='))
    falaj.done("apply")
    for view in ("trips", "sums"):
        falaj.done("features", "ingest", view, "trips.csv")

    made = falaj.done("features", "training-set", "a", "--spine", "trips.csv", "--views", "trips,sums")

    assert "rows of trips count as known at their event time, also late ones" in made.out
    assert "event_time: when rows happened" in falaj.done("features", "show", "trips").out


def test_known_at_says_what_is_allowed(falaj: CommandLine) -> None:
    (falaj.folder / "features.toml").write_text(TOML.replace("ttl =", 'known_at = "arrival"\nttl ='))

    ran = falaj("apply")

    assert "features.toml:10 view[0].known_at" in ran.err
    assert "'created_time', 'ingestion' or 'event_time'" in ran.err
