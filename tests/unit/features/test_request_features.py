"""Request-time features: the grammar, the types, the values, and the columns of training sets."""

from __future__ import annotations

import math
import struct
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.errors import AlreadyExists, InvalidInput
from falaj.features import arrow_tables
from falaj.features.request_time.evaluation import ValueColumn, column_of, evaluate
from falaj.features.request_time.training_columns import add_columns, column_types
from falaj.records.expressions.declarations import resolve_features
from falaj.records.expressions.syntax import MAX_DEPTH, ExpressionError, names_of, parse
from falaj.records.expressions.types import guess_types, require_feature_type
from falaj.records.features import ColumnType, Entity, Feature, FeatureView, RequestFeature

if TYPE_CHECKING:
    from conftest import FeaturesEnv

INTEGER, FLOAT, BOOLEAN = ColumnType.INTEGER, ColumnType.FLOAT, ColumnType.BOOLEAN
TEXT, MOMENT = ColumnType.TEXT, ColumnType.MOMENT
TYPES = {"i": INTEGER, "j": INTEGER, "x": FLOAT, "y": FLOAT, "b": BOOLEAN, "t": TEXT, "m": MOMENT}
LARGE = 2**53 + 1


def value(expression: str, **given: Any) -> Any:
    """Return the value of an expression for one row; None if it is missing."""
    node = parse(expression)
    require_feature_type(node, TYPES)
    columns = {name: column_of(TYPES[name], [each]) for name, each in given.items()}
    found = evaluate([("f", expression)], columns, 1)["f"]
    return None if found.is_missing[0] else found.values[0].item()


@pytest.mark.parametrize(
    ("expression", "given", "wanted"),
    [
        ("x / y", {"x": 6.0, "y": 4.0}, 1.5),
        ("1 + 2 * 3 - -4", {}, 11),
        ("2 ** 3 ** 2", {}, 512.0),
        ("-2 ** 2", {}, -4.0),
        ("i + 1", {"i": LARGE}, LARGE + 1),
        ("i % 10", {"i": LARGE}, LARGE % 10),
        ("i % j", {"i": -7, "j": 3}, 2),
        ("i % j", {"i": -(2**63), "j": -1}, 0),
        ("i % j", {"i": 1, "j": 0}, None),
        ("i * j", {"i": 2**40, "j": 2**40}, None),
        ("i * j", {"i": -(2**62), "j": 2}, -(2**63)),
        ("i + j", {"i": 2**63 - 1, "j": 1}, None),
        ("i - j", {"i": -(2**63), "j": 1}, None),
        ("abs(i)", {"i": -(2**63)}, None),
        ("x / 0", {"x": 1.0}, math.inf),
        ("x / 0", {"x": 0.0}, None),
        ("10 ** 10 ** 10", {}, math.inf),
        ("(-8) ** 0.5", {}, None),
        ("0 ** -1", {}, math.inf),
        ("exp(x)", {"x": 1000.0}, math.inf),
        ("exp(x)", {"x": -math.inf}, 0.0),
        ("log(x)", {"x": 0.0}, -math.inf),
        ("log(x)", {"x": -1.0}, None),
        ("log1p(x)", {"x": -1.0}, -math.inf),
        ("sqrt(x)", {"x": -1.0}, None),
        ("round(x)", {"x": 2.5}, 2.0),
        ("floor(x) + ceil(x)", {"x": 1.5}, 3.0),
        ("min(x, i, 3)", {"x": 7.0, "i": 5}, 3.0),
        ("max(i, j)", {"i": LARGE, "j": 1}, LARGE),
        ("min(x, y)", {"x": 1.0, "y": None}, None),
        ("x < 6 and not b", {"x": 3.0, "b": False}, True),
        ("x < 6 or b", {"x": None, "b": True}, True),
        ("x < 6 and b", {"x": None, "b": False}, False),
        ("x < 6 and b", {"x": None, "b": True}, None),
        ("x != y", {"x": None, "y": 1.0}, None),
        ("isnull(x) or isnull(i)", {"x": 1.0, "i": None}, True),
        ("coalesce(x, y, 0)", {"x": None, "y": 2.0}, 2.0),
        ("coalesce(i, 7)", {"i": None}, 7),
        ("where(b, i, x)", {"b": True, "i": 3, "x": 0.5}, 3.0),
        ("where(b, i, j)", {"b": None, "i": 3, "j": 4}, None),
        ("t == 'it''s'", {"t": "it's"}, True),
        ("t != 'a'", {"t": None}, None),
        ("b + b", {"b": True}, 2),
        ("hour(m)", {"m": 1_700_000_000_000_000}, 22),
        ("weekday(m)", {"m": 1_700_000_000_000_000}, 1),
        ("hour(m)", {"m": -1}, 23),
        ("weekday(m)", {"m": -1}, 2),
        ("(m - m) / 60", {"m": 5}, 0.0),
    ],
)
def test_an_expression_has_its_value(expression: str, given: dict[str, Any], wanted: Any) -> None:
    assert value(expression, **given) == wanted


