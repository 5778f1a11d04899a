"""The filter language: what it reads, and what it says of what it cannot read."""

from __future__ import annotations

import pytest

from falaj.errors import InvalidInput
from falaj.governance.search.filters import Condition, Order, parse_filter, parse_orders
from falaj.tracking.search import EXPERIMENT_WORDS, RUN_WORDS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metrics.auc > 0.9", Condition("metrics", "auc", ">", 0.9)),
        ("metric.auc<>-1e-3", Condition("metrics", "auc", "!=", -0.001)),
        ("metrics.val/loss <= .5", Condition("metrics", "val/loss", "<=", 0.5)),
        ("metrics.`top 5` = 1", Condition("metrics", "top 5", "=", 1.0)),
        ('metrics."top 5" = 1', Condition("metrics", "top 5", "=", 1.0)),
        ("metrics.a.b.5 = 1", Condition("metrics", "a.b.5", "=", 1.0)),
        ("metrics.x < inf", Condition("metrics", "x", "<", float("inf"))),
        ("params.lr = '0.1'", Condition("params", "lr", "=", "0.1")),
        ("parameter.o != 'it''s'", Condition("params", "o", "!=", "it's")),
        ('params.o = "adam w"', Condition("params", "o", "=", "adam w")),
        ("params.o IN ('a', 'b')", Condition("params", "o", "IN", ("a", "b"))),
        ("params.o is null", Condition("params", "o", "IS NULL")),
        ("tags.x IS NOT NULL", Condition("tags", "x", "IS NOT NULL")),
        ("tags.`mlflow.user` ILIKE '%a'", Condition("tags", "mlflow.user", "ILIKE", "%a")),
        ("tags.mlflow.user LIKE 'a%'", Condition("tags", "mlflow.user", "LIKE", "a%")),
        ("attributes.status = 'FINISHED'", Condition("attributes", "status", "=", "finished")),
        ("status NOT IN ('FAILED')", Condition("attributes", "status", "NOT IN", ("failed",))),
        ("attr.`Run name` = 'a'", Condition("attributes", "name", "=", "a")),
        ("start_time >= 1000", Condition("attributes", "started_at", ">=", (1_000_000, 1_000_999))),
        ("end_time < '1970-01-01T00:00:01Z'", Condition("attributes", "ended_at", "<", (10**6, 10**6))),
        ("datasets.name = 'd'", Condition("datasets", "name", "=", "d")),
    ],
)
def test_a_condition_is_read(text: str, expected: Condition) -> None:
    assert parse_filter(text, RUN_WORDS) == (expected,)


def test_conditions_are_joined_by_and() -> None:
    found = parse_filter("metrics.a > 1 and params.b = 'and' AND tags.c LIKE '%'", RUN_WORDS)

    assert [(each.entity, each.key) for each in found] == [("metrics", "a"), ("params", "b"), ("tags", "c")]
    assert parse_filter("  ", RUN_WORDS) == ()


@pytest.mark.parametrize(
    ("text", "position", "allowed"),
    [
        ("metrics.a ~ 1", 11, "comparison"),
        ("metrics.a > 'x'", 13, "a number"),
        ("metrics.a LIKE 'x'", 11, "one of =, !=, <, <=, >, >="),
        ("params.lr = 0.1", 13, "quotes"),
        ("params.lr > '0.1'", 11, "LIKE"),
        ("status = ", 10, "quotes"),
        ("metrics.a > 1 or metrics.b > 1", 15, "there is no OR"),
        ("(metrics.a > 1)", 1, "a name like metrics.KEY"),
        ("foo.bar = 'x'", 1, "a name like metrics.KEY"),
        ("datasets.size = 'x'", 10, "datasets.digest"),
        ("tags.x = 'abc", 10, "closing quote"),
        ("metrics. > 1", 10, "a name behind metrics."),
        ("run_id IN ()", 12, "quotes"),
        ("run_id IN ('a' 'b')", 16, "','"),
        ("end_time > 'noon'", 12, "milliseconds"),
        ("end_time > '2026-05-03T12:00'", 12, "milliseconds"),
        ("metrics.a > 1 and", 18, "a name like"),
        ("name = 'a'; DROP TABLE x", 11, "AND"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_position(text: str, position: int, allowed: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_filter(text, RUN_WORDS)

    (fault,) = refused.value.faults
    assert fault.where == "where"
    assert fault.given is not None
    assert f"position {position}" in fault.given
    assert allowed in str(fault.allowed)


def test_too_much_is_refused() -> None:
    for text in (" and ".join(["metrics.a > 1"] * 200), f"run_id IN ({','.join(['1'] * 2000)})"):
        with pytest.raises(InvalidInput):
            parse_filter(text.replace("1,", "'1',").replace("1)", "'1')"), RUN_WORDS)


def test_experiments_have_no_metrics() -> None:
    assert parse_filter("name LIKE 'a%' and last_update_time > 5", EXPERIMENT_WORDS)
    with pytest.raises(InvalidInput, match="where"):
        parse_filter("metrics.auc > 0.5", EXPERIMENT_WORDS)


def test_orders_are_read() -> None:
    found = parse_orders(["metrics.auc DESC", "start_time", "params.`a b` asc"], RUN_WORDS)

    assert found == (
        Order("metrics", "auc", descending=True),
        Order("attributes", "started_at"),
        Order("params", "a b"),
    )
    with pytest.raises(InvalidInput) as refused:
        parse_orders(["name", "metrics.auc down"], RUN_WORDS)
    assert refused.value.faults[0].where == "order_by.1"
