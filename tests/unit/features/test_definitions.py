"""Definition files: parsed completely, or rejected with every fault and its line."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from falaj.errors import InvalidInput
from falaj.records.features import AggregateFunction, Aggregation, ColumnType, Entity, Feature, FeatureView
from falaj.sdk.definition_files.features import read_definitions

TOML = '''
[[entity]]
name = "driver"
type = "integer"

[[view]]
name = "trips"
entities = ["driver"]
event_time = "at"
columns = {km = "float", car = "text"}
ttl = "7d"
source = "trips.csv"
only = ["AE"]

[[view]]
name = "sums"
entities = ["driver"]
sql = """
SELECT *   # ttl = "1d"
FROM source
"""

[view.columns]
km = "float"

[[view.aggregation]]
name = "km_12h"
column = "km"
function = "sum"
window = "12h"
'''

PYTHON = """
import falaj as fj
from beside import HOURS

DRIVER = fj.Entity(name="driver", key="driver", type="integer")
VIEWS = [
    fj.FeatureView(name=name, entities=("driver",), columns=(fj.Feature(name="km", type="float"),), ttl=HOURS)
    for name in ("a", "b")
]
"""

WRONG = '''colour = 1

[[entity]]
nam = "driver"
type = "float"

[[view]]
name = "Trips"
entities = []
ttl = "7 days"
source = "none.parquet"
sql = """
ttl = 'not here'
"""
columns = {km = "number"}

[[view]]
name = "b"
entities = ["driver"]
colums = {km = "float"}

[[view.aggregation]]
name = "a"
column = "km"
function = "mode"
window = 5
'''


def test_toml_defines_entities_and_views(tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(TOML)
    (tmp_path / "trips.csv").touch()

    found = read_definitions(tmp_path)

    km = Feature(name="km", type=ColumnType.FLOAT)
    trips, sums = found.views
    assert found.entities == [Entity(name="driver", key="driver", type=ColumnType.INTEGER)]
    assert trips == FeatureView(
        name="trips",
        entities=("driver",),
        columns=(km, Feature(name="car", type=ColumnType.TEXT)),
        event_time="at",
        ttl=timedelta(days=7),
        only=("AE",),
    )
    assert sums.aggregations == (
        Aggregation(name="km_12h", column="km", function=AggregateFunction.SUM, window=timedelta(hours=12)),
    )
    assert found.sources == {"trips": tmp_path / "trips.csv"}


def test_python_definitions_are_read_from_module_level(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from datetime import timedelta\nHOURS = timedelta(hours=3)\n")
    (tmp_path / "features.py").write_text(PYTHON)
    (tmp_path / "train.py").write_text("raise SystemExit('this must not run')")

    found = read_definitions(tmp_path)

    assert [entity.name for entity in found.entities] == ["driver"]
    assert [(view.name, view.ttl) for view in found.views] == [(n, timedelta(hours=3)) for n in ("a", "b")]


def test_all_faults_of_all_files_are_named_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(WRONG)
    (tmp_path / "features.py").write_text("import falaj as fj\n\nX = fj.Entity(\n    name='x y', key='')\n")

    with pytest.raises(InvalidInput) as refused:
        read_definitions(tmp_path)

    named = [fault.where.removeprefix(f"{tmp_path}/") for fault in refused.value.faults]
    assert sorted(named) == sorted(
        [
            "features.toml:1 colour",
            "features.toml:4 entity[0].nam",
            "features.toml:3 entity[0].name",
            "features.toml:3 entity[0].key",
            "features.toml:5 entity[0].type",
            "features.toml:8 view[0].name",
            "features.toml:9 view[0].entities",
            "features.toml:10 view[0].ttl",
            "features.toml:11 view[0].source",
            "features.toml:15 view[0].columns.km",
            "features.toml:20 view[1].colums",
            "features.toml:17 view[1].columns",
            "features.toml:25 view[1].aggregation[0].function",
            "features.toml:26 view[1].aggregation[0].window",
            "features.py:3 Entity name",
            "features.py:3 Entity key",
        ]
    )
    ttl = next(fault for fault in refused.value.faults if fault.where.endswith(".ttl"))
    assert (ttl.given, ttl.fix) == ("7 days", 'ttl = "7d"')


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("features.toml", "x = ", "TOML in UTF-8"),
        ("features.toml", "", "no definition"),
        ("features.toml", "entity = 3", "[[entity]]"),
        ("features.toml", '[[entity]]\nname="a"\n[[entity]]\nname="a"', "entity a again"),
        ("features.py", "x = (", "never closed"),
        ("features.py", "raise SystemExit(3)", "SystemExit"),
        ("features.py", "import none_such", "none_such"),
        (
            "features.py",
            "import falaj as fj\na = fj.Entity(name='a', key='a')\nb = fj.Entity(name='a', key='b')",
            "again",
        ),
    ],
)
def test_invalid_definition_files_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(InvalidInput) as refused:
        read_definitions(tmp_path / name)

    assert words in str(refused.value)


@pytest.mark.parametrize("path", ["none.toml", "empty", "rows.csv"])
def test_a_path_without_definitions_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").touch()

    with pytest.raises(InvalidInput, match="PATH"):
        read_definitions(tmp_path / path)


RULES = """
[[view]]
name = "calls"
entities = ["customer"]
invalid_rows = "quarantine"
max_invalid_share = 0.05
max_ahead = "1h"
freshness = "2d"
unique = true