@pytest.mark.parametrize(
    ("expression", "at", "words"),
    [
        ("amount +", 9, "the end of the expression"),
        ("amount %% 2", 9, "'%'"),
        ("1 < x < 2", 7, "write a < b and b < c"),
        ("system('rm')", 1, "the functions abs, ceil"),
        ("if(b, 1, 2)", 1, "write where(condition, then, else)"),
        ("x.__class__", 2, "'.'"),
        ("lambda: 1", 7, "':'"),
        ("(" * 40 + "1" + ")" * 40, MAX_DEPTH + 2, "levels of nesting"),
        ("-" * 1000 + "1", MAX_DEPTH + 2, "levels of nesting"),
        ("not " * 400 + "b", 4 * (MAX_DEPTH + 1) + 1, "levels of nesting"),
        ("1" + "+1" * 500, 202, "at most 200"),
        ("9" * 1500, 1, "integers up to"),
        ("1e999", 1, "64-bit float"),
        ("1" * 2001, 2001, "at most 2000"),
        ("'open", 1, "without an end"),
        ("x\u200b + 1", 2, "numbers, names"),
        ('"' + "n" * 300 + '"', 1, "1 to 256 printable"),
        ("log(x, y)", 1, "2 arguments of log"),
        ("", 1, "the end of the expression"),
    ],
)
def test_what_is_no_expression_is_refused_with_the_character(expression: str, at: int, words: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        parse(expression)

    assert f"character {at}:" in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("expression", "at", "words"),
    [
        ("x + t", 3, "text in +"),
        ("x and b", 3, "compare it, such as x != 0"),
        ("t < 'a'", 3, "text < text"),
        ("hour(x)", 1, "a moment"),
        ("where(b, 1, 'a')", 1, "values of one type"),
        ("t", 1, "a result of type text"),
        ("amout * 2", 1, "the name amout"),
    ],
)
def test_operands_of_the_wrong_type_are_refused(expression: str, at: int, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        resolve_features([RequestFeature(name="f", expression=expression)], TYPES, where="here")

    (fault,) = refused.value.faults
    assert fault.where.endswith(f"character {at}")
    assert words in f"{fault.given} {fault.allowed} {fault.fix}"


def test_the_types_of_request_inputs_are_told_by_their_use() -> None:
    node = parse("where(hour(at) < 6 or country == 'AE', amount, 0)")

    assert guess_types(node) == {"at": MOMENT, "country": TEXT, "amount": FLOAT}
    assert names_of(node) == ("at", "country", "amount")


def test_a_feature_uses_those_before_it_and_names_are_taken_once() -> None:
    features = [
        RequestFeature(name="half", expression="x / 2"),
        RequestFeature(name="quarter", expression="half / 2"),
        RequestFeature(name="Half", expression="later"),
    ]

    with pytest.raises(InvalidInput) as refused:
        resolve_features(features, TYPES, where="here")

    faults = " ".join(fault.where for fault in refused.value.faults)
    assert "Half = later, character 1" in faults
    assert "here: half" in faults
    assert "quarter" not in faults


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab1.+-*/%<>=!(),'\" eandotrx&|\\\n\0é", max_size=60))
def test_no_text_does_more_than_parse_or_be_refused(text: str) -> None:
    try:
        node, end = parse(text), 0
    except ExpressionError as error:
        node, end = parse("0"), error.at

    assert 0 <= end <= len(text)
    assert set(guess_types(node)) == set(names_of(node))


# ------------------------------------------------------------------------------ training and serving

FEATURES = tuple(
    RequestFeature(name=name, expression=expression)
    for name, expression in {
        "ratio": "x / y",
        "is_night": "hour(m) < 6 or weekday(m) == 4",
        "scaled": "log1p(abs(x)) * exp(min(y, 3)) - sqrt(abs(y)) ** 1.5 + log(x)",
        "large": "i % 1000 + j",
        "product": "i * j",
        "clean": "coalesce(x, i / 3, -1)",
        "chosen": "where(t == 'a' and not isnull(y), max(x, y), ratio)",
        "rest": "x % 0.7",
    }.items()
)
ROWS = arrow_tables.BATCH_ROWS + 10_003


def awkward_rows() -> pa.Table:
    """Return rows with nulls, NaN, infinities, zeros of both signs, and integers beyond 2**53."""
    rng = np.random.default_rng(5)

    def floats() -> pa.Array:
        values = rng.normal(0, 10, ROWS) ** 3
        special = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.8e308, -1.0])
        at = rng.integers(0, ROWS, ROWS // 3)
        values[at] = rng.choice(special, len(at))
        return pa.array(values, mask=rng.random(ROWS) < 0.1)

    def integers() -> pa.Array:
        values = rng.integers(-(2**63), 2**63 - 1, ROWS) >> rng.integers(0, 60, ROWS)
        values[rng.integers(0, ROWS, ROWS // 10)] = 0
        return pa.array(values, mask=rng.random(ROWS) < 0.1)

    moments = pa.array(rng.integers(-(2**55), 2**55, ROWS), pa.int64(), mask=rng.random(ROWS) < 0.1)
    return pa.table(
        {
            "x": floats(),
            "y": floats(),
            "i": integers(),
            "j": integers(),
            "m": moments.cast(pa.timestamp("us", "UTC")),
            "t": pa.array(rng.choice(np.array(["a", "b", None]), ROWS), pa.string()).dictionary_encode(),
        }
    )


def bits(value: float | int | bool | None) -> object:
    return struct.pack("<d", value) if isinstance(value, float) else value


def test_a_training_set_and_requests_have_the_same_bits_over_batch_boundaries() -> None:
    rows = awkward_rows()
    features = resolve_features(FEATURES, column_types(rows), where="here")
    offline = add_columns(rows, features).select([each.name for each in features]).to_pydict()
    moments = rows["m"].cast(pa.int64()).to_pylist()
    python = {name: rows[name].to_pylist() for name in ("x", "y", "i", "j", "t")} | {"m": moments}

    sizes, at = (1, 2, 3, 7, 8, 64, 1000, 5000), 0
    differences = []
    for number in range(ROWS):
        size = min(sizes[number % len(sizes)], ROWS - at)
        columns: dict[str, ValueColumn] = {
            name: column_of(TYPES[name], values[at : at + size]) for name, values in python.items()
        }
        computed = evaluate([(each.name, each.expression) for each in features], columns, size)
        for each in features:
            found = computed[each.name]
            online = [
                None if missing else one
                for one, missing in zip(found.values.tolist(), found.is_missing.tolist(), strict=True)
            ]
            wanted = offline[each.name][at : at + size]
            differences += [
                (each.name, at + n, one, other)
                for n, (one, other) in enumerate(zip(online, wanted, strict=True))
                if bits(one) != bits(other)
            ]
        at += size
        if at >= ROWS:
            break

    assert at == ROWS
    assert differences == []
    complete = [name for name, values in offline.items() if None not in values]
    assert complete == ["clean"]


NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
DRIVER = Entity(name="driver", key="driver", type=INTEGER)
STATS = FeatureView(
    name="stats", entities=("driver",), columns=(Feature(name="mean", type=FLOAT),), event_time="at"
)


def spine() -> pa.Table:
    return pa.table(
        {
            "driver": pa.array([1, 2, 1], pa.int64()),
            "amount": pa.array([9, 5, None], pa.int32()),
            "event_time": pa.array([NOON, NOON, NOON + timedelta(hours=15)], pa.timestamp("us", "UTC")),
        }
    )


def prepared(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(STATS,))
    rows = {
        "driver": [1],
        "at": pa.array([NOON - timedelta(days=1)], pa.timestamp("us", "UTC")),
        "mean": [4.0],
    }
    env.features.ingest("stats", data=env.put("rows", pa.table(rows)))


COMPUTED = (
    RequestFeature(name="ratio", expression="amount / stats__mean"),
    RequestFeature(name="is_night", expression="hour(event_time) < 6"),
)


def test_a_training_set_has_the_computed_columns_and_says_how(env: FeaturesEnv) -> None:
    prepared(env)
    given: dict[str, Any] = {"spine": env.put("spine", spine()), "views": ("stats",)}

    made = env.features.training_set("computed", request_features=COMPUTED, **given)
    rows = pa.Table.from_batches(list(env.features.load("computed"))).to_pydict()

    assert rows["ratio"] == [2.25, None, None]
    assert rows["is_night"] == [False, False, True]
    assert made.columns[-2:] == ("ratio", "is_night")
    assert [each.expression for each in made.request_features] == [each.expression for each in COMPUTED]
    assert made.request_features[0].inputs == {"amount": INTEGER, "stats__mean": FLOAT}
    assert env.features.training_set("computed", request_features=COMPUTED, **given).id == made.id
    with pytest.raises(AlreadyExists, match="other rows or features"):
        env.features.training_set("computed", request_features=COMPUTED[:1], **given)


def test_an_expression_over_unknown_columns_is_refused_before_anything_is_written(
    light_env: FeaturesEnv,
) -> None:
    prepared(light_env)
    wrong = (RequestFeature(name="ratio", expression="amount / stats__men"),)

    with pytest.raises(InvalidInput) as refused:
        light_env.features.training_set(
            "wrong", spine=light_env.put("spine", spine()), views=("stats",), request_features=wrong
        )

    (fault,) = refused.value.faults
    assert "ratio = amount / stats__men, character 10" in fault.where
    assert fault.fix == "did you mean stats__mean?"
    assert light_env.features.training_sets().items == ()


def test_a_computed_column_may_not_replace_one_of_the_spine(light_env: FeaturesEnv) -> None:
    prepared(light_env)
    wrong = (RequestFeature(name="Amount", expression="amount * 2"),)

    with pytest.raises(InvalidInput, match="request-time features are not valid"):
        light_env.features.training_set(
            "wrong", spine=light_env.put("spine", spine()), views=("stats",), request_features=wrong
        )