[view.columns]
minutes = {type = "float", min = 0, max = 1440.5, not_null = true, max_null_rate = 0.1}
plan = {type = "text", allowed = ["small", "large"]}
"""


def test_rules_are_part_of_a_definition(tmp_path: Path) -> None:
    (tmp_path / "features.toml").write_text(RULES)

    (view,) = read_definitions(tmp_path).views

    minutes, plan = view.columns
    assert list(minutes.rules.values()) == ["a value in every row", "at least 0", "at most 1440.5"]
    assert list(plan.rules.values()) == ["one of small, large"]
    assert (view.invalid_rows, view.max_invalid_share, view.unique) == ("quarantine", 0.05, True)
    assert (view.max_ahead, view.freshness) == (timedelta(hours=1), timedelta(days=2))


UNFIT = {
    "a range of texts": (
        "plan",
        'type = "text", min = 1',
        "min and max are rules of integer and float columns",
    ),
    "an empty range": ("n", 'type = "float", min = 2, max = 1', "min must not exceed max"),
    "a bound of another type": ("n", 'type = "integer", min = 0.5', "values of its type, integer"),
    "an allowed value of another type": (
        "plan",
        'type = "text", allowed = ["a", 1]',
        "values of its type, text",
    ),
    "allowed booleans": ("n", 'type = "boolean", allowed = [1]', "integer, float and text columns"),
    "not a number": ("n", 'type = "float", max = nan', "finite number"),
    "a rate above 1": ("n", 'type = "float", max_null_rate = 1.5', "less than or equal to 1"),
    "no allowed value": ("n", 'type = "float", allowed = []', "one at least"),
}


@pytest.mark.parametrize(("column", "rules", "allowed"), UNFIT.values(), ids=UNFIT)
def test_rules_that_do_not_fit_their_column_are_refused(
    tmp_path: Path, column: str, rules: str, allowed: str
) -> None:
    definition = f'[[view]]\nname = "calls"\nentities = ["customer"]\ncolumns = {{{column} = {{{rules}}}}}\n'
    (tmp_path / "features.toml").write_text(definition)

    with pytest.raises(InvalidInput) as refused:
        read_definitions(tmp_path)

    assert any(allowed in str(fault.allowed) for fault in refused.value.faults)
    assert all(f"columns.{column}" in fault.where for fault in refused.value.faults)
